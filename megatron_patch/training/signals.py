"""Graceful stops: a signal, a time limit or a step limit ends the run at a step boundary.

A signal handler only raises a flag. The flags of all ranks are reduced together with the
finite check of every step (``finite.StepGuard``), so all ranks stop after the same step however the
signal reached them.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from megatron_patch.runtime.handlers import KeptHandlers

# With several reasons at once the largest is reported.
NO_STOP, STOP_TIME, STOP_USR1, STOP_TERM, STOP_INT = 0, 1, 2, 3, 4
REASONS = {
    STOP_TIME: "training.exit_after_minutes is over",
    STOP_USR1: "received SIGUSR1",
    STOP_TERM: "received SIGTERM",
    STOP_INT: "received SIGINT",
}
_SIGNALS = {signal.SIGUSR1: STOP_USR1, signal.SIGTERM: STOP_TERM, signal.SIGINT: STOP_INT}


class StopFlags:
    """This rank's reasons to stop, as handlers and clock see them.

    ``limit_minutes`` counts from construction; None: no limit.
    """

    def __init__(self, limit_minutes: float | None = None) -> None:
        self._limit = None if limit_minutes is None else 60 * limit_minutes
        self._begin = time.monotonic()
        self._signal = NO_STOP
        self._handlers = KeptHandlers(dict.fromkeys(_SIGNALS, self._handle))
        self._blocked: set[signal.Signals | int] = set()

    def install(self) -> None:
        """Catch TERM, USR1 and INT; a second INT interrupts at once. Main thread only.

        Whoever started this process may have blocked them, and that is inherited through torchrun:
        a blocked signal waits for ever, and the run would never hear of its time limit.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # Python delivers signals to the main thread; an embedding program owns them
        self._handlers.install()
        self._blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS) & set(_SIGNALS)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        self._handlers.restore()
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        self._blocked = set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        code = _SIGNALS[signal.Signals(number)]
        if code == STOP_INT and self._signal == STOP_INT:
            raise KeyboardInterrupt
        self._signal = max(self._signal, code)

    def code(self) -> int:
        """This rank's reason to stop now, ``NO_STOP`` if none."""
        if self._signal:
            return self._signal
        if self._limit is not None and time.monotonic() - self._begin >= self._limit:
            return STOP_TIME
        return NO_STOP

"""Signal handlers that stay ours.

Triton compiles with LLVM, and LLVM, when it first does, puts handlers of its own over SIGHUP,
SIGINT, SIGTERM, SIGUSR1 and SIGUSR2. Its handler hands most of them on to whoever had them before;
SIGUSR1, to LLVM a question for its progress, it keeps. Slurm's notice of the time limit is that
signal: a run on a GPU would train on until it is killed. Nobody is told when a library takes a
signal, and Python goes on to name its own handler, so a thread looks and puts it back.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

LOOK_SECONDS = 0.2
"""A signal that comes between a library's taking it and our next look can be lost."""


class KeptHandlers:
    """Python handlers that no native library replaces for longer than `LOOK_SECONDS`.

    ``handlers``: for each signal what ``signal.signal`` takes.

    Use in the main thread: Python sets handlers in no other.
    """

    def __init__(self, handlers: Mapping[signal.Signals, Callable[..., Any]]) -> None:
        self._handlers = dict(handlers)
        self._previous: dict[signal.Signals, Any] = {}
        self._done = threading.Event()
        self._watch: threading.Thread | None = None

    def install(self) -> None:
        """Install all of them and keep them from now on."""
        for number, handler in self._handlers.items():
            self._previous[number] = signal.signal(number, handler)
        own = {number: _native(number) for number in self._handlers}
        self._done.clear()
        self._watch = threading.Thread(
            target=self._keep, args=(own,), name="signal-handlers", daemon=True
        )
        self._watch.start()

    def restore(self) -> None:
        """Give the signals back to whoever had them in Python."""
        if self._watch is None:
            return
        self._done.set()
        self._watch.join()
        self._watch = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _keep(self, own: dict[signal.Signals, int | None]) -> None:
        while not self._done.wait(LOOK_SECONDS):
            for number, handler in own.items():
                if _native(number) != handler:
                    _set(number, handler)


# What the operating system calls: for every Python handler the same C function of the interpreter,
# which signal.signal installs and cannot be asked for. These two may be called from any thread.
_get = ctypes.pythonapi.PyOS_getsig
_get.restype, _get.argtypes = ctypes.c_void_p, [ctypes.c_int]
_set = ctypes.pythonapi.PyOS_setsig
_set.restype, _set.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]


def _native(number: int) -> int | None:
    found: int | None = _get(number)
    return found

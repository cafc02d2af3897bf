"""How far the run is, for whoever watches it: from outside by a file, from inside by a pulse.

The launcher names a file in ``MEGATRON_PATCH_HEARTBEAT``; the first rank keeps the step it has
begun in it. A crash at the same step again and again is told apart from bad luck by it. Without the
variable nothing is written.

`PULSE` is this process's own: step, phase and since when. The training code wraps what it does in
``with phase("save"):``, `faults.hang` watches that phases end, `faults.straggler` adds up how long
they take. Only the thread that trains writes it; a reader sees the state before or after a change,
never a mixture.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

VARIABLE = "MEGATRON_PATCH_HEARTBEAT"

PHASES = ("start", "data", "forward", "backward", "reduction", "optimizer", "record", "evaluation",
          "save", "end")  # fmt: skip
"""In the order of a step. ``start`` lasts until the first step begins; ``backward`` includes what a
pipeline stage waits between two micro-batches; ``record`` is what follows the update."""

PAUSES = ("evaluation", "save", "end")
"""Phases that are no part of a step's work and may take much longer."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a process is."""

    step: int
    """The step that has begun, counted from 1; 0 before the first."""
    phase: str
    since: float
    """``time.monotonic()`` when the phase began."""


class Pulse:
    """The beats of this process, and how long steps and phases took."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.now = Beat(0, "start", time.monotonic())
        self.finished = 0
        """Steps that ended in this attempt."""
        self.longest = 0.0
        """Seconds of the longest step so far, its evaluation and save left out.

        The first one compiled and connected: it counts until there is a second.
        """
        self._began = 0.0
        self._away = 0.0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        """Host seconds in each phase since the attempt began."""

    def step(self, step: int) -> None:
        """``step`` begins, with reading its data."""
        self.enter("data", step=step)
        self._began, self._away = self.now.since, 0.0

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """The current phase is over, ``phase`` begins."""
        before, moment = self.now, time.monotonic()
        spent = moment - before.since
        self.seconds[before.phase] += spent
        if before.phase in PAUSES:
            self._away += spent
        self.now = Beat(before.step if step is None else step, phase, moment)

    def refresh(self) -> None:
        """The current phase is alive: its time counts anew."""
        self.enter(self.now.phase)

    def stepped(self) -> None:
        """The step is over."""
        self.finished += 1
        moment = time.monotonic()
        pause = moment - self.now.since if self.now.phase in PAUSES else 0.0
        took = moment - self._began - self._away - pause
        self.longest = took if self.finished <= 2 else max(self.longest, took)


PULSE = Pulse()


@contextlib.contextmanager
def phase(name: str, *, then: str | None = None) -> Iterator[None]:
    """The block is phase ``name``; afterwards the phase before it goes on, or ``then`` begins.

    An error leaves the phase as it is: the crash ledger names the one that failed.
    """
    before = PULSE.now.phase
    PULSE.enter(name)
    yield
    PULSE.enter(before if then is None else then)


class Heartbeat:
    """Tells the pulse and, on the first rank, the launcher's file which step has begun.

    ``rank``: this process's rank; only rank 0 writes (one ``pwrite`` a step).
    """

    def __init__(self, rank: int) -> None:
        name = os.environ.get(VARIABLE, "") if rank == 0 else ""
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644) if name else None
        self._length = 0

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The block is ``step`` (counted from 1), beginning with its data."""
        PULSE.step(step)
        if self._file is not None:
            text = b"%d\n" % step
            os.pwrite(self._file, text, 0)
            if len(text) < self._length:  # a rewind took a digit away
                os.ftruncate(self._file, len(text))
            self._length = len(text)
        yield
        PULSE.stepped()

    def close(self) -> None:
        PULSE.enter("end")
        if self._file is not None:
            os.close(self._file)
            self._file = None

"""How far the run is, for whoever watches it from outside.

The launcher names a file in ``MEGATRON_PATCH_HEARTBEAT``; the first rank keeps the step it has
begun in it. A crash at the same step again and again is told apart from bad luck by it, and a file
that no longer changes is a hang. Without the variable nothing is written.
"""

from __future__ import annotations

import os

VARIABLE = "MEGATRON_PATCH_HEARTBEAT"


class Heartbeat:
    """Writes the current step; one ``pwrite`` a step on the first rank, nothing on the others.

    Args:
        rank: this process's rank; only rank 0 writes.
    """

    def __init__(self, rank: int) -> None:
        name = os.environ.get(VARIABLE, "") if rank == 0 else ""
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644) if name else None

    def beat(self, step: int) -> None:
        """``step`` (counted from 1) begins."""
        if self._file is not None:
            os.pwrite(self._file, b"%d\n" % step, 0)  # digits never get fewer

    def close(self) -> None:
        """No more steps."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

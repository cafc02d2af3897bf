"""What can go wrong with checkpoints, said in words."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(RuntimeError):
    """No good checkpoint where one is required."""

    exit_code = 4


class SaveError(CheckpointError):
    """A save was abandoned; earlier checkpoints are untouched."""

    exit_code = 1


class MismatchError(CheckpointError, ValueError):
    """A good checkpoint that does not fit this configuration; the text names the parameters."""

    exit_code = 2


class BadCheckpoint(Exception):
    """Why one checkpoint directory was refused."""

    def __init__(self, kind: str, why: str, *, damaged: bool = True) -> None:
        """``kind``: a slug for file names (``hash``, ``size`` ...); ``why``: a sentence.

        ``damaged`` is False where the directory itself may be fine (an unreadable disk, another
        key): such a directory is passed over but not moved aside.
        """
        super().__init__(why)
        self.kind = kind
        self.why = why
        self.damaged = damaged

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.kind, self.why, self.damaged)


def _rebuild(kind: str, why: str, damaged: bool) -> BadCheckpoint:
    return BadCheckpoint(kind, why, damaged=damaged)


def first_problem(problems: Sequence[Exception | None]) -> Exception | None:
    """The error all ranks raise, of what each of them found (None: nothing); None: nobody did.

    A file that another rank misses and the first one sees is no damage: that rank's node has
    another directory under this name, or none.
    """
    for rank, problem in enumerate(problems):
        if isinstance(problem, BadCheckpoint) and problem.kind == "missing" and rank > 0:
            why = (
                f"on rank {rank}: {problem.why}, though the first rank sees it; mount the "
                "directory of the checkpoints on every node"
            )
            return BadCheckpoint("unseen", why, damaged=False)
        if problem is not None:
            return problem
    return None

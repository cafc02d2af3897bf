"""What can go wrong with checkpoints, said in words."""

from __future__ import annotations


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

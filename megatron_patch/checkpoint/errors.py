"""What can go wrong with checkpoints, said in words."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from megatron_patch.runtime.io_errors import may_pass


class CheckpointError(RuntimeError):
    """No good checkpoint where one is required."""

    exit_code = 4


class UnavailableError(CheckpointError):
    """The file system or the machine failed, not a checkpoint: the next attempt may succeed."""

    exit_code = 1


class SaveError(CheckpointError):
    """A save was abandoned; earlier checkpoints are untouched."""

    exit_code = 1


class MismatchError(CheckpointError, ValueError):
    """A good checkpoint that does not fit this configuration; the text names the parameters."""

    exit_code = 2


class BadCheckpoint(Exception):
    """Why one checkpoint directory was refused."""

    def __init__(
        self, kind: str, reason: str, *, damaged: bool = True, passing: bool = False
    ) -> None:
        """``kind``: a slug for file names (``hash``, ``size`` ...); ``reason``: a sentence.

        ``damaged`` is False where the directory itself may be fine (an unreadable disk, another
        key). ``passing`` where it may be read the next time, or on another node: it is not given up
        for an older one.
        """
        super().__init__(reason)
        self.kind, self.reason, self.damaged, self.passing = kind, reason, damaged, passing

    def __reduce__(self) -> tuple[object, ...]:
        options = {"damaged": self.damaged, "passing": self.passing}
        return partial(BadCheckpoint, self.kind, self.reason, **options), ()


MACHINE = ("CUDA error", "out of memory", "can't allocate memory")
"""In the text of torch's RuntimeErrors that are about the machine."""
CHAIN = 16
"""Exceptions looked at behind one another; a chain may be closed."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """``error``, then what is behind it."""
    cause: BaseException | None = error
    for _ in range(CHAIN):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def describe(error: BaseException) -> str:
    """One line about an exception, with the path and what a person can do where that is known.

    A full disk is looked for behind it as well: torch's archive writer, which cannot finish a file
    after that, says "unexpected pos 704 vs 598".
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "the disk or quota is full: free space or lower checkpoint.keep_last"
            return f"{type(cause).__name__}: {cause} ({remedy})"
    return f"{type(error).__name__}: {error}"


def passing_cause(error: BaseException) -> BaseException | None:
    """What of the machine or the file system failed, in a way that another attempt may not meet.

    Looked for behind ``error`` as well: zipfile says "not a zip file" of a read that failed.
    """
    for cause in causes(error):
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and may_pass(cause)):
            return cause
        if isinstance(cause, RuntimeError) and any(words in str(cause) for words in MACHINE):
            return cause
    return None


def is_passing(error: BaseException) -> bool:
    """Whether another attempt may not meet ``error``."""
    return passing_cause(error) is not None


def gone(path: Path) -> str:
    """Why a checkpoint cannot be read that was there a moment ago; "" where it still is."""
    if os.path.lexists(path):
        return ""
    return (
        f"{path.name} is not there any more: the run that trains has deleted it "
        f"(checkpoint.keep_last) or moved it aside; a line in {path.parent / 'pinned'} keeps one"
    )


def unreadable(name: str, error: Exception) -> BadCheckpoint:
    """A file or directory that could not be read, and may be fine."""
    text = f"cannot read {name}: {error}"
    return BadCheckpoint("unreadable", text, damaged=False, passing=is_passing(error))


def no_checkpoint(text: str, *, passing: bool) -> CheckpointError:
    """The error that ends an attempt: one that is tried again where ``passing``, or for good."""
    return UnavailableError(text) if passing else CheckpointError(text)


def first_problem(problems: Sequence[Exception | None]) -> Exception | None:
    """The error all ranks raise, of what each of them found (None: nothing); None: nobody did.

    A file that another rank misses and the first one sees is no damage: that rank's node has
    another directory under this name, or none.
    """
    for rank, problem in enumerate(problems):
        if isinstance(problem, BadCheckpoint) and problem.kind == "missing" and rank > 0:
            text = (
                f"on rank {rank}: {problem.reason}, though the first rank sees it; mount the "
                "directory of the checkpoints on every node"
            )
            return BadCheckpoint("unseen", text, damaged=False, passing=True)
        if problem is not None:
            return problem
    return None

"""The one exception of this room, and what it says where a file system did not answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_patch.runtime.io_errors import may_pass


class Unanswered(str):
    """A problem of the file system's, not of the data's: the next attempt may not meet it."""

    __slots__ = ()


def unread(path: str | Path, error: OSError, remedy: str = "") -> str:
    """That a file cannot be read; an `Unanswered` where that may pass, else with ``remedy``."""
    text = f"{path}: cannot be read ({error.strerror})"
    if may_pass(error):
        return Unanswered(f"{text}; the file system, not the data: try again, or on other nodes")
    return f"{text}; {remedy}" if remedy else text


class DataError(ValueError):
    """Data, or a description of data, that must not be used.

    ``problems`` lists every finding, each naming the file, what differs and the remedy; the text
    of the exception is the whole list. ``exit_code`` is 2, which is never tried again; 1, a crash
    like any other, where the file system did not answer and nothing else is wrong.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        lines = self.problems
        self.exit_code = 1 if lines and all(isinstance(p, Unanswered) for p in lines) else 2
        if len(lines) > 1:
            lines = [f"{len(lines)} problems with the data:", *(f"  - {line}" for line in lines)]
        super().__init__("\n".join(lines))

"""The one exception of this room."""

from __future__ import annotations

from collections.abc import Sequence


class DataError(ValueError):
    """Data, or a description of data, that must not be used.

    ``problems`` lists every finding, each naming the file, what differs and the remedy; the text
    of the exception is the whole list.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        lines = self.problems
        if len(lines) > 1:
            lines = [f"{len(lines)} problems with the data:", *(f"  - {line}" for line in lines)]
        super().__init__("\n".join(lines))

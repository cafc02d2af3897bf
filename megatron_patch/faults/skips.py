"""Which global batches a run leaves out, and the file that remembers it.

Global batch n (counted from 0) is what step n + 1 trains on in a run that leaves nothing out. A run
that has left windows out trains on the others in the same order: the order of samples stays a
function of seed, step and this list. ``<run_dir>/skipped_batches.json`` holds it, is written before
the run goes on, and every checkpoint carries a copy for runs that start from it elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.runtime.files import write_whole
from megatron_patch.schema.problem import ConfigError, Problem

FILE = "skipped_batches.json"

Window = tuple[int, int]
"""(first global batch left out, how many)."""


@dataclass(frozen=True, slots=True)
class Skips:
    """The windows left out so far, ascending and apart from each other, and what made them."""

    windows: tuple[Window, ...] = ()
    rewinds: int = 0
    """Rewinds of this run so far."""

    def batch(self, step: int) -> int:
        """The global batch of ``step`` (1-based)."""
        at = step - 1
        for first, count in self.windows:
            if at < first:
                break
            at += count
        return at

    def trained(self, steps: int) -> tuple[int, tuple[Window, ...]]:
        """What the first ``steps`` steps were: the end of their batches, the windows before it."""
        end = self.batch(steps) + 1 if steps else 0
        return end, tuple((f, min(n, end - f)) for f, n in self.windows if f < end)

    def add(self, first: int, count: int) -> Skips:
        """One more rewind, which leaves batches ``first .. first + count - 1`` out."""
        return Skips(merged([*self.windows, (first, count)]), self.rewinds + 1)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for file and checkpoint."""
        return {"windows": [list(w) for w in self.windows], "rewinds": self.rewinds}

    @classmethod
    def from_dict(cls, values: Any) -> Skips:
        """Inverse of `as_dict`.

        Raises ValueError: it is not one.
        """
        if type(values) is not dict or set(values) != {"windows", "rewinds"}:
            raise ValueError(f"expected windows and rewinds, found {values!r}")
        windows = values["windows"]
        flat = [n for w in windows for n in w] if type(windows) in (list, tuple) else None
        counts = [*flat, values["rewinds"]] if flat is not None else [None]
        if any(type(n) is not int or n < 0 for n in counts) or any(len(w) != 2 for w in windows):
            raise ValueError(f"expected windows [first, count] of counts, found {values!r}")
        return cls(merged([(f, c) for f, c in windows]), values["rewinds"])


def merged(windows: Sequence[Window]) -> tuple[Window, ...]:
    """The same batches as ascending windows that do not touch."""
    found: list[Window] = []
    for first, count in sorted(w for w in windows if w[1] > 0):
        if found and first <= sum(found[-1]):
            begin, length = found[-1]
            found[-1] = (begin, max(length, first + count - begin))
        else:
            found.append((first, count))
    return tuple(found)


def read(run_dir: Path) -> Skips | None:
    """What the file of a run says; None when it has none.

    Raises ConfigError: the file is not what this program writes.
    """
    file = run_dir / FILE
    if not file.exists():
        return None
    try:
        return Skips.from_dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        text = (
            f"{file}: {error}; it decides which data is trained on: put the right one back, e.g. "
            '{"windows": [[100, 5]], "rewinds": 1}'
        )
        raise ConfigError([Problem("run_dir", text)]) from None


def write(run_dir: Path, skips: Skips) -> None:
    write_whole(run_dir / FILE, json.dumps(skips.as_dict()) + "\n")

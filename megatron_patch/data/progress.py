"""Progress of long file work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 15.0


def human(count: float, unit: str = "") -> str:
    """``1234567`` -> ``1.23M``, with ``unit`` behind it."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{letter}{unit}"
    return f"{count:.0f}{unit}"


class Progress:
    """Counts bytes towards ``total``; use as a context manager."""

    def __init__(self, what: str, total: int, *, show: bool = True) -> None:
        plain: dict[str, Any] = {} if sys.stderr.isatty() else {
            "file": _Lines(),
            "bar_format": "{desc}: {percentage:.0f}% of {total_fmt}B, {rate_fmt}, {remaining} left"
            "{postfix}",
            # Nothing of work that is done before the first line is due.
            "delay": LINE_SECONDS, "mininterval": LINE_SECONDS, "maxinterval": LINE_SECONDS,
        }  # fmt: skip
        options: dict[str, Any] = {"unit": "B", "unit_scale": True, "dynamic_ncols": not plain}
        self._bar = tqdm(desc=what, total=total, disable=not show, **options, **plain)

    def set(self, done: int, note: str = "") -> None:
        """``done`` bytes of the total are behind us; ``note`` follows the figures."""
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class _Lines:
    """Standard error, where each state of a bar is a line of its own."""

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line:
            print(line, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()

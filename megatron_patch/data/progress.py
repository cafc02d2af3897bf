"""Progress of long file work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

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
        self._what, self._total, self._show = what, max(total, 1), show
        self._bar = (
            tqdm(total=total, desc=what, unit="B", unit_scale=True, dynamic_ncols=True)
            if show and sys.stderr.isatty()
            else None
        )
        self._start = self._last = time.monotonic()
        self._first = self._done = 0

    def set(self, done: int, note: str = "") -> None:
        """``done`` bytes of the total are behind us; ``note`` follows the figures."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._done)
        self._done = done
        now = time.monotonic()
        if self._show and self._bar is None and now - self._last >= LINE_SECONDS:
            self._last = now
            rate = (done - self._first) / (now - self._start)
            left = f"{(self._total - done) / rate:.0f} s left" if rate > 0 else "time left unknown"
            print(
                f"{self._what}: {done / self._total:.0%} of {human(self._total, 'B')}, "
                f"{human(rate, 'B/s')}, {left}{', ' + note if note else ''}",
                file=sys.stderr,
                flush=True,
            )

    def skip(self, done: int) -> None:
        """Bytes that took no time (work of an earlier attempt): no part of the rate."""
        self._first += done - self._done
        if self._bar is not None:
            self._bar.initial += done - self._done
        self.set(done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

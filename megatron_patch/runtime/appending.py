"""Files that records are appended to, and that a run can do without.

A full disk, a quota or a file server that goes away must not end a training of weeks, and never one
rank of it alone: the others would wait for it until they are killed. So what diagnostics write goes
through here. A record that cannot be written is told, counted and left out; the next one is tried
again. It leaves no part of itself behind: readers find whole records only.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_patch.runtime.files import write_all
from megatron_patch.runtime.growing import Resumed, resume_table

log = logging.getLogger(__name__)


class Spared:
    """Calls that a run can do without: their OSError is told and counted, not raised.

    Told once when it begins to fail, and once when it works again.

    Args:
        name: of the file, for people.
        tell: takes a line; default: a warning in the log.
    """

    def __init__(self, name: str, *, tell: Callable[[str], None] = log.warning) -> None:
        self.name, self._tell = name, tell
        self._failing, self._missing = False, 0

    def attempt(self, call: Callable[[], Any], *, records: int = 1) -> bool:
        """Whether ``call`` was done; if not, ``records`` are missing."""
        try:
            call()
        except OSError as error:
            self._missing += records
            if not self._failing:
                self._failing = True  # before it is told: that may be written here, too
                self._tell(
                    f"{self.name}: cannot be written ({error}); the run goes on, and tries again "
                    "at the next record"
                )
            return False
        if self._failing and records:
            self._failing = False
            self._end("written again")
        return True

    def close(self) -> None:
        """No call follows: tell what is missing, if that has not been told."""
        if self._failing:
            # Failing while it is told: that may be written here, too, and is not told again.
            self._end("not written to the end")
            self._failing = False

    def _end(self, how: str) -> None:
        missing, self._missing = self._missing, 0
        self._tell(f"{self.name}: {how}; records that are missing: {missing:,}")


class Appended:
    """A file of one process that grows by whole records; see the module.

    Args:
        path: in a directory that exists, or that ``begin`` makes.
        header: what a new file begins with.
        lines: records are lines; one that a killed process left unfinished is ended first.
        size: bytes of a record, where all have the same.
        begin: called before the file is opened for the first time, until it succeeds.
        tell: as `Spared` has it.
    """

    def __init__(
        self,
        path: Path,
        *,
        header: bytes = b"",
        lines: bool = True,
        size: int = 1,
        begin: Callable[[], None] | None = None,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        self.path, self.spared = path, Spared(path.name, tell=tell)
        self._header, self._lines, self._size, self._begin = header, lines, size, begin
        self._handle: int | None = None
        self._end: int | None = None
        """Where the last whole record ends, as far as this process knows."""
        self._lock = threading.RLock()  # lines come from threads, too

    @property
    def begun(self) -> bool:
        """Whether ``begin`` is done."""
        return self._begin is None

    def begin(self) -> bool:
        """Open the file now, not at the first record; whether that was possible."""
        return self.spared.attempt(self._opened, records=0)

    def append(self, record: bytes) -> bool:
        """Write a record; whether it is in the file."""
        return self.spared.attempt(lambda: self._write(record))

    def close(self) -> None:
        """Release the file, and tell what is missing in it; safe to call twice."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:  # some file servers tell only here that their disk is full
                self.spared.attempt(lambda: os.close(handle))
        self.spared.close()

    def _write(self, record: bytes) -> None:
        with self._lock:
            handle, end = self._opened()
            try:
                write_all(handle, record)
            except OSError:
                self._drop(handle, end)
                raise
            self._end = end + len(record)

    def _opened(self) -> tuple[int, int]:
        """The open file, whole up to its end, and that end."""
        with self._lock:
            if self._begin is not None:
                self._begin()
                self._begin = None
            if self._handle is not None and self._end is not None:
                return self._handle, self._end
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            handle = os.open(self.path, flags, 0o666)
            end = 0
            try:
                there = os.fstat(handle).st_size
                # A server that lost what it had taken leaves less than was written.
                end = there if self._end is None else min(self._end, there)
                end -= end % self._size
                if end < there:
                    os.ftruncate(handle, end)
                head = self._head(handle, end)
                write_all(handle, head)
            except OSError:
                self._drop(handle, end)
                raise
            self._handle, self._end = handle, end + len(head)
            return self._handle, self._end

    def _head(self, handle: int, end: int) -> bytes:
        """What has to stand before the next record."""
        if end == 0:
            return self._header
        return b"\n" if self._lines and os.pread(handle, 1, end - 1) not in (b"\n", b"") else b""

    def _drop(self, handle: int, end: int) -> None:
        """Take back what is behind ``end``, and open the file anew the next time."""
        self._handle, self._end = None, end
        with suppress(OSError):  # then it is taken back when the file is opened
            os.ftruncate(handle, end)
        with suppress(OSError):
            os.close(handle)


class Table(Appended):
    """A CSV whose first column is the step, continued by a resumed run.

    Args:
        path: of the table.
        columns: names.
        start_step: steps done; rows of later ones are cut off.
        aside: where they go; None: nowhere.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], *, start_step: int, aside: Path | None = None
    ) -> None:
        self._columns, self._start_step = list(columns), start_step
        self._resumed: Resumed | None = None

        def resume() -> None:
            if path.exists():
                self._resumed = resume_table(path, columns, start_step=start_step, aside=aside)

        super().__init__(path, header=_csv([columns]), begin=resume)
        self.begin()

    @property
    def dropped(self) -> int:
        """Rows that were cut off."""
        return 0 if self._resumed is None else self._resumed.dropped

    def note(self, name: str) -> str | None:
        """The line that tells of columns it did not have, if there are any."""
        return None if self._resumed is None else self._resumed.note(name, self._start_step)

    def rows(self, rows: Iterable[Sequence[Any]]) -> bool:
        """Append rows of ``columns``, all of them or none; whether they are in the file."""
        return self.append(_csv(self._in_order(row) for row in rows))

    def _in_order(self, row: Sequence[Any]) -> Sequence[Any]:
        """As the file has them: one of another version has others too."""
        if self._resumed is None or self._resumed.columns == self._columns:
            return row
        named = dict(zip(self._columns, row, strict=True))
        return [named.get(name, "") for name in self._resumed.columns]


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def append_line(path: Path, line: str, *, durable: bool = False) -> None:
    """Append a line to a file that several processes may write, on a line of its own.

    A line that a killed process left unfinished is ended first and swallows nothing.

    Args:
        path: created where it does not exist.
        line: without its end.
        durable: force it to disk.

    Raises:
        OSError: it could not be written, or not all of it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        # As a rule one write: lines of several ranks do not mix.
        write_all(handle, (f"\n{line}\n" if torn else f"{line}\n").encode())
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)

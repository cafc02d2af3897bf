"""Append-only records that a run can do without; every attempt continues the same files.

A full disk, a quota or a lost file server must not end a training of weeks, least of all one rank
of it. A record that cannot be written is left out, logged once and counted; the next one is tried
again. Nothing is cut back at a resume or a rewind: rows of `StepCsv` carry the number of their
attempt, and `read_rows` lets a newer attempt's row replace those of its step and of later ones.
"""

from __future__ import annotations

import bisect
import csv
import io
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from megatron_patch.runtime.files import replacing, write_all

log = logging.getLogger(__name__)

LAST_ROWS = 12
"""Looked at to tell how far rows are apart; rows of evaluations stand between others."""


class BestEffort:
    """Runs calls whose OSError costs records and not the run.

    The first failure of a series is logged, and its end with the number of missing records.

    Args:
        name: of the file, for messages.
        report: takes a message; default: a warning in the log.
    """

    def __init__(self, name: str, *, report: Callable[[str], None] = log.warning) -> None:
        self.name, self._report = name, report
        self._failing, self._missing = False, 0

    def attempt(self, call: Callable[[], Any], *, records: int = 1) -> bool:
        """Whether ``call`` was done; if not, ``records`` are missing."""
        try:
            call()
        except OSError as error:
            self._missing += records
            if not self._failing:
                self._failing = True  # before it is logged: that may be written here, too
                self._report(
                    f"{self.name}: cannot be written ({error}); the run goes on, and tries again "
                    "at the next record"
                )
            return False
        if self._failing and records:
            self._failing = False
            self._end("written again")
        return True

    def close(self) -> None:
        """No call follows: log what is missing, if that has not been logged."""
        if self._failing:
            self._end("not written to the end")
            self._failing = False  # after it is logged: that may fail here, too

    def _end(self, how: str) -> None:
        missing, self._missing = self._missing, 0
        self._report(f"{self.name}: {how}; records that are missing: {missing:,}")


class AppendOnlyFile:
    """A file of one process that grows by whole records, on a `BestEffort` basis.

    Args:
        path: in a directory that exists, or that ``begin`` makes.
        header: what a new file begins with.
        size: bytes of a record, where all have the same; a part of one at the end is cut off.
            None: records are lines; an unfinished line at the end gets its newline.
        begin: called before the file is opened for the first time, until it succeeds.
        report: as `BestEffort` has it.
    """

    def __init__(
        self,
        path: Path,
        *,
        header: bytes = b"",
        size: int | None = None,
        begin: Callable[[], None] | None = None,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        self.path, self.best_effort = path, BestEffort(path.name, report=report)
        self._header, self.size, self._begin = header, size, begin
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
        return self.best_effort.attempt(self._opened, records=0)

    def append(self, record: bytes) -> bool:
        """Write a record, all of it or nothing; whether it is in the file."""
        return self.best_effort.attempt(lambda: self._write(record))

    def close(self) -> None:
        """Release the file, and log what is missing in it; safe to call twice."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:  # some file servers report a full disk only here
                self.best_effort.attempt(lambda: os.close(handle))
        self.best_effort.close()

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
                end -= end % (self.size or 1)
                if end < there:
                    os.ftruncate(handle, end)
                head = self._header if end == 0 else b""
                if end and self.size is None and os.pread(handle, 1, end - 1) not in (b"\n", b""):
                    head = b"\n"
                write_all(handle, head)
            except OSError:
                self._drop(handle, end)
                raise
            self._handle, self._end = handle, end + len(head)
            return self._handle, self._end

    def _drop(self, handle: int, end: int) -> None:
        """Take back what is behind ``end``, and open the file anew the next time."""
        self._handle, self._end = None, end
        with suppress(OSError):  # then it is taken back when the file is opened
            os.ftruncate(handle, end)
        with suppress(OSError):
            os.close(handle)


class DamagedError(ValueError):
    """A file of an earlier attempt that cannot be read, and must not be overwritten."""

    exit_code = 2


class StepCsv(AppendOnlyFile):
    """A CSV with the step in its first column, continued by every attempt.

    Its columns are ``step``, ``attempt`` (counted from 1) and ``columns``. A file of another
    version gets the columns that it lacks, in one atomic replacement, and keeps its others. Rows
    from before attempts were counted have attempt 0.

    Args:
        path: of the table.
        columns: names after the first two.

    Raises DamagedError: the first line holds no column names, or rows are longer than it.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.attempt = 1
        self.columns = ["step", "attempt", *columns]
        """All that the file has, in its order."""
        self.added: list[str] = []
        """Columns that an earlier version's file did not have."""
        self.unknown: list[str] = []
        """Columns that only the file has: their cells stay empty from here on."""
        self.steps: list[int] = []
        """Steps of the rows that were there, as `read_rows` reads them."""
        self.zeros_after: int | None = None
        """The last step before the first zero byte, which a lost block of a disk leaves."""
        super().__init__(path, header=_csv([self.columns]), begin=self._continue)
        self.begin()

    def append_rows(self, *rows: Mapping[str, Any]) -> bool:
        """Append rows by column name, all of them or none; whether they are in the file."""

        def write() -> None:
            self._opened()  # only now the columns of the file are known
            found = [{"attempt": self.attempt, **row} for row in rows]
            self._write(_csv([row.get(name, "") for name in self.columns] for row in found))

        return self.best_effort.attempt(write)

    def _continue(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            header = file.readline()
            if header and not header.strip(b"\0") and not file.read(1):  # all of it is lost
                self.zeros_after = 0
                file.truncate(0)
                return
            names = self._names(header)
            if not header.endswith(b"\n"):  # killed before the first line was whole
                file.truncate(0)
                return
            file.truncate(self._scan(file, names))  # a row that a crash tore
        self.added = [name for name in self.columns if name not in names]
        self.unknown = [name for name in names if name not in self.columns]
        if self.added:
            _add_columns(self.path, names, self.added)
        self.columns = [*names, *self.added]

    def _scan(self, file: IO[bytes], names: list[str]) -> int:
        """Find steps, zero bytes and the newest attempt after the first line; where rows end."""
        end, last = file.tell(), b""
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            if b"\0" in line:
                if self.zeros_after is None:
                    self.zeros_after = self.steps[-1] if self.steps else 0
                continue
            with suppress(ValueError):
                step = int(line.split(b",", 1)[0])
                del self.steps[bisect.bisect_left(self.steps, step) :]
                self.steps.append(step)
                last = line
        with suppress(ValueError, LookupError, csv.Error):
            cells = next(csv.reader([last.decode(errors="replace")]))
            self.attempt = int(cells[names.index("attempt")]) + 1
        return end

    def _names(self, header: bytes) -> list[str]:
        """The names of columns in the first line, or in what a crash left of it."""
        whole = header.endswith(b"\n")
        try:
            names = next(csv.reader([header.decode()]), [])
        except (UnicodeDecodeError, csv.Error):
            good, names = False, []
        else:
            good = all(name.isidentifier() for name in names if name or whole)
            first = names[0] if names else ""
            good &= first == "step" if whole else "step".startswith(first)
            good &= not whole or len({*names}) == len(names)
        if good:
            return names
        raise DamagedError(
            f"{self.path}: its first line is not the names of columns, step first "
            f"({header[:40]!r}): the file is damaged; put it right, or move it away and the run "
            "begins a new one"
        )


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _add_columns(path: Path, names: list[str], added: list[str]) -> None:
    text: dict[str, Any] = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}
    new = ["0" if name == "attempt" else "" for name in added]
    with path.open(**text) as lines, replacing(path, **text) as out:
        reader, writer = csv.reader(lines), csv.writer(out)
        try:
            next(reader)
            writer.writerow(names + added)
            for row in filter(None, reader):
                if len(row) > len(names):
                    raise csv.Error(f"{len(row)} cells, and {len(names)} columns have a name")
                # A row that a crash tore stays short: readers leave it out.
                writer.writerow(row + new if len(row) == len(names) else row)
        except csv.Error as error:
            raise DamagedError(
                f"{path}: line {reader.line_num} cannot be given the columns of this version "
                f"({error}): the file is damaged; put it right, or move it away and the run "
                "begins a new one"
            ) from None


def read_rows(path: Path) -> list[dict[str, str]]:
    """`parse_rows` of a file, which a run may be writing to; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as lines:
        return parse_rows(lines)


def parse_rows(lines: Iterable[str]) -> list[dict[str, str]]:
    """The rows of a per-step CSV that count, by column name, in ascending steps.

    A newer attempt replaces earlier rows of its steps and of later ones: the last row of a step
    counts. Left out are rows that are not whole: without their newline, with fewer or more cells
    than the first line, with zero bytes (of a block that a disk lost), or without a step.
    """
    kept: list[dict[str, str]] = []
    steps: list[int] = []
    names: list[str] | None = None
    for line in lines:
        line = line.lstrip("\0")  # what follows lost blocks on their line is whole again
        if not line.endswith("\n") or "\0" in line:
            continue
        try:
            cells = next(csv.reader([line], strict=True), [])
            if names is None:
                names = cells
                continue
            row = dict(zip(names, cells, strict=True))
            step = int(row["step"])
        except (csv.Error, ValueError, KeyError):
            continue
        at = bisect.bisect_left(steps, step)
        del steps[at:], kept[at:]
        steps.append(step)
        kept.append(row)
    return kept


def gap(name: str, steps: Sequence[int], start: int, *, apart: int, own: bool) -> str | None:
    """A warning if rows between the last of ascending ``steps`` and ``start`` are missing.

    They are if it is further from ``start`` than rows are apart: ``apart``, or what the last ones
    say, the larger.

    Args:
        name: of the file.
        start: steps done.
        own: whether the run has checkpoints of its own. Else steps before ``start`` may be those
            of the run that it loads from, and a file without any is no news.
    """
    last = steps[: bisect.bisect_right(steps, start)][-LAST_ROWS:]
    end = last[-1] if last else 0
    widest = max((b - a for a, b in pairwise(last)), default=end)
    if start - end <= max(widest, apart) or not (end or own):
        return None
    if end == 0:
        return (
            f"warning: {name} has nothing before step {start:,}, where the run goes on; what it "
            "may have held of those steps is not there and will not come"
        )
    return (
        f"warning: {name} ends at step {end:,} and the run goes on after step {start:,}: the rows "
        "in between are not there and will not come"
    )


def append_line(path: Path, line: str) -> None:
    """Append a line to a file that several processes may write, on a line of its own.

    A line that a killed process left unfinished is ended first and swallows nothing.

    Args:
        path: created where it does not exist.
        line: without its end.

    Raises OSError: it could not be written, or not all of it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        # As a rule one write: lines of several ranks do not mix.
        write_all(handle, (f"\n{line}\n" if torn else f"{line}\n").encode())
    finally:
        os.close(handle)

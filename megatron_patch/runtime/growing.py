"""Files that only grow, cut back by a resumed run to where it goes on from.

They may be gigabytes after weeks: what a cut costs depends on what is cut off, and not on what
stays. What is cut off is on disk elsewhere before it goes here; a crash in between keeps it twice.
"""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO

from megatron_patch.runtime.files import replacing, write_whole

BLOCK = 1 << 20
LAST_ROWS = 12
"""Looked at to tell how far rows are apart; rows of evaluations stand between others."""


def cut(path: Path, at: int, aside: Path | None) -> None:
    """Shorten a file to ``at`` bytes; what follows goes to the end of ``aside``, if given."""
    with path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) <= at:
            return
        if aside is not None:
            file.seek(at)
            _copy_rest(file, aside)
        file.truncate(at)
        os.fsync(file.fileno())


def _copy_rest(file: IO[bytes], aside: Path) -> None:
    """Append the rest of a file to ``aside``, whole or not at all: the cut may be tried again."""
    with aside.open("ab", buffering=0) as out:
        end = out.tell()
        try:
            while block := file.read(BLOCK):
                left = memoryview(block)
                while left:
                    left = left[out.write(left) :]
            os.fsync(out.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                out.truncate(end)
            raise


def end_of_last(path: Path, wanted: Callable[[bytes], bool]) -> int:
    """Where the last wanted line ends, searched from the end of the file on; 0 if there is none.

    A line without its newline is never wanted: a crash tore it.
    """
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        read = b""  # what follows ``start`` and has not been looked at
        while start > 0:
            before, start = start, max(0, start - BLOCK)
            file.seek(start)
            read = file.read(before - start) + read
            # The first line is looked at when all of it has been read.
            first = 0 if start == 0 else read.find(b"\n") + 1
            if start > 0 and first == 0:
                continue
            *lines, torn = read[first:].split(b"\n")
            end = start + len(read) - len(torn)
            for line in reversed(lines):
                if wanted(line):
                    return end
                end -= len(line) + 1
            read = read[:first]
    return 0


class DamagedError(ValueError):
    """A file of an earlier attempt that cannot be read, and must not be overwritten."""

    exit_code = 2


def resume_table(path: Path, columns: Sequence[str], *, start_step: int, aside: Path | None) -> int:
    """Cut a CSV whose first column is the step, ascending, after the rows of ``start_step``.

    Rows of later steps go to ``aside`` (under another name if its columns are others), a row that
    a crash tore too. A table of other columns, of an earlier version, gets these; what it lacks is
    empty. Returns how many rows were cut off.

    Raises:
        DamagedError: the line of column names is not text.
    """
    with path.open("rb") as file:
        header = file.readline()
    try:
        header.decode()
    except UnicodeDecodeError:
        raise DamagedError(
            f"{path}: its first line, the names of columns, is not text ({header[:40]!r}): the "
            "file is damaged; put it right, or move it away and the run begins a new one"
        ) from None
    # A file killed before its header was whole has no row.
    at = max(end_of_last(path, lambda line: _step(line) <= start_step), _end(header))
    dropped = _lines_after(path, at)
    if dropped:
        # At 0 nothing but a torn header is there.
        kept = _with_header(aside, header) if aside is not None and at else None
        cut(path, at, kept)
        if kept is not None:
            _end_last_line(kept)
    if at == 0 or _cells(header) != list(columns):
        with path.open(newline="") as lines, replacing(path, newline="") as out:
            writer = csv.DictWriter(out, columns, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(csv.DictReader(lines))
    return dropped


def lacks_after(path: Path, step: int, *, apart: int) -> int | None:
    """Where a table ends, if it should reach ``step`` and ends earlier by more than rows are apart.

    That is ``apart`` or what its last rows say, the larger: it changes from attempt to attempt.
    """
    found: list[float] = []

    def one_of_the_last(line: bytes) -> bool:
        if _step(line) < float("inf"):
            found.append(_step(line))
        return len(found) == LAST_ROWS

    end_of_last(path, one_of_the_last)
    if not found:
        return None
    widest = max((b - a for b, a in pairwise(found)), default=found[0])
    return int(found[0]) if step - found[0] > max(widest, apart) else None


def _step(line: bytes) -> float:
    try:
        return int(line.split(b",", 1)[0])
    except ValueError:
        return float("inf")


def _end(header: bytes) -> int:
    return len(header) if header.endswith(b"\n") else 0


def _cells(header: bytes) -> list[str]:
    return next(csv.reader([header.decode(errors="replace")]), [])


def _lines_after(path: Path, at: int) -> int:
    with path.open("rb") as file:
        file.seek(at)
        return sum(1 for line in file if line.strip())


def _with_header(aside: Path, header: bytes) -> Path:
    """A file beside ``aside``, or itself, that begins with this header."""
    for number in range(1, 1000):
        path = aside if number == 1 else aside.with_suffix(f".{number}{aside.suffix}")
        if not path.exists():
            write_whole(path, header)
            return path
        with path.open("rb") as file:
            found = file.readline()
        if found == header:
            _end_last_line(path)  # where a full disk stopped it the last time
            return path
    raise AssertionError("a version cannot have that many sets of columns")


def _end_last_line(path: Path) -> None:
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")

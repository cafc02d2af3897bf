"""Files that only grow, cut back by a resumed run to where it goes on from.

They may be gigabytes after weeks: what a cut costs depends on what is cut off, and not on what
stays. What is cut off is on disk elsewhere before it goes here; a crash in between keeps it twice.
"""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from megatron_patch.runtime.files import replacing, write_all, write_whole

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
                write_all(out.fileno(), block)
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


@dataclass(frozen=True, slots=True)
class Resumed:
    """A table that is continued."""

    dropped: int
    """Rows that were cut off."""
    columns: list[str]
    """All it has, in its order; what a row has no value for is empty."""
    added: list[str]
    """Those that it did not have."""
    unknown: list[str]
    """Those that only it has: of another version, or renamed by somebody."""

    def note(self, name: str, step: int) -> str | None:
        """The line that tells of added columns, if there are any."""
        if not self.added:
            return None
        text = f"{name} gets the columns {', '.join(self.added)}, empty up to step {step:,}"
        if not self.unknown:
            return text
        names = ", ".join(self.unknown)
        return f"warning: {text}; this version does not know {names}: kept, and empty from here on"


def resume_table(
    path: Path, columns: Sequence[str], *, start_step: int, aside: Path | None
) -> Resumed:
    """Cut a CSV whose first column is the step, ascending, after the rows of ``start_step``.

    Rows of later steps go to ``aside`` (under another name if its columns are others), a row that
    a crash tore too. A table of another version gets the columns it lacks, and loses none.

    Raises:
        DamagedError: the first line is none of column names, or rows are longer than it.
    """
    with path.open("rb") as file:
        header = file.readline()
    names = _names(path, header, columns)
    # A file killed before its header was whole has no row.
    at = max(end_of_last(path, lambda line: _step(line) <= start_step), _end(header))
    dropped = _lines_after(path, at)
    if dropped:
        # At 0 nothing but a torn header is there.
        kept = _with_header(aside, header) if aside is not None and at else None
        cut(path, at, kept)
        if kept is not None:
            _end_last_line(kept)
    if at == 0:
        with replacing(path, newline="") as out:
            csv.writer(out).writerow(columns)
        return Resumed(dropped, list(columns), [], [])
    added = [name for name in columns if name not in names]
    if added:
        _add_columns(path, names, added)
    return Resumed(dropped, names + added, added, [n for n in names if n not in columns])


def lacks_after(path: Path, step: int, *, apart: int) -> int | None:
    """Where a table ends, if it should reach ``step`` and `falls_short`; 0 if it has no row."""
    found: list[int] = []

    def one_of_the_last(line: bytes) -> bool:
        if _step(line) < float("inf"):
            found.append(int(_step(line)))
        return len(found) == LAST_ROWS

    if path.exists():
        end_of_last(path, one_of_the_last)
    return falls_short(found, step, apart=apart)


def falls_short(last: Sequence[int], step: int, *, apart: int) -> int | None:
    """The last of the steps that are there, if it is further from ``step`` than they are apart.

    That is ``apart`` or what the ``last`` steps say, newest first, the larger: it changes from
    attempt to attempt. Without any it is 0.
    """
    end = last[0] if last else 0
    widest = max((b - a for b, a in pairwise(last)), default=end)
    return end if step - end > max(widest, apart) else None


def zeros_after(path: Path) -> int | None:
    """The last step before the first zero byte, 0 if none is; None where there is no such byte.

    File systems and disks give zeros for blocks that they lost. The whole table is read.
    """
    before = b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            at = block.find(b"\0")
            if at >= 0:
                *lines, _ = (before + block[:at]).split(b"\n")
                steps = (_step(line) for line in reversed(lines))
                return int(next((step for step in steps if step < float("inf")), 0))
            before = block
    return None


def gap(name: str, end: int, step: int) -> str:
    """The line that tells of what `lacks_after` or `falls_short` found."""
    if end == 0:
        return (
            f"warning: {name} has nothing before step {step:,}, where the run goes on; what it may "
            "have held of those steps is not there and will not come"
        )
    return (
        f"warning: {name} ends at step {end:,} and the run goes on after step {step:,}: the rows "
        "in between are not there and will not come"
    )


def _step(line: bytes) -> float:
    try:
        return int(line.split(b",", 1)[0])
    except ValueError:
        return float("inf")


def _end(header: bytes) -> int:
    return len(header) if header.endswith(b"\n") else 0


def _names(path: Path, header: bytes, columns: Sequence[str]) -> list[str]:
    """The names of columns in the first line, or in what a crash left of it."""
    try:
        names = next(csv.reader([header.decode()]), [])
    except (UnicodeDecodeError, csv.Error):
        good, names = False, []
    else:
        whole = _end(header) > 0
        good = all(name.isidentifier() for name in names if name or whole)
        first = names[0] if names else ""
        good &= first == columns[0] if whole else columns[0].startswith(first)
        good &= not whole or len({*names}) == len(names)
    if good:
        return names
    raise DamagedError(
        f"{path}: its first line is not the names of columns, {columns[0]} first "
        f"({header[:40]!r}): the file is damaged; put it right, or move it away and the run "
        "begins a new one"
    )


def _add_columns(path: Path, names: list[str], added: list[str]) -> None:
    text: dict[str, Any] = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}
    with path.open(**text) as lines, replacing(path, **text) as out:
        reader, writer = csv.reader(lines), csv.writer(out)
        try:
            next(reader)
            writer.writerow(names + added)
            for row in filter(None, reader):
                if len(row) > len(names):
                    raise csv.Error(f"{len(row)} cells, and {len(names)} columns have a name")
                writer.writerow(row + [""] * (len(names) + len(added) - len(row)))
        except csv.Error as error:
            raise DamagedError(
                f"{path}: line {reader.line_num} cannot be given the columns of this version "
                f"({error}): the file is damaged; put it right, or move it away and the run "
                "begins a new one"
            ) from None


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

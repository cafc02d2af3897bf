"""Inputs of ``prepare-data``: which files, and their raw bytes in batches of whole documents.

Batches depend on the inputs and ``batch_bytes`` alone, never on workers or interruptions. Cutting
is cheap and happens in one process, also for compressed files; parsing and tokenizing happen in
the workers (``encode``).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from megatron_patch.data import parquet
from megatron_patch.data.compression import opened
from megatron_patch.data.content import Content, Kind, NoDocuments, content_of
from megatron_patch.data.errors import DataError, unread
from megatron_patch.data.indexed import DTYPES
from megatron_patch.data.inputs import Entry, Walk
from megatron_patch.data.options import PrepareOptions

_READ = 1 << 20
_MOST_LISTED = 20
_MOST_PROBLEMS = 100


@dataclass(slots=True)
class File:
    """One file of documents."""

    path: Path
    content: Content
    size: int = field(init=False)
    """Bytes on disk, compressed where it is."""

    def __post_init__(self) -> None:
        self.size = self.path.stat().st_size


@dataclass(slots=True)
class Source:
    """One input as named by the user."""

    name: str
    """For the manifest: no directory of this machine."""
    files: list[File] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Entries that are not read, each with its reason."""
    cuts: int = 0
    """How often the separator of documents was met; known when it has been read."""

    @property
    def bytes(self) -> int:
        """On disk, compressed where the files are."""
        return sum(file.size for file in self.files)


_WORDS: dict[Kind, str] = {
    "file": "text", "separated": "text", "jsonl": "JSONL", "tokens": "token ids",
    "parquet": "parquet",
}  # fmt: skip


@dataclass(slots=True)
class Batch:
    """Whole documents of one source, as read."""

    source: int
    kind: Kind
    documents: list[bytes] = field(default_factory=list)
    """Raw documents, lines or token bytes."""
    places: list[str] = field(default_factory=list)
    """Where each document begins, for error messages: ``file`` or ``file, line 7``."""
    size: int = 0
    position: int = 0
    """Bytes of the inputs on disk read so far."""

    @property
    def sha256(self) -> str:
        """Hash of everything the batch's tokens are computed from."""
        digest = hashlib.sha256(self.kind.encode())
        for document in self.documents:
            digest.update(len(document).to_bytes(8, "little"))
            digest.update(document)
        return digest.hexdigest()


def describe(sources: list[Source], *, quiet: bool) -> list[str]:
    """For the log: what is read, what otherwise than named, and (also ``quiet``) what is not."""
    one = len(sources) == 1
    label = sources[0].name if one else f"{len(sources):,} inputs"
    files = [file for source in sources for file in source.files]
    left_out = [
        entry if one or entry.startswith(f"{source.name}:") else f"{source.name}: {entry}"
        for source in sources
        for entry in source.left_out
    ]
    lines = []
    if not quiet:
        kinds = Counter(
            " ".join(filter(None, (_WORDS[f.content.kind], f.content.packing))) for f in files
        )
        what = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        lines = [f"{label}: {_counted(len(files), 'file', 'files')} ({what or 'nothing'})"]
        lines += _listed([f"{f.path.name}: {f.content.note}" for f in files if f.content.note])
    if left_out:
        lines.append(f"{label}: {_counted(len(left_out), 'entry', 'entries')} left out")
    return lines + _listed(left_out)


def _counted(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def _listed(lines: list[str]) -> list[str]:
    """At most 20 lines, indented, and how many more there are."""
    shown = [f"  {line}" for line in lines[:_MOST_LISTED]]
    more = len(lines) - len(shown)
    return shown + ([f"  and {more:,} more"] if more else [])


def find_sources(options: PrepareOptions) -> list[Source]:
    """The inputs, in order, with their files and what each holds.

    Raises DataError: an input names nothing, an entry is of no kind that is read, a file is
    damaged, or no input was given; all of them at once.
    """
    if options.corpus is not None:
        return [Source(options.corpus, [File(path, Content("file")) for path in stdlib_files()])]
    walk, sources = Walk(options), []
    problems: list[str] = []
    unknown: list[str] = []
    for text in options.inputs:
        path = Path(text)
        source = Source(path.name or path.resolve().name)
        sources.append(source)
        try:
            entries = walk.entries(text)
        except DataError as error:
            problems += error.problems
            continue
        found = _look_into(entries, source, options)
        problems += found[0]
        unknown += found[1]
        if not source.files and not any(found):
            problems += _nothing(text, entries, options)
    if unknown and not options.skip_unknown:
        shown = _bounded(unknown)
        shown[-1] += (
            "; convert or move what is no document, or leave it out with --skip-unknown "
            f"({len(unknown):,} in all: they are listed and counted)"
        )
        problems = _bounded(problems) + shown
    elif not problems and not any(source.files for source in sources):
        problems.append("nothing is left to read: no entry of the inputs holds documents")
    if problems:
        raise DataError(problems)
    return sources


def _look_into(
    entries: list[Entry], source: Source, options: PrepareOptions
) -> tuple[list[str], list[str]]:
    """Fill a source; what stands against that, and what can be left out instead."""
    problems, unknown = [], []
    for entry in entries:
        if entry.again:
            source.left_out.append(f"{entry.name}: the same as {entry.again}, read once")
            continue
        reason = entry.unknown
        if not reason and not os.access(entry.path, os.R_OK):
            reason = "cannot be read (Permission denied)"
        if not reason:
            try:
                source.files.append(File(entry.path, content_of(entry.path, options)))
                continue
            except NoDocuments as error:
                reason = str(error)
            except DataError as error:
                problems += error.problems
                continue
            except OSError as error:  # gone since it was found
                problems.append(unread(entry.path, error))
                continue
        unknown.append(f"{entry.path}: {reason}")
        source.left_out.append(f"{entry.name}: {reason}")
    return problems, unknown


def _nothing(text: str, entries: list[Entry], options: PrepareOptions) -> list[str]:
    """An input that adds nothing: refused, or left out where that was asked for."""
    if not entries:
        return [f"{text}: no file to read in it"]
    if options.skip_unknown:
        return []
    return [f"{text}: all of it is read already, as {entries[0].again}; name it once (weights "
            "belong to data.blend of the run)"]  # fmt: skip


def _bounded(problems: list[str]) -> list[str]:
    more = len(problems) - _MOST_PROBLEMS
    return problems if more <= 0 else [*problems[:_MOST_PROBLEMS], f"and {more:,} more"]


def read_batches(sources: list[Source], options: PrepareOptions) -> Iterator[Batch]:
    """All documents of all sources in order, in batches of about ``batch_bytes``.

    Raises:
        DataError: a file cannot be read, its compression is damaged or cut off, or token ids are.
    """
    before = 0
    for number, source in enumerate(sources):
        batch: Batch | None = None
        source.cuts = 0
        for file in source.files:
            kind = file.content.kind
            count = 0
            for document, place, position in _read(file, options):
                if batch is not None and (
                    batch.kind != kind or batch.size + len(document) > options.batch_bytes
                ):
                    yield batch
                    batch = None
                if batch is None:
                    batch = Batch(number, kind)
                batch.documents.append(document)
                batch.places.append(place)
                # A small constant for each document keeps batches of empty lines finite.
                batch.size += len(document) + 16
                batch.position = before + position
                count += 1
            source.cuts += count - 1 if kind == "separated" else 0
            before += file.size
        if batch is not None:
            batch.position = before
            yield batch


def _read(file: File, options: PrepareOptions) -> Iterator[tuple[bytes, str, int]]:
    """Raw documents with their places, and how many bytes of the file have been read."""
    path, kind = file.path, file.content.kind
    if kind == "parquet":
        for number, (row, share) in enumerate(parquet.rows(path, options.json_key), 1):
            yield row, f"{path}, row {number}", int(share * file.size)
        return
    position: Callable[[], int]
    with opened(path, file.content.packing) as (stream, position):
        for document, place in _documents(stream, path, kind, options):
            yield document, place, position()


def _documents(
    stream: BinaryIO, path: Path, kind: Kind, options: PrepareOptions
) -> Iterator[tuple[bytes, str]]:
    """Raw documents with their places."""
    if kind == "file":
        yield stream.read(), str(path)
    elif kind == "jsonl":
        for number, line in enumerate(stream, 1):
            yield line, f"{path}, line {number}"
    elif kind == "separated":
        assert options.document_separator is not None
        separator = options.document_separator.replace("\r\n", "\n").encode()
        for number, part in enumerate(_split(stream, separator), 1):
            yield part, f"{path}, document {number}"
    else:
        # Cut anywhere on an item boundary: ``encode`` finds the documents, merging joins them.
        step = max(4, options.batch_bytes // 4 * 4)
        item, at = DTYPES[options.format][1].itemsize, 0
        while piece := stream.read(step):
            # Of this file, not of the batch: two odd files would make an even batch, out of step.
            if len(piece) % item:
                raise DataError(
                    f"{path}: {at + len(piece):,} bytes are not a whole number of "
                    f"{options.format}, {item} bytes each; it is cut off or of another format"
                )
            yield piece, f"{path}, byte {at:,}"
            at += len(piece)


def _split(stream: BinaryIO, separator: bytes) -> Iterator[bytes]:
    """Split at a separator without holding the file; CRLF line ends count as LF."""
    rest = b""
    while data := stream.read(_READ):
        if data.endswith(b"\r"):  # its LF may be in the next read
            data += stream.read(1)
        *parts, rest = (rest + data.replace(b"\r\n", b"\n")).split(separator)
        yield from parts
    yield rest


def stdlib_files() -> list[Path]:
    """The sources of this Python's standard library without its tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = [
        path
        for path in root.rglob("*.py")
        if not skipped.intersection(path.relative_to(root).parts)
    ]
    if not found:
        raise DataError("this Python has no library sources to read; use text files instead")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())

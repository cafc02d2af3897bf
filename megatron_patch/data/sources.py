"""Inputs of ``prepare-data``: which files, and their raw bytes in batches of whole documents.

Batches depend on the inputs and ``batch_bytes`` alone, never on workers or interruptions. Cutting
is cheap and happens in one process, also for compressed files; parsing and tokenizing happen in
the workers (``encode``).
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from megatron_patch.data.errors import DataError
from megatron_patch.data.indexed import DTYPES
from megatron_patch.data.options import PrepareOptions

Kind = Literal["file", "separated", "jsonl", "tokens"]
"""One document a file; documents between separators; a document a line; token ids."""
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst", ".py")
JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")
PACKED_ENDINGS = (".gz", ".zst")
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """One input as named by the user."""

    name: str
    """For the manifest: no directory of this machine."""
    files: list[Path]
    bytes: int


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


def find_sources(options: PrepareOptions) -> list[Source]:
    """The inputs, in order, with their files.

    Raises:
        DataError: an input names nothing, or no input was given; all of them at once.
    """
    if options.corpus is not None:
        if options.inputs:
            raise DataError(f"--corpus {options.corpus} and inputs {options.inputs}: choose one")
        files = stdlib_files()
        return [Source(options.corpus, files, _size(files))]
    if not options.inputs:
        raise DataError("no inputs: name files, directories or globs, or use --corpus")
    sources, problems = [], []
    for text in options.inputs:
        path = Path(text)
        if path.is_dir():
            found = [p for p in sorted(path.rglob("*")) if p.is_file() and _wanted(p, options)]
        elif path.is_file():
            found = [path]
        else:
            found = [Path(p) for p in sorted(glob.glob(text, recursive=True)) if Path(p).is_file()]
        if not found:
            problems.append(
                f"{text}: no such file, and no directory or glob with files to read in it"
            )
        sources.append(Source(path.name or path.resolve().name, found, _size(found)))
    if problems:
        raise DataError(problems)
    return sources


def read_batches(sources: list[Source], options: PrepareOptions) -> Iterator[Batch]:
    """All documents of all sources in order, in batches of about ``batch_bytes``.

    Raises:
        DataError: a file cannot be read, its compression is damaged or cut off, or token ids are.
    """
    before = 0
    for number, source in enumerate(sources):
        batch: Batch | None = None
        for path in source.files:
            kind = kind_of(path, options)
            size = path.stat().st_size
            with _errors_of(path), _Opened(path) as opened:
                for document, place in _documents(opened.stream, path, kind, options):
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
                    batch.position = before + opened.position()
            before += size
        if batch is not None:
            batch.position = before
            yield batch


def kind_of(path: Path, options: PrepareOptions) -> Kind:
    """How a file is cut into documents."""
    if options.format in ("uint16", "int32"):
        return "tokens"
    name = path.name
    for ending in PACKED_ENDINGS:
        name = name.removesuffix(ending)
    if options.format == "jsonl" or (options.format == "auto" and name.endswith(JSONL_ENDINGS)):
        return "jsonl"
    return "file" if options.document_separator is None else "separated"


def _wanted(path: Path, options: PrepareOptions) -> bool:
    """Whether a file found in a directory is read."""
    name = path.name
    for ending in PACKED_ENDINGS:
        name = name.removesuffix(ending)
    if options.format in ("uint16", "int32"):
        return True
    endings = {"text": TEXT_ENDINGS, "jsonl": JSONL_ENDINGS}.get(
        options.format, TEXT_ENDINGS + JSONL_ENDINGS
    )
    return not name.startswith(".") and name.endswith(endings)


def _documents(
    stream: BinaryIO, path: Path, kind: Kind, options: PrepareOptions
) -> Iterator[tuple[bytes, str]]:
    name = str(path)
    if kind == "file":
        yield stream.read(), name
    elif kind == "jsonl":
        for number, line in enumerate(stream, 1):
            yield line, f"{name}, line {number}"
    elif kind == "tokens":
        # Cut anywhere on an item boundary: ``encode`` finds the documents, merging joins them.
        step = max(4, options.batch_bytes // 4 * 4)
        item = DTYPES[options.format][1].itemsize
        at = 0
        while piece := _read_exactly(stream, step):
            # Of this file, not of the batch: two odd files would make an even batch, out of step.
            if len(piece) % item:
                raise DataError(
                    f"{name}: {at + len(piece):,} bytes are not a whole number of "
                    f"{options.format}, {item} bytes each; it is cut off or of another format"
                )
            yield piece, f"{name}, byte {at:,}"
            at += len(piece)
    else:
        assert options.document_separator is not None
        for number, part in enumerate(_split(stream, options.document_separator.encode()), 1):
            yield part, f"{name}, document {number}"


def _split(stream: BinaryIO, separator: bytes) -> Iterator[bytes]:
    """Split at a separator without holding the file; CRLF line ends count as LF."""
    if not separator:
        raise DataError("--document-separator is empty; leave it out for one document a file")
    rest = b""
    while data := stream.read(_READ):
        if data.endswith(b"\r"):  # its LF may be in the next read
            data += stream.read(1)
        *parts, rest = (rest + data.replace(b"\r\n", b"\n")).split(separator)
        yield from parts
    yield rest


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    pieces = []
    while size and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


class _Opened:
    """A file's content, decompressed by its ending, and how much of the file has been read."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("rb")
        self.stream: BinaryIO = self._raw
        if path.name.endswith(".gz"):
            self.stream = gzip.GzipFile(fileobj=self._raw)  # type: ignore[assignment]
        elif path.name.endswith(".zst"):
            self.stream = io.BufferedReader(_Zstd(self._raw), _READ)

    def position(self) -> int:
        return self._raw.tell()

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


class _Zstd(io.RawIOBase):
    """All frames of a zstd file; zstandard's own reader takes a cut-off frame for its end."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw, self._frames = raw, zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._frames.decompressobj()
        self._inside = False
        self._left = self._ready = b""
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._at == len(self._ready):
            data = self._left or self._raw.read(_READ)
            if not data:
                if self._inside:
                    raise EOFError("the last frame is incomplete")
                return 0
            self._inside, self._left = True, b""
            self._ready, self._at = self._frame.decompress(data), 0
            if self._frame.eof:
                self._left = self._frame.unused_data
                self._frame, self._inside = self._frames.decompressobj(), False
        count = min(len(buffer), len(self._ready) - self._at)
        buffer[:count] = self._ready[self._at : self._at + count]
        self._at += count
        return count


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn what can go wrong while a file is read into a ``DataError`` that names it."""
    import zstandard

    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise DataError(f"{path}: the compressed data is damaged or cut off ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _size(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


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

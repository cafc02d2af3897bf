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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron_patch.data.errors import DataError
from megatron_patch.data.indexed import DTYPES
from megatron_patch.data.options import PrepareOptions

Kind = Literal["file", "separated", "jsonl", "tokens"]
"""One document a file; documents between separators; a document a line; token ids."""
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst", ".py")
JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")
_READ = 1 << 20


@dataclass(slots=True)
class Source:
    """One input as named by the user."""

    name: str
    """For the manifest: no directory of this machine."""
    files: list[Path]
    bytes: int = field(init=False)
    """On disk, compressed where the files are."""

    def __post_init__(self) -> None:
        self.bytes = sum(path.stat().st_size for path in self.files)


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
        return [Source(options.corpus, files)]
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
        sources.append(Source(path.name or path.resolve().name, found))
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
            with _opened(path) as (stream, position):
                for document, place in _documents(stream, path, kind, options):
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
                    batch.position = before + position()
            before += size
        if batch is not None:
            batch.position = before
            yield batch


def kind_of(path: Path, options: PrepareOptions) -> Kind:
    """How a file is cut into documents."""
    if options.token_files:
        return "tokens"
    jsonl = options.format == "auto" and _plain_name(path).endswith(JSONL_ENDINGS)
    if options.format == "jsonl" or jsonl:
        return "jsonl"
    return "file" if options.document_separator is None else "separated"


def _wanted(path: Path, options: PrepareOptions) -> bool:
    """Whether a file found in a directory is read."""
    endings = {"text": TEXT_ENDINGS, "jsonl": JSONL_ENDINGS}.get(
        options.format, TEXT_ENDINGS + JSONL_ENDINGS
    )
    name = _plain_name(path)
    return options.token_files or (not name.startswith(".") and name.endswith(endings))


def _plain_name(path: Path) -> str:
    """The file's name without the ending of its compression."""
    return path.name.removesuffix(".gz").removesuffix(".zst")


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
        for number, part in enumerate(_split(stream, options.document_separator.encode()), 1):
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


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """A file's content, decompressed by its ending, and how many of its bytes have been read.

    Raises:
        DataError: it cannot be read, or the compressed data is damaged or cut off.
    """
    import zstandard

    try:
        with path.open("rb") as raw:
            stream: Any = raw
            if path.name.endswith(".gz"):
                stream = gzip.GzipFile(fileobj=raw)
            elif path.name.endswith(".zst"):
                stream = io.BufferedReader(_Zstd(raw), _READ)
            yield stream, raw.tell
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise DataError(f"{path}: the compressed data is damaged or cut off ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


class _Zstd(io.RawIOBase):
    """All frames of a zstd file; zstandard's own reader takes a cut-off frame for its end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._pieces, self._ready = self._decompressed(raw), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._ready = memoryview(piece)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    @staticmethod
    def _decompressed(raw: BinaryIO) -> Iterator[bytes]:
        import zstandard

        frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        frame, inside, data = frames.decompressobj(), False, b""
        while data := data or raw.read(_READ):
            yield frame.decompress(data)
            inside, data = not frame.eof, frame.unused_data
            if frame.eof:
                frame = frames.decompressobj()
        if inside:
            raise EOFError("the last frame is incomplete")


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

"""Compressed inputs, recognised by their first bytes and read to their last.

The readers of the standard library and of zstandard take damage behind a complete frame, or a frame
that is cut off, for the end of the file (gzip's does not). The reader here ends with an error.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron_patch.data.errors import DataError, unread

Packing = Literal["", "gz", "zst", "xz", "bz2"]
PACKINGS: dict[str, Packing] = {
    ".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz", ".bz2": "bz2",
    ".bzip2": "bz2",
}  # fmt: skip
"""What an ending, in lower case, claims."""
_READ = 1 << 20


def packing_of(head: bytes) -> Packing:
    """How a file is compressed that begins with ``head`` (16 bytes at least, where it has them)."""
    if head.startswith(b"\x1f\x8b\x08") and len(head) > 3 and not head[3] & 0xE0:
        return "gz"
    # A zstd file may begin with a frame to be skipped.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (
        head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    ):
        return "zst"
    if head.startswith(b"\xfd7zXZ\0"):
        return "xz"
    # "BZh9" alone is text; with the magic number of its first block, or of its end, it is not.
    if head[:3] == b"BZh" and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bz2"
    return ""


@contextmanager
def opened(path: Path, packing: Packing) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """A file's decompressed content, and how many bytes of the file have been read.

    Raises DataError: it cannot be read, or the compressed data is damaged or cut off.
    """
    import zstandard

    # bz2 and gzip report damage as an OSError without a number.
    damage = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
    try:
        with path.open("rb") as raw:
            stream: Any = raw
            if packing == "gz":
                stream = gzip.GzipFile(fileobj=raw)
            elif packing:
                stream = io.BufferedReader(_Frames(raw, packing), _READ)
            yield stream, raw.tell
    except damage as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(unread(path, error)) from error
        raise DataError(f"{path}: the compressed data is damaged or cut off ({error})") from error


class _Frames(io.RawIOBase):
    """All frames (streams, in the words of xz and bz2) of a compressed file."""

    def __init__(self, raw: BinaryIO, packing: Packing) -> None:
        pieces = _zstd_pieces if packing == "zst" else _pieces
        self._pieces, self._ready = pieces(raw, packing), memoryview(b"")

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


def _zstd_pieces(raw: BinaryIO, packing: Packing) -> Iterator[bytes]:
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


def _pieces(raw: BinaryIO, packing: Packing) -> Iterator[bytes]:
    """xz and bz2: at most 1 MiB at a time, however well a file is compressed."""
    frame: Any = None
    data = b""
    while True:
        if not data and (frame is None or frame.needs_input):
            data = raw.read(_READ)
            if not data:
                break
        if frame is None:
            data = data.lstrip(b"\0") if packing == "xz" else data  # padding between streams
            if not data:
                continue
            frame = bz2.BZ2Decompressor() if packing == "bz2" else lzma.LZMADecompressor()
        yield frame.decompress(data, _READ)
        data = b""
        if frame.eof:
            data, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("the last stream is incomplete")

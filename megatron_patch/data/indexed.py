"""Megatron's indexed-dataset files, read and written without Megatron.

``.bin``: token ids, little-endian, document after document, nothing between them.
``.idx``: ``MMIDIDX\\0\\0``, version u64 = 1, dtype code u8, number of sequences n u64, number of
document boundaries d u64, then n lengths i32 (in tokens), n byte offsets i64 into ``.bin``, and d
boundaries i64 (in sequences, first 0, last n).

Megatron-Core's own reader serves a truncated or altered file without a word. Its builder writes
the same bytes (a test compares them), after 5 to 10 s for importing torch, with Python integers of
32 bytes for every document.
"""

from __future__ import annotations

import bisect
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from megatron_patch.data.errors import DataError, unread
from megatron_patch.data.manifest import Manifest, read_manifest

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")
HEADER_BYTES = len(MAGIC) + HEADER.size
DTYPES: dict[str, tuple[int, np.dtype]] = {
    "uint16": (8, np.dtype("<u2")),
    "int32": (4, np.dtype("<i4")),
}
"""Name -> (code in the header, NumPy dtype): the two that token files use."""
_SLICE = 1 << 20  # sequences checked at a time: an index may be larger than the memory


def dtype_for(vocab_size: int) -> str:
    """uint16 up to 65,535 ids, else int32."""
    return "uint16" if vocab_size <= 65_535 else "int32"


@dataclass(frozen=True, slots=True)
class Index:
    """A parsed ``.idx``; arrays are memory maps of the file."""

    dtype: str
    lengths: np.ndarray
    """[n] int32, tokens of each sequence."""
    pointers: np.ndarray
    """[n] int64, byte offset of each sequence in ``.bin``."""
    boundaries: np.ndarray
    """[d] int64, first sequence of each document, and n."""

    def document_start(self, document: int) -> int:
        """First token of a document; for the boundary after the last, the number of tokens."""
        sequence, itemsize = int(self.boundaries[document]), DTYPES[self.dtype][1].itemsize
        if sequence < len(self.pointers):
            return int(self.pointers[sequence]) // itemsize
        if not len(self.pointers):
            return 0
        return int(self.pointers[-1]) // itemsize + int(self.lengths[-1])


def write_index(stream: IO[bytes], lengths: np.ndarray, dtype: str) -> None:
    """Write the ``.idx`` of documents of one sequence each, of ``lengths`` [n] tokens (int64)."""
    code, item = DTYPES[dtype]
    n, sizes = len(lengths), lengths * item.itemsize
    stream.write(MAGIC + HEADER.pack(1, code, n, n + 1))
    stream.write(lengths.astype("<i4").tobytes())
    stream.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
    stream.write(np.arange(n + 1, dtype="<i8").tobytes())


def open_index(path: Path) -> Index:
    """Map an ``.idx`` after checking its header and size.

    Raises:
        ValueError: what is wrong with the header or the size (the text names no file).
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        raise ValueError(f"{size} bytes, shorter than the header of an index ({HEADER_BYTES})")
    if not head.startswith(MAGIC):
        raise ValueError("does not start with MMIDIDX: not a Megatron index")
    version, code, n, d = HEADER.unpack(head[len(MAGIC) :])
    if version != 1:
        raise ValueError(f"index version {version}; only 1 is known")
    names = {value[0]: name for name, value in DTYPES.items()}
    if code not in names:
        raise ValueError(f"dtype code {code}; token files use 8 (uint16) or 4 (int32)")
    expected = HEADER_BYTES + 12 * n + 8 * d
    if size != expected:
        raise ValueError(
            f"{size:,} bytes, but the header's {n:,} sequences and {d:,} document boundaries "
            f"take {expected:,}"
        )

    def mapped(dtype: str, offset: int, count: int) -> np.ndarray:
        if count == 0:  # an empty map is an error in mmap
            return np.empty(0, dtype=dtype)
        return np.memmap(path, mode="r", dtype=dtype, offset=HEADER_BYTES + offset, shape=(count,))

    return Index(
        names[code], mapped("<i4", 0, n), mapped("<i8", 4 * n, n), mapped("<i8", 12 * n, d)
    )


def index_problems(index: Index, bin_bytes: int) -> Iterator[str]:
    """What is inconsistent inside an index, or between it and the size of its ``.bin``."""
    end, itemsize = 0, DTYPES[index.dtype][1].itemsize
    for at in range(0, len(index.lengths), _SLICE):
        lengths = index.lengths[at : at + _SLICE].astype(np.int64)
        if (lengths < 0).any():
            yield f"sequence {at + int(np.argmax(lengths < 0)):,} has a negative length"
            return
        ends = end + np.cumsum(lengths) * itemsize
        wrong = ends - lengths * itemsize != index.pointers[at : at + _SLICE]
        if wrong.any():
            yield (
                f"the pointer of sequence {at + int(np.argmax(wrong)):,} does not follow from the "
                "lengths before it"
            )
            return
        end = int(ends[-1])
    if end != bin_bytes:
        yield f"the lengths add up to {end:,} bytes, but the .bin file has {bin_bytes:,}"
    bounds = index.boundaries
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(index.lengths):
        yield "the document boundaries do not run from 0 to the number of sequences"
    elif any(
        (np.diff(bounds[at : at + _SLICE + 1]) < 0).any() for at in range(0, len(bounds), _SLICE)
    ):
        yield "the document boundaries are not in order"


class TokenFile:
    """The ``.bin`` of a dataset as one array of tokens, read with ``pread``.

    Not a memory map: a file that shrinks under a map kills the process with SIGBUS (or serves
    zeros), a short ``pread`` is an error with a name. Safe to use from several threads.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.manifest: Manifest = read_manifest(prefix)
        self.path, self._index_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self.dtype = DTYPES[self.manifest.dtype][1]
        self.tokens = self.manifest.tokens
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(unread(self.path, error)) from error
        size = os.fstat(self._handle).st_size
        if size != self.tokens * self.dtype.itemsize:
            self.close()
            raise DataError(
                f"{self.path}: {size:,} bytes, its manifest says {self.manifest.bin.size:,}"
            )

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as int64 [count].

        Raises DataError: the file ends before, or cannot be read.
        """
        size = self.dtype.itemsize
        wanted, offset, pieces = count * size, start * size, []
        while wanted:
            try:
                piece = os.pread(self._handle, wanted, offset)
            except OSError as error:
                raise DataError(unread(self.path, error)) from error
            if not piece:
                raise DataError(
                    f"{self.path}: ended at byte {offset:,} while it was used; it was "
                    f"{self.manifest.bin.size:,} bytes long at start"
                )
            pieces.append(piece)
            wanted -= len(piece)
            offset += len(piece)
        return np.frombuffer(b"".join(pieces), dtype=self.dtype).astype(np.int64)

    def cut(self, share: float) -> int:
        """The token before which ``share`` of the tokens lie, moved to the nearest document."""
        target = round(share * self.tokens)
        if target <= 0 or target >= self.tokens:
            return max(0, min(target, self.tokens))
        try:
            index = open_index(self._index_path)
        except ValueError as error:
            raise DataError(f"{self._index_path}: {error}") from error
        except OSError as error:
            raise DataError(unread(self._index_path, error)) from error
        # The first document that starts at or after the target; the last boundary is the end.
        number = bisect.bisect_left(range(len(index.boundaries)), target, key=index.document_start)
        after = index.document_start(number)
        before = index.document_start(number - 1) if number else 0
        return before if target - before < after - target else after

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        if getattr(self, "_handle", -1) >= 0:
            self.close()

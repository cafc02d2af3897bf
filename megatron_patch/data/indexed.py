"""Megatron's indexed-dataset files, written and checked without Megatron.

``.bin``: token ids, little-endian, document after document, nothing between them.
``.idx``: ``MMIDIDX\\0\\0``, version u64 = 1, dtype code u8, number of sequences n u64, number of
document boundaries d u64, then n lengths i32 (in tokens), n byte offsets i64 into ``.bin``, and d
boundaries i64 (in sequences, first 0, last n). The format is megatron.core's
``datasets/indexed_dataset.py``; tests compare the bytes with what its builder writes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")
HEADER_BYTES = len(MAGIC) + HEADER.size
DTYPES: dict[str, tuple[int, np.dtype]] = {
    "uint16": (8, np.dtype("<u2")),
    "int32": (4, np.dtype("<i4")),
}
"""Name -> (code in the header, NumPy dtype): the two that token files use."""
_SLICE = 1 << 20


@dataclass(frozen=True, slots=True)
class Index:
    """A parsed and checked ``.idx``; arrays are memory maps of the file."""

    dtype: str
    lengths: np.ndarray
    """[n] int32, tokens of each sequence."""
    pointers: np.ndarray
    """[n] int64, byte offset of each sequence in ``.bin``."""
    boundaries: np.ndarray
    """[d] int64, first sequence of each document, and n."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1].itemsize


def dtype_for(vocab_size: int) -> str:
    """uint16 up to 65,535 ids, else int32."""
    return "uint16" if vocab_size <= 65_535 else "int32"


def write_index(stream: BinaryIO, lengths: np.ndarray, dtype: str) -> None:
    """Write the ``.idx`` of documents of one sequence each.

    Args:
        stream: Binary file, written from its current position.
        lengths: [n] tokens of each document, in the order of ``.bin``.
        dtype: ``uint16`` or ``int32``.
    """
    code, item = DTYPES[dtype]
    n = len(lengths)
    stream.write(MAGIC + HEADER.pack(1, code, n, n + 1))
    stream.write(np.asarray(lengths, dtype="<i4").tobytes())
    end = 0
    for part in _slices(lengths):
        ends = end + np.cumsum(np.asarray(part, dtype=np.int64)) * item.itemsize
        stream.write(np.concatenate([[end], ends[:-1]]).astype("<i8").tobytes())
        end = int(ends[-1])
    for start in range(0, n + 1, _SLICE):
        stream.write(np.arange(start, min(start + _SLICE, n + 1), dtype="<i8").tobytes())


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
    at = HEADER_BYTES
    lengths = _map(path, "<i4", at, n)
    pointers = _map(path, "<i8", at + 4 * n, n)
    return Index(names[code], lengths, pointers, _map(path, "<i8", at + 12 * n, d))


def index_problems(index: Index, bin_bytes: int) -> Iterator[str]:
    """What is inconsistent inside an index, or between it and the size of its ``.bin``."""
    end = 0
    for at in range(0, len(index.lengths), _SLICE):
        lengths = index.lengths[at : at + _SLICE]
        if (lengths < 0).any():
            yield f"sequence {at + int(np.argmax(lengths < 0)):,} has a negative length"
            return
        ends = end + np.cumsum(lengths.astype(np.int64)) * index.itemsize
        starts = np.concatenate([[end], ends[:-1]])
        wrong = starts != index.pointers[at : at + len(lengths)]
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
    elif any((np.diff(part) < 0).any() for part in _slices(bounds, overlap=1)):
        yield "the document boundaries are not in order"


def _map(path: Path, dtype: str, offset: int, count: int) -> np.ndarray:
    if count == 0:  # an empty map is an error in mmap
        return np.empty(0, dtype=dtype)
    return np.memmap(path, mode="r", dtype=dtype, offset=offset, shape=(count,))


def _slices(array: np.ndarray, overlap: int = 0) -> Iterable[np.ndarray]:
    return (array[i : i + _SLICE + overlap] for i in range(0, len(array), _SLICE))

"""Reading the tokens of a prepared dataset."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from megatron_patch.data.errors import DataError, unread
from megatron_patch.data.indexed import DTYPES, Index, open_index
from megatron_patch.data.manifest import Manifest, read_manifest


class TokenFile:
    """The ``.bin`` of a dataset as one array of tokens, read with ``pread``.

    Not a memory map: a file that shrinks under a map kills the process with SIGBUS (or serves
    zeros), a short ``pread`` is an error with a name. Safe to use from several threads.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.manifest: Manifest = read_manifest(prefix)
        self.prefix = Path(prefix)
        self.path = Path(f"{prefix}.bin")
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

        Raises:
            DataError: the file ends before, or cannot be read.
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
            index = open_index(Path(f"{self.prefix}.idx"))
        except ValueError as error:
            raise DataError(f"{self.prefix}.idx: {error}") from error
        except OSError as error:
            raise DataError(unread(f"{self.prefix}.idx", error)) from error
        low, high = 0, len(index.boundaries)
        while low < high:  # first document that starts at or after the target
            mid = (low + high) // 2
            if self._document_start(index, mid) < target:
                low = mid + 1
            else:
                high = mid
        after = self._document_start(index, low)
        before = self._document_start(index, low - 1) if low else 0
        return before if target - before < after - target else after

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        if getattr(self, "_handle", -1) >= 0:
            self.close()

    def _document_start(self, index: Index, document: int) -> int:
        """First token of a document; one past the end for the boundary after the last."""
        if document >= len(index.boundaries):
            return self.tokens
        sequence = int(index.boundaries[document])
        if sequence >= len(index.pointers):
            return self.tokens
        return int(index.pointers[sequence]) // self.dtype.itemsize

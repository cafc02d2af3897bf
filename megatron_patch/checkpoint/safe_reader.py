"""Reading shards without running them: what replaces torch's and core's unpickling during a load.

Three places read pickles while Megatron-Core 0.19.2 loads a checkpoint:

* ``FileSystemReader.read_metadata``: unrestricted. Replaced by `safe_metadata.read_metadata`.
* ``DefaultLoadPlanner.load_bytes``: ``torch.load(weights_only=False)`` for every non-tensor object
  in a shard, Megatron's common state among them. Replaced by `load_object`.
* ``torch.load(weights_only=True)`` for tensors, which trusts the sizes a file declares. Preceded by
  `inspect_archive`.

Only plain Python data and dense tensors pass: see ``GLOBALS``.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron_patch.checkpoint.errors import BadCheckpoint, passing_cause
from megatron_patch.checkpoint.safe_metadata import DTYPES, Restricted, read_metadata
from megatron_patch.core_patches.replace import patched

MAX_PICKLE_BYTES = 1 << 28  # of the structure around tensors; tensors lie in records of their own
MAX_RECORDS = 1 << 20
_STORAGES = {
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2,
    "LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1,
    "BoolStorage": 1, "UntypedStorage": 1,
}  # fmt: skip


class _Record:
    """A storage of ``count`` elements of ``item`` bytes, as the archive declares it."""

    def __init__(self, count: int, item: int) -> None:
        self.count, self.item = count, item


class _Inert:
    """Stands for an object whose content is not looked at."""

    def __setstate__(self, state: Any) -> None:
        return None


def _tensor(record: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Inert:
    """``_rebuild_tensor_v2`` without the tensor: would the view stay inside its storage?"""
    numbers = [offset, *size, *stride]
    if type(record) is not _Record or any(type(n) is not int or n < 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor in it is malformed")
    if len(size) != len(stride):
        raise pickle.UnpicklingError("a tensor in it has more sizes than strides")
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if 0 not in size and last >= record.count:
        raise pickle.UnpicklingError(f"a tensor of {tuple(size)} exceeds its {record.count} values")
    return _Inert()


# Resolves to things without effect: this pass only measures.
GLOBALS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("_io", "BytesIO"): _Inert,  # Transformer Engine's extra state, decoded by core's allow-list
    **{("torch", name): item for name, item in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): 1,
    **{("torch", name): name for name in DTYPES},
}


class _Inspector(Restricted):
    def __init__(self, data: bytes, records: Mapping[str, int]) -> None:
        super().__init__(data, GLOBALS)
        self._records = records

    def persistent_load(self, pid: Any) -> _Record:
        match pid:
            case ("storage", int(item), str(key), str(), int(count)) if type(count) is int:
                if self._records.get(f"data/{key}") != item * count:
                    raise pickle.UnpicklingError(f"storage {key[:40]!r} has another size")
                return _Record(count, item)
        raise pickle.UnpicklingError("a storage in it is malformed")


def inspect_archive(stream: Any, length: int) -> None:
    """Check a ``torch.save`` archive before torch opens it; leaves ``stream`` at its start.

    Stored (never compressed) records only, no larger together than the archive; a structure made of
    the names in ``GLOBALS`` and nothing else; tensors that stay inside storages that stay inside
    their records.

    Raises BadCheckpoint: anything else.
    """
    try:
        stream.seek(0)
        if stream.read(4) != b"PK\x03\x04":
            raise BadCheckpoint("archive", "it is not a torch archive")
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_RECORDS:
                raise BadCheckpoint("archive", f"it has {len(entries)} records")
            records: dict[str, int] = {}
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                    raise BadCheckpoint("archive", "it has a compressed record")
                name = entry.filename.partition("/")[2]
                if name in records or entry.file_size != entry.compress_size:
                    raise BadCheckpoint("archive", "its table of records contradicts itself")
                records[name] = entry.file_size
            if sum(records.values()) > length:
                raise BadCheckpoint("archive", "its records are larger than the archive")
            if "data.pkl" not in records or records["data.pkl"] > MAX_PICKLE_BYTES:
                raise BadCheckpoint("archive", "it has no structure of a sensible size")
            top = {entry.filename.partition("/")[0] for entry in entries}
            if len(top) != 1:
                raise BadCheckpoint("archive", "its records lie in several folders")
            data = archive.read(f"{top.pop()}/data.pkl")
        _Inspector(data, records).load()
        stream.seek(0)
    except BadCheckpoint:
        raise
    except Exception as error:
        cause = passing_cause(error)
        if isinstance(cause, OSError):  # the disk's fault, for which nothing is moved aside
            raise cause from None
        raise BadCheckpoint("hostile", f"it was refused: {error}") from None


def load_object(value: io.BytesIO, name: str) -> Any:
    """A non-tensor object of a shard: plain Python data and tensors, nothing that has code.

    Raises BadCheckpoint: it is anything else.
    """
    try:
        inspect_archive(value, len(value.getbuffer()))
        return torch.load(value, map_location="cpu", weights_only=True)
    except BadCheckpoint as bad:
        raise BadCheckpoint(bad.kind, f"object {name[:80]!r}: {bad.reason}") from None
    except Exception as error:
        raise BadCheckpoint("hostile", f"object {name[:80]!r} was refused: {error}") from None


class _Slice(io.RawIOBase):
    """``length`` bytes from ``offset`` of an open file; torch's own view cannot seek back."""

    def __init__(self, handle: int, offset: int, length: int) -> None:
        super().__init__()
        self._handle, self._offset, self._length = handle, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("seek before the start")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = max(0, min(len(view), self._length - self._at))
        data = os.pread(self._handle, count, self._offset + self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


class SafeReader(FileSystemReader):
    """``FileSystemReader`` of one verified directory."""

    def __init__(self, path: Any, metadata: Metadata | None = None) -> None:
        """``metadata``: the index, when `read_metadata` has read it already."""
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # torch asks for `__<rank>.metadata` when this raises; the second refusal is the same.
        found = self._metadata or read_metadata(str(self.path))
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """Every read of a shard goes through here: look at the archive before torch does."""
        part = io.BufferedReader(_Slice(file.fileno(), sinfo.offset, sinfo.length))
        try:
            inspect_archive(part, sinfo.length)
        except BadCheckpoint as bad:
            raise BadCheckpoint(
                bad.kind, f"{sinfo.relative_path} at byte {sinfo.offset}: {bad.reason}"
            ) from None
        return super()._slice_file(file, sinfo)


def _load_bytes(self: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
    """``DefaultLoadPlanner.load_bytes`` with `load_object` in the place of an unrestricted load."""
    name = read_item.dest_index.fqn
    loaded = load_object(value, name)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


@contextmanager
def safe_loading(metadata: Metadata | None = None) -> Iterator[None]:
    """While active, ``megatron.core.dist_checkpointing`` loads through this module only.

    ``metadata`` is the index of the one checkpoint that is loaded, to read it once.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy

    def reader(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> SafeReader:
        return SafeReader(checkpoint_dir, metadata)

    def no_common_file(checkpoint_dir: str) -> Any:
        raise BadCheckpoint("extra", f"{common.COMMON_STATE_FNAME} is not read: an older format")

    # Core makes readers and planner inside its load; a strategy of ours would copy all of it.
    with patched(
        (torch_strategy, "_get_filesystem_reader", reader),
        (serialization, "_get_filesystem_reader", reader),
        (torch_strategy, "FileSystemReader", SafeReader),
        (serialization, "load_common", no_common_file),
        (DefaultLoadPlanner, "load_bytes", _load_bytes),
    ):
        yield

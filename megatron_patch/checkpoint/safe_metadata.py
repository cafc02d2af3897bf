"""Reading ``.metadata`` of a torch distributed checkpoint without giving it the run of Python.

PyTorch pickles its index of shards and reads it back with ``pickle.load``: a crafted file runs any
code it likes. `read_metadata` resolves names from the table below and from nowhere else, refuses
every other one by name, and then checks the object it got: types, file names, offsets.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_patch.checkpoint.errors import BadCheckpoint
from megatron_patch.checkpoint.manifest import FILE_NAME

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 32

_DTYPES = """
    float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool
    complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
DTYPES = tuple(name for name in re.findall(r"\w+", _DTYPES) if hasattr(torch, name))


def _layout(name: str) -> torch.layout:
    """``torch.serialization._get_layout``, for the one layout shards have."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"tensor layout {str(name)[:40]!r}; only strided is expected")
    return torch.strided


def _allowed() -> dict[tuple[str, str], Any]:
    """Everything an index of shards is made of."""
    m, p = metadata, planner
    classes = (
        m.Metadata, m.TensorStorageMetadata, m.BytesStorageMetadata, m.ChunkStorageMetadata,
        m.TensorProperties, m.MetadataIndex, m.StorageMeta, m._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo, filesystem._StoragePrefix,
        # Megatron-Core adds every rank's save plan to the index.
        p.SavePlan, p.WriteItem, p.WriteItemType, p.TensorWriteData, torch.Size, OrderedDict,
    )  # fmt: skip
    table: dict[tuple[str, str], Any]
    table = {(cls.__module__, cls.__qualname__): cls for cls in classes}
    table |= {("torch", name): getattr(torch, name) for name in DTYPES}
    table["torch.serialization", "_get_layout"] = _layout
    # A path object names the directory the checkpoint was written to.
    table["pathlib", "PosixPath"] = table["pathlib._local", "PosixPath"] = PosixPath
    return table


ALLOWED = _allowed()


class Restricted(pickle.Unpickler):
    """Resolves the names of a table and no others."""

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        # From memory: a declared length beyond the end is then an error, not an allocation.
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}"[:200]) from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it holds a persistent id")


def read_metadata(folder: str | Path, sizes: Mapping[str, int] | None = None) -> Metadata:
    """The index of shards in ``folder``.

    Args:
        folder: checkpoint directory.
        sizes: bytes of every file of the checkpoint; default: what lies in ``folder``.

    Raises BadCheckpoint: it names anything outside the table, or is not a well-formed index.
    """
    folder = Path(folder)
    if sizes is None:
        sizes = {entry.name: entry.lstat().st_size for entry in folder.iterdir()}
    path = folder / METADATA
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise BadCheckpoint("metadata", f"{METADATA} is larger than {MAX_METADATA_BYTES} bytes")
    data = path.read_bytes()
    before = {cls: dict(vars(cls)) for cls in ALLOWED.values() if isinstance(cls, type)}
    try:
        found = Restricted(data, ALLOWED).load()
    except Exception as error:
        raise BadCheckpoint("hostile", f"{METADATA} was refused: {error}") from None
    finally:
        touched = [cls.__name__ for cls, attributes in before.items() if _restore(cls, attributes)]
    if touched:
        raise BadCheckpoint("hostile", f"{METADATA} changes the classes {', '.join(touched)}")
    _check(found, sizes)
    return found


def _restore(cls: type, attributes: dict[str, Any]) -> bool:
    """Undo what a BUILD instruction aimed at the class itself has set; whether there was any."""
    now = dict(vars(cls))
    changed = [name for name in now if name not in attributes or now[name] is not attributes[name]]
    for name in changed:
        if name in attributes:
            setattr(cls, name, attributes[name])
        else:
            delattr(cls, name)
    return bool(changed)


def _require(good: bool, problem: str) -> None:
    if not good:
        raise BadCheckpoint("metadata", f"{METADATA} {problem}")


def _check(found: Any, sizes: Mapping[str, int]) -> None:
    """Types, names and ranges of everything loading relies on."""
    _require(type(found) is Metadata, f"holds a {type(found).__name__}")
    entries, storage = found.state_dict_metadata, found.storage_data
    tables = type(entries) is dict and type(storage) is dict
    _require(tables, "has no tables of tensors and shards")
    for key, entry in entries.items():
        known = type(entry) in (TensorStorageMetadata, BytesStorageMetadata)
        _require(type(key) is str and known, f"has a malformed entry {str(key)[:80]!r}")
        if type(entry) is TensorStorageMetadata:
            _check_tensor(key, entry)
    for index, info in storage.items():
        known = type(index) is MetadataIndex and type(info) is filesystem._StorageInfo
        _require(known, "has a malformed table of shards")
        _check_shard(index, info, sizes)


def _check_tensor(key: str, entry: TensorStorageMetadata) -> None:
    sized = type(entry.size) is torch.Size and type(entry.chunks) is list
    known = sized and type(entry.properties) is metadata.TensorProperties
    _require(known, f"has a malformed tensor {key[:80]!r}")
    for chunk in entry.chunks:
        inside = type(chunk) is metadata.ChunkStorageMetadata
        inside = inside and len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
        spans = zip(chunk.offsets, chunk.sizes, entry.size, strict=True) if inside else ()
        inside = inside and all(at >= 0 and n >= 0 and at + n <= whole for at, n, whole in spans)
        _require(inside, f"has a part of {key[:80]!r} outside it")


def _check_shard(index: MetadataIndex, info: Any, sizes: Mapping[str, int]) -> None:
    name, what = info.relative_path, f"places {str(index.fqn)[:80]!r}"
    known = type(name) is str and FILE_NAME.fullmatch(name) is not None and name in sizes
    _require(known, f"{what} in {str(name)[:80]!r}")
    plain = not getattr(info, "transform_descriptors", None)
    _require(plain, f"asks for a decoder of {name}")
    ints = type(info.offset) is int and type(info.length) is int
    inside = ints and min(info.offset, info.length) >= 0
    _require(inside and info.offset + info.length <= sizes[name], f"{what} beyond {name}'s end")

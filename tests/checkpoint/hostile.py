"""Checkpoints of an attacker who can write files and reseal an unsigned manifest.

Every attack starts from a good directory and leaves one whose hashes are right, so that what
refuses it is the reader and not the hash. ``ATTACKS`` names them all.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_patch.checkpoint.manifest import MANIFEST, SEAL, hash_file, seal

SHARD = "__0_0.distcp"


class Payload:
    """Unpickled, it runs a command that leaves ``sentinel``."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.sentinel}'",)


class Evaluated(Payload):
    """The same through a built-in."""

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.sentinel)!r}, 'w').close()",)


def reseal(folder: Path) -> None:
    """Make manifest and seal fit what lies in ``folder`` now."""
    body = json.loads((folder / MANIFEST).read_bytes())
    names = {p.name for p in folder.iterdir()} - {MANIFEST, SEAL}
    digests = {name: hash_file(folder, name, sync=False) for name in sorted(names)}
    body["files"] = {
        name: {"size": d.size, "sha256": d.sha256, "pages": d.pages} for name, d in digests.items()
    }
    raw = (json.dumps(body) + "\n").encode()
    (folder / MANIFEST).write_bytes(raw)
    (folder / SEAL).write_bytes(seal(raw, None))


def index_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def put_index(folder: Path, index: Any) -> None:
    (folder / ".metadata").write_bytes(index if isinstance(index, bytes) else pickle.dumps(index))


def put_item(folder: Path, prefix: str, data: bytes) -> None:
    """Point the index entries that start with ``prefix`` at ``data``, appended to the shard."""
    index = index_of(folder)
    shard = folder / SHARD
    offset = shard.stat().st_size
    with shard.open("ab") as file:
        file.write(data)
    touched = [key for key in index.storage_data if key.fqn.startswith(prefix)]
    assert touched, prefix
    for key in touched:
        entry = index.storage_data[key]
        entry.relative_path, entry.offset, entry.length = SHARD, offset, len(data)
    put_index(folder, index)


def archive(structure: bytes, records: dict[str, bytes] | None = None, **options: Any) -> bytes:
    """A torch archive with this ``data.pkl``."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", options.get("compression", zipfile.ZIP_STORED)) as file:
        file.writestr("archive/data.pkl", structure)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
        for name, data in (records or {}).items():
            file.writestr(f"archive/{name}", data)
    return out.getvalue()


class _Storage:
    def __init__(self, count: int) -> None:
        self.count = count


class _Tensor:
    def __init__(self, storage: _Storage, size: tuple[int, ...], offset: int = 0) -> None:
        self.storage, self.size, self.offset = storage, size, offset

    def __reduce__(self) -> Any:
        stride = (1,) * len(self.size)
        empty: dict[str, Any] = {}
        arguments = (self.storage, self.offset, self.size, stride, False, empty)
        return torch._utils._rebuild_tensor_v2, arguments


def structure(tensor: Any) -> bytes:
    """``data.pkl`` of a tensor, with sizes as the attacker likes them."""
    out = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, _Storage):
                return ("storage", torch.FloatStorage, "0", "cpu", value.count)
            return None

    Pickler(out, protocol=2).dump(tensor)
    return out.getvalue()


def tensor_archive(declared: int, size: tuple[int, ...], present: int, offset: int = 0) -> bytes:
    """A tensor whose storage claims ``declared`` floats where ``present`` are."""
    made = structure(_Tensor(_Storage(declared), size, offset))
    return archive(made, {"data/0": bytes(4 * present)})


def saved(value: Any) -> bytes:
    """A torch archive of ``value``."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def of_every_shard(name: str, new: Callable[[Any], Any]) -> Callable[[Any, Path], None]:
    """Sets a field of every place in the index."""

    def change(index: Any, sentinel: Path) -> None:
        for entry in index.storage_data.values():
            setattr(entry, name, new(entry))

    return change


def _huge_tensor(index: Any, sentinel: Path) -> None:
    entry = index.state_dict_metadata["embedding.word_embeddings.weight"]
    entry.chunks[0].sizes = torch.Size([1 << 50, 1 << 10])


INDEXES: dict[str, Callable[[Path], bytes]] = {
    "index_pickle": lambda sentinel: pickle.dumps(Payload(sentinel)),
    "index_getattr": lambda sentinel: (
        b"cbuiltins\ngetattr\n(cos\nVsystem\ntR(Vtouch " + os.fsencode(sentinel) + b"\ntR."
    ),
    "index_allocates": lambda _: b"\x80\x04\x8e" + (1 << 45).to_bytes(8, "little") + b"abc.",
    "index_other_class": lambda _: pickle.dumps({"no": "index"}),
}
"""What stands in the place of the index."""
EDITS: dict[str, Callable[[Any, Path], None]] = {
    "index_eval_inside": lambda index, s: setattr(index, "planner_data", {"x": Evaluated(s)}),
    "index_outside": of_every_shard("relative_path", lambda e: f"../../{e.relative_path}"),
    "index_beyond_end": of_every_shard("length", lambda _: 1 << 50),
    "index_decoder": of_every_shard("transform_descriptors", lambda _: ["stream.zstd"]),
    "index_huge_tensor": _huge_tensor,
}
"""What becomes of the index."""
ITEMS: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "common_state": ("common_state", lambda sentinel: saved([Payload(sentinel)])),
    "common_state_legacy": ("common_state", lambda sentinel: pickle.dumps([Payload(sentinel)])),
    "random_state": ("rng_state", lambda sentinel: saved([Evaluated(sentinel)])),
    "tensor": ("embedding", lambda sentinel: archive(pickle.dumps(Payload(sentinel), protocol=2))),
    "tensor_legacy": ("embedding", lambda sentinel: pickle.dumps(Payload(sentinel))),
    "zip_bomb": ("embedding", lambda _: archive(
        structure(_Tensor(_Storage(1 << 22), (64, 32))), {"data/0": bytes(1 << 24)},
        compression=zipfile.ZIP_DEFLATED)),
    # torch would read past the record: the size is taken from the structure.
    "storage_larger_than_record": (
        "embedding", lambda _: tensor_archive(1 << 40, (64, 32), 2048)),
    "view_larger_than_storage": (
        "embedding", lambda _: tensor_archive(2048, (1 << 20, 1 << 20), 2048)),
    "view_before_storage": (
        "embedding", lambda _: tensor_archive(2048, (64, 32), 2048, offset=-4096)),
}  # fmt: skip
"""Whose content is replaced, and by what."""


def _index_sets_class(folder: Path, sentinel: Path) -> None:
    """A BUILD instruction aimed at the class: harmless values, but it would stay."""
    good = (folder / ".metadata").read_bytes()
    name = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n"
    patch = name + b"(N}(V__setstate__\nctorch\nSize\nutb"
    put_index(folder, good[:-1] + b"0" + patch + b".")


def _common_file(folder: Path, sentinel: Path) -> None:
    """An older format's file, which core would read in the place of the object."""
    torch.save(Payload(sentinel), folder / "common.pt")


def _link(folder: Path, sentinel: Path) -> None:
    outside = folder.parent.parent / "outside"
    os.replace(folder / SHARD, outside)
    (folder / SHARD).symlink_to(outside)


def _named_pipe(folder: Path, sentinel: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


FILES = {f.__name__[1:]: f for f in (_index_sets_class, _common_file, _link, _named_pipe)}
ATTACKS = (*INDEXES, *EDITS, *ITEMS, *FILES)
NOT_RESEALED = {"link", "named_pipe"}  # the manifest already describes what was there


def attack(folder: Path, name: str, sentinel: Path) -> None:
    """Carry out one attack on a good checkpoint directory."""
    if name in INDEXES:
        put_index(folder, INDEXES[name](sentinel))
    elif name in EDITS:
        EDITS[name](index := index_of(folder), sentinel)
        put_index(folder, index)
    elif name in ITEMS:
        put_item(folder, ITEMS[name][0], ITEMS[name][1](sentinel))
    else:
        FILES[name](folder, sentinel)
    if name not in NOT_RESEALED:
        reseal(folder)

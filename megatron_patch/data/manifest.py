"""The manifest of a dataset: what its ``.bin`` and ``.idx`` must be, byte for byte.

A manifest is JSON in one canonical form and carries the hash of itself, so that every change of
any byte of it is found. It is not keyed: it finds accidents, not an adversary who can rewrite all
three files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_patch.data.errors import DataError, unread
from megatron_patch.runtime.files import sync_directory, write_whole

FORMAT = "megatron-patch dataset 1"
REMEDY = "prepare the dataset again, or copy its three files again from a good place"
SAMPLE_PAGES = 256
SAMPLE_PAGE_BYTES = 65_536
MAX_CHUNKS = 4_096
_MIN_CHUNK = 1 << 20
MAX_LISTED = 100
"""Entries that a manifest lists of what an input left out; all are counted."""
_LATER_KEYS = ("invalid", "replaced", "left_out", "left_out_entries")
"""Of a source; written only where they say something, as the first manifests have none."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file's size and hashes."""

    size: int
    """Bytes."""
    sha256: str
    """Hash of the whole file, as ``sha256sum`` prints it."""
    chunk_bytes: int
    """Length of the pieces hashed separately (the last one is shorter)."""
    chunks: list[str]
    """SHA-256 of every piece: hashed in parallel at start, and they locate a difference."""
    sample: str
    """SHA-256 over the pages at ``sample_offsets(size)``, for ``data.verify: sampled``."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """One input as the user named it; ``name`` holds no directory of the machine."""

    name: str
    files: int
    bytes: int
    """Bytes on disk (compressed, where the input is)."""
    documents: int
    tokens: int
    skipped: int
    """Documents left out because they were empty or not text."""
    invalid: int = 0
    """Of these, the ones that were not text (``--invalid-text skip``, or beyond replacing)."""
    replaced: int = 0
    """Documents that are read with U+FFFD for what was not text (``--invalid-text replace``)."""
    left_out: int = 0
    """Entries of the input that are not read: of no known kind, or reached twice."""
    left_out_entries: list[str] = field(default_factory=list)
    """The first of them with the reason, named from the input on."""


@dataclass(frozen=True, slots=True)
class TokenizerRecord:
    """What the ids mean."""

    kind: str
    sha256: str
    vocab_size: int
    eod_id: int | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known about a prepared dataset."""

    dtype: str
    documents: int
    sequences: int
    tokens: int
    max_token_id: int
    tokenizer: TokenizerRecord
    bin: FileRecord
    idx: FileRecord
    sources: list[SourceRecord]
    options: dict[str, Any]
    """How documents were cut out of the inputs."""
    software: dict[str, str]
    """Versions of what wrote the files."""

    @property
    def sha256(self) -> str:
        """Hash of the manifest, and through it of the whole dataset."""
        return hashlib.sha256(_dump({"format": FORMAT, **_tree(self)})).hexdigest()


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.manifest.json")


def render(manifest: Manifest) -> bytes:
    """The one byte string that stands for a manifest."""
    return _dump({"format": FORMAT, "sha256": manifest.sha256, **_tree(manifest)})


def read_manifest(prefix: str | Path) -> Manifest:
    """Read and check ``<prefix>.manifest.json``.

    Raises DataError: it is missing, unreadable, changed since it was written, or of another format.
    """
    path = manifest_path(prefix)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path}: there is no manifest; an interrupted prepare-data leaves none (run it again "
            "to finish), and the .bin of another tool is prepared again, as a token file (--format)"
        ) from None
    except OSError as error:
        raise DataError(unread(path, error, REMEDY)) from error
    try:
        tree = json.loads(content)
        stated, found = tree.pop("sha256"), tree.pop("format")
        if found != FORMAT:
            raise DataError(f"{path}: format {found!r}, this version reads {FORMAT!r}; {REMEDY}")
        manifest = _manifest(tree)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a manifest ({error}); {REMEDY}") from error
    if manifest.sha256 != stated or render(manifest) != content:
        raise DataError(f"{path}: changed since it was written (own hash differs); {REMEDY}")
    return manifest


def write_file(path: Path, content: bytes) -> None:
    """Write atomically and durably, the rename included."""
    write_whole(path, content)
    sync_directory(path.parent)


def chunk_bytes_for(size: int) -> int:
    """A power of two from 1 MiB that keeps a file at ``MAX_CHUNKS`` pieces or fewer."""
    return max(_MIN_CHUNK, 1 << (-(-size // MAX_CHUNKS) - 1).bit_length())


def sample_offsets(size: int) -> list[int]:
    """Where the sampled pages start: first and last page, the others evenly between them."""
    last = max(0, size - SAMPLE_PAGE_BYTES)
    return sorted({last * i // (SAMPLE_PAGES - 1) for i in range(SAMPLE_PAGES)})


def sample_hash(path: Path, size: int) -> str:
    """SHA-256 over the sampled pages of a file (all of it, when it is small)."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for offset in sample_offsets(size):
            stream.seek(offset)
            digest.update(stream.read(SAMPLE_PAGE_BYTES))
    return digest.hexdigest()


def record_file(path: Path) -> FileRecord:
    """Read a file once and hash it whole and in pieces."""
    size = path.stat().st_size
    chunk_bytes = chunk_bytes_for(size)
    whole, chunks, read = hashlib.sha256(), [], 0
    with path.open("rb") as stream:
        while piece := stream.read(chunk_bytes):
            whole.update(piece)
            chunks.append(hashlib.sha256(piece).hexdigest())
            read += len(piece)
    if read != size:
        raise DataError(f"{path}: {size:,} bytes became {read:,} while it was read")
    return FileRecord(size, whole.hexdigest(), chunk_bytes, chunks, sample_hash(path, size))


def _manifest(tree: dict[str, Any]) -> Manifest:
    """The manifest of a JSON tree; ValueError or TypeError for one that is none."""
    files = {name: FileRecord(**tree[name]) for name in ("bin", "idx")}
    for record in files.values():
        # What is counted on before a byte of the files is read.
        if record.chunk_bytes < 1 or len(record.chunks) != -(-record.size // record.chunk_bytes):
            raise ValueError(f"{len(record.chunks)} hashed pieces do not make {record.size} bytes")
    tokenizer = TokenizerRecord(**tree["tokenizer"])
    sources = [SourceRecord(**item) for item in tree["sources"]]
    manifest = Manifest(**{**tree, **files, "tokenizer": tokenizer, "sources": sources})
    for name in ("documents", "sequences", "tokens", "max_token_id"):
        if type(getattr(manifest, name)) is not int:
            raise ValueError(f"{name} is {getattr(manifest, name)!r:.80}, not a number")
    if type(tokenizer.vocab_size) is not int or not isinstance(manifest.dtype, str):
        raise ValueError("the tokenizer's vocab_size is no number, or dtype no text")
    return manifest


def _tree(manifest: Manifest) -> dict[str, Any]:
    tree = asdict(manifest)
    for source in tree["sources"]:
        for key in _LATER_KEYS:
            if not source[key]:
                del source[key]
    return tree


def _dump(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode("ascii")

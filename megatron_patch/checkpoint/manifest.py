"""The manifest of a checkpoint: names, sizes and hashes of its files, signed when there is a key.

Two files are written beside the shards: ``manifest.json`` (what is below) and ``manifest.seal``,
which holds the SHA-256 of ``manifest.json`` and, with a key, its HMAC-SHA256. The seal is checked
before the JSON is parsed, the JSON before any shard is opened.

Every file carries its SHA-256 and one truncated SHA-256 per page, so that a sample of pages can be
checked without reading the rest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import random
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_patch.checkpoint.errors import BadCheckpoint, unreadable

FORMAT = "megatron-patch-stable checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
SEAL = "manifest.seal"
PAGE_BYTES = 1 << 20
PAGE_DIGEST_HEX = 32  # 128 of 256 bits: nobody finds a second preimage of that either
SAMPLED_PAGES = 64
MAX_MANIFEST_BYTES = 1 << 30
# No separators, no leading dash; one leading dot is needed by `.metadata`. Excludes "." and "..".
FILE_NAME = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What one file must look like."""

    size: int
    """Bytes."""
    sha256: str
    """Of the whole file, 64 hex digits; the same as ``sha256sum`` prints."""
    pages: str
    """First 32 hex digits of the SHA-256 of every page of PAGE_BYTES, one after the other."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything the store says about one complete checkpoint."""

    step: int
    attempt: int
    store: str
    """Identity of the store it was written by; retention deletes nothing else."""
    created: str
    """UTC time of the commit."""
    world_size: int
    files: Mapping[str, FileDigest]
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the writer adds: layout, configuration hash, versions, commit. Plain JSON."""

    def encode(self) -> bytes:
        """The bytes of ``manifest.json``."""
        body = asdict(self) | {"format": FORMAT, "version": VERSION, "page_bytes": PAGE_BYTES}
        return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def decode(body: bytes) -> Manifest:
    """Parse ``manifest.json`` strictly.

    Raises BadCheckpoint: not a manifest this version reads, or a name or number in it is not one.
    """
    try:
        raw = json.loads(body)
        if raw["format"] != FORMAT or raw["version"] != VERSION:
            raise BadCheckpoint(
                "format", f"manifest is {raw['format']!r} version {raw['version']!r}, not {VERSION}"
            )
        if raw["page_bytes"] != PAGE_BYTES:
            raise BadCheckpoint("format", f"manifest uses pages of {raw['page_bytes']!r} bytes")
        files = {_name(name): _digest(name, entry) for name, entry in raw["files"].items()}
        if not files:
            raise BadCheckpoint("manifest", "manifest lists no files")
        about: dict[str, Any] = {n: _count(raw[n]) for n in ("step", "attempt", "world_size")}
        about |= {name: str(raw[name]) for name in ("store", "created")}
        return Manifest(**about, files=files, info=dict(raw["info"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint("manifest", f"manifest is malformed: {error!r}") from None


def _count(value: Any) -> int:
    if type(value) is not int or value < 0 or value >= 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value


def _name(name: str) -> str:
    if not FILE_NAME.fullmatch(name) or name in (MANIFEST, SEAL):
        raise BadCheckpoint("name", f"manifest names a file {name[:80]!r}, which no checkpoint has")
    return name


def _digest(name: str, entry: dict[str, Any]) -> FileDigest:
    digest = FileDigest(_count(entry["size"]), str(entry["sha256"]), str(entry["pages"]))
    if not re.fullmatch("[0-9a-f]{64}", digest.sha256):
        raise ValueError(f"hash of {name!r} is not 64 hex digits")
    if len(digest.pages) != PAGE_DIGEST_HEX * _pages(digest.size):
        raise ValueError(f"{name!r} has {digest.size} bytes but another number of page hashes")
    return digest


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES)


def seal(body: bytes, key: bytes | None) -> bytes:
    """The bytes of ``manifest.seal`` for ``manifest.json``."""
    lines = [f"sha256 {hashlib.sha256(body).hexdigest()}"]
    if key is not None:
        lines.append(f"hmac-sha256 {hmac.new(key, body, hashlib.sha256).hexdigest()}")
    return ("\n".join(lines) + "\n").encode()


def check_seal(body: bytes, given: bytes, key: bytes | None) -> None:
    """Compare ``manifest.seal`` with ``manifest.json``.

    Raises BadCheckpoint: the hash differs (damaged), or a key is configured and the signature is
    missing or not made with it (not damaged: the key may be the wrong one).
    """
    lines = given.split(b"\n")
    plain = seal(body, None).rstrip(b"\n")
    if lines[0] != plain or len(lines) not in (2, 3) or lines[-1] != b"":
        raise BadCheckpoint("seal", "manifest does not match its seal (manifest.seal)")
    signature = lines[1] if len(lines) == 3 else None
    if signature is not None and not re.fullmatch(rb"hmac-sha256 [0-9a-f]{64}", signature):
        raise BadCheckpoint("seal", "the signature in manifest.seal is malformed")
    if key is None:
        return
    if signature is None:
        text = "manifest is not signed, and a key is configured"
        raise BadCheckpoint("unsigned", text, damaged=False)
    expected = seal(body, key).split(b"\n")[1]
    if not hmac.compare_digest(signature, expected):
        raise BadCheckpoint(
            "signature", "manifest is signed with another key, or was forged", damaged=False
        )


def read_key(path: str | Path) -> bytes:
    """The secret of ``checkpoint.hmac_key_file``: at least 16 bytes, readable by its owner only.

    Raises ValueError: missing, readable by others, or too short; the text says what to do.
    """
    path = Path(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # before reading: /dev/zero has no end
            raise ValueError(f"key file {str(path)!r} is not a regular file")
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"cannot read the key file {str(path)!r}: {error.strerror}") from None
    if stat.S_IMODE(found.st_mode) & 0o177:
        raise ValueError(
            f"key file {str(path)!r} has mode {stat.S_IMODE(found.st_mode):04o}; "
            "others must not read it: chmod 600"
        )
    if len(secret) < 16:
        raise ValueError(
            f"key file {str(path)!r} holds {len(secret)} bytes; at least 16 are needed, "
            "for example from: head -c 32 /dev/urandom | base64"
        )
    return secret


def open_inside(folder: Path, name: str) -> int:
    """Open ``folder/name`` for reading, refusing links and anything that is not a plain file."""
    path = folder / name
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise BadCheckpoint("missing", f"{name} is missing") from None
    except OSError as error:
        if path.is_symlink():
            raise BadCheckpoint("link", f"{name} is a symbolic link") from None
        raise unreadable(name, error) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadCheckpoint("kind", f"{name} is not a plain file")
    return handle


def read_small(folder: Path, name: str, *, limit: int = MAX_MANIFEST_BYTES) -> bytes:
    """Content of a plain file of at most ``limit`` bytes.

    Raises BadCheckpoint: missing, too large, a link, not a plain file, or unreadable.
    """
    with os.fdopen(open_inside(folder, name), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise BadCheckpoint("size", f"{name} is larger than {limit} bytes")
        return file.read()


def check_listing(path: Path, files: Mapping[str, FileDigest], *, extra: tuple[str, ...]) -> None:
    """Compare names, kinds and sizes in ``path`` with ``files``; reads no file.

    Raises BadCheckpoint: something is missing, added, a link, not a plain file or of another size.
    """
    listed = set(os.listdir(path))
    wanted = {*files, *extra}
    if wanted - listed:
        raise BadCheckpoint("missing", f"missing: {_names(wanted - listed)}")
    if listed - wanted:
        raise BadCheckpoint("extra", f"not in the manifest: {_names(listed - wanted)}")
    for name, digest in files.items():
        found = os.lstat(path / name)
        if not stat.S_ISREG(found.st_mode):
            raise BadCheckpoint("kind", f"{name} is not a plain file")
        if found.st_size != digest.size:
            raise BadCheckpoint("size", f"{name} has {found.st_size} bytes, expected {digest.size}")


def _names(names: set[str]) -> str:
    shown = sorted(names)[:5]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name[:80]) for name in shown) + more


def share_files(files: Mapping[str, FileDigest], rank: int, size: int) -> list[str]:
    """Names this rank hashes: largest first, each to the rank with the least work so far."""
    load = [0] * size
    mine = []
    for name, digest in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        target = load.index(min(load))
        load[target] += digest.size + 1
        if target == rank:
            mine.append(name)
    return mine


def hash_file(folder: Path, name: str, *, sync: bool) -> FileDigest:
    """Hash one file, whole and page by page, in one pass; ``sync`` also forces it to disk."""
    whole = hashlib.sha256()
    pages: list[str] = []
    size = 0
    with os.fdopen(open_inside(folder, name), "rb") as file:
        while page := file.read(PAGE_BYTES):  # a buffered file: shorter at the end only
            whole.update(page)
            pages.append(hashlib.sha256(page).hexdigest()[:PAGE_DIGEST_HEX])
            size += len(page)
        if sync:
            os.fsync(file.fileno())
    return FileDigest(size, whole.hexdigest(), "".join(pages))


def check_file(folder: Path, name: str, digest: FileDigest, *, sampled: bool) -> None:
    """Compare one file with its digest; ``sampled`` reads at most SAMPLED_PAGES of its pages.

    Raises BadCheckpoint: it differs or cannot be read.
    """
    try:
        if sampled and _pages(digest.size) > SAMPLED_PAGES:
            _check_pages(folder, name, digest)
            return
        found = hash_file(folder, name, sync=False)
    except (OSError, MemoryError) as error:
        raise unreadable(name, error) from None
    if found.size != digest.size:
        raise BadCheckpoint("size", f"{name} has {found.size} bytes, expected {digest.size}")
    if found != digest:
        pages = zip(_split(found.pages), _split(digest.pages), strict=True)
        page = next((n for n, (one, other) in enumerate(pages) if one != other), 0)
        raise _another_page(name, page, digest)


def _split(pages: str) -> list[str]:
    return [pages[at : at + PAGE_DIGEST_HEX] for at in range(0, len(pages), PAGE_DIGEST_HEX)]


def _another_page(name: str, page: int, digest: FileDigest) -> BadCheckpoint:
    place = f"bytes {page * PAGE_BYTES}.. of {digest.size}"
    return BadCheckpoint("hash", f"{name} does not match its SHA-256 ({place})")


def sample_pages(name: str, digest: FileDigest) -> list[int]:
    """The pages ``sampled`` verification reads: first, last and a fixed choice per file."""
    count = _pages(digest.size)
    if count <= SAMPLED_PAGES:
        return list(range(count))
    chosen = random.Random(f"{name} {digest.sha256}").sample(range(1, count - 1), SAMPLED_PAGES - 2)
    return sorted([0, count - 1, *chosen])


def _check_pages(folder: Path, name: str, digest: FileDigest) -> None:
    expected = _split(digest.pages)
    with os.fdopen(open_inside(folder, name), "rb", buffering=0) as file:
        for page in sample_pages(name, digest):
            data = os.pread(file.fileno(), PAGE_BYTES, page * PAGE_BYTES)
            if hashlib.sha256(data).hexdigest()[:PAGE_DIGEST_HEX] != expected[page]:
                raise _another_page(name, page, digest)

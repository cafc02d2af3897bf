"""File-system steps of the checkpoint store: durable writes, exact listings, shares of work."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from megatron_patch.checkpoint.errors import BadCheckpoint, causes
from megatron_patch.checkpoint.manifest import MAX_MANIFEST_BYTES, FileDigest, open_inside


def check_listing(path: Path, files: Mapping[str, FileDigest], *, extra: tuple[str, ...]) -> None:
    """Compare names, kinds and sizes in ``path`` with ``files``; reads no file.

    Raises:
        BadCheckpoint: something is missing, added, a link, not a plain file or of another size.
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


def describe(error: BaseException) -> str:
    """One line about an exception, with the path and what a person can do where that is known.

    A full disk is looked for behind it as well: torch's archive writer, which cannot finish a file
    after that, says "unexpected pos 704 vs 598".
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "the disk or quota is full: free space or lower checkpoint.keep_last"
            return f"{type(cause).__name__}: {cause} ({remedy})"
    return f"{type(error).__name__}: {error}"


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


def read_small(folder: Path, name: str, *, limit: int = MAX_MANIFEST_BYTES) -> bytes:
    with os.fdopen(open_inside(folder, name), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise BadCheckpoint("size", f"{name} is larger than {limit} bytes")
        return file.read()


def write_file(path: Path, data: bytes) -> None:
    """Create or replace a file and force it to disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

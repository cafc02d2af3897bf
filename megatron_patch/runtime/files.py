"""Files that appear whole: a reader, or a restart after a crash, finds the old content or the new.

The draft lies beside its file as ``<name>.tmp``; one process writes a file at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(
    path: Path, mode: str = "w", *, durable: bool = True, draft: Path | None = None, **options: Any
) -> Iterator[IO[Any]]:
    """An open draft of ``path``, which becomes it when the block ends, and goes if the block fails.

    Args:
        mode: ``w`` (UTF-8) or ``wb``.
        durable: force the content to disk before the old one is gone. The rename itself is durable
            after `sync_directory`.
        draft: its name, where ``<name>.tmp`` means something else.
        options: of ``open``, e.g. ``newline``.
    """
    draft = path.with_name(path.name + ".tmp") if draft is None else draft
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    opened = draft.open(mode, **options)  # what cannot be opened is not ours to remove
    try:
        with opened as out:
            yield out
            out.flush()
            if durable:
                os.fsync(out.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def write_whole(
    path: Path, content: str | bytes, *, durable: bool = True, draft: Path | None = None
) -> None:
    """Create or replace a file; text in UTF-8. The rest as `replacing` has it."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, "wb", durable=durable, draft=draft) as out:
        out.write(data)


def write_named(path: Path, content: str | bytes) -> None:
    """Write a file whose name a person gave: as `write_whole`, but never in place of another kind.

    A link stays and what it points to is written. A character device or a FIFO is written into, as
    is whatever standard output goes to, under any of its names.

    Raises OSError: it is a directory, a block device or a socket; or it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    if is_standard_output(path):
        sys.stdout.flush()
        with open(1, "wb", closefd=False) as out:
            out.write(data)
        return
    mode = stat.S_IFREG
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        write_whole(Path(os.path.realpath(path)), data)
    elif stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        with open(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC), "wb") as out:
            out.write(data)
    else:
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        reason = "is a directory" if stat.S_ISDIR(mode) else "is a block device or a socket"
        raise OSError(code, reason, os.fspath(path))


def is_standard_output(path: Path) -> bool:
    """Whether ``path`` is where this process's standard output goes."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:  # not there yet, or no standard output
        return False


def write_all(handle: int, data: bytes) -> None:
    """Write to a file descriptor; where the room ends in the middle the system writes less.

    Raises OSError: not all of it was written.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def check_file(path: Path, *, appended: bool) -> None:
    """Whether a file that will be appended to, or read and replaced, can be, if it is there.

    Raises OSError: it is a directory, lies below something that is none, or is not ours.
    """
    mode = os.O_WRONLY | os.O_APPEND if appended else os.O_RDONLY
    try:
        handle = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Force renames and creations in a directory to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(handle)

"""Files that appear whole: a reader, or a restart after a crash, finds the old content or the new.

The draft lies beside its file as ``<name>.tmp``; one process writes a file at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
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

"""What lies in the directory of a store: names, pointer, identity, and what is put aside.

Local and without decisions: `checkpoint.store` decides, on all ranks together, and rank 0 does it
here. Nothing that was a complete checkpoint is deleted in this file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import uuid
from pathlib import Path

from megatron_patch.checkpoint.errors import BadCheckpoint
from megatron_patch.checkpoint.files import read_small, write_file
from megatron_patch.checkpoint.manifest import MANIFEST, SEAL, check_seal
from megatron_patch.runtime.files import sync_directory, write_whole

log = logging.getLogger(__name__)

LATEST = "latest"
ASIDE = "aside"
IDENTITY = "store.json"
TMP = ".tmp"
DELETING = ".deleting"
REASON = "reason.txt"
DIRECTORY = re.compile(r"step_(\d{6,15})\.attempt-(\d{1,6})")


def directory_name(step: int, attempt: int) -> str:
    """``step_00000100.attempt-1``."""
    return f"step_{step:08d}.attempt-{attempt}"


def parse_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a complete directory's name; None for anything else."""
    match = DIRECTORY.fullmatch(name)
    if match is None or name != directory_name(int(match[1]), int(match[2])):
        return None
    return int(match[1]), int(match[2])


def key_of(name: str) -> tuple[int, int]:
    """(step, attempt) of a name that is known to be a complete directory's."""
    key = parse_name(name)
    assert key is not None, name
    return key


class Shelf:
    """The directory of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def identity(self, *, create: bool) -> str:
        """The store's own id; a new one where the file is missing or unreadable."""
        path = self.root / IDENTITY
        try:
            identity = json.loads(path.read_bytes())["store"]
            if isinstance(identity, str) and re.fullmatch(r"[0-9a-f]{32}", identity):
                return identity
            log.warning("%s holds no identity", path)
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%s)", path, error)
        identity = uuid.uuid4().hex
        if create:
            draft = self.root / (IDENTITY + TMP + "-file")
            write_whole(path, json.dumps({"store": identity}) + "\n", draft=draft)
            sync_directory(self.root)
        return identity

    def complete_names(self) -> list[str]:
        """Directories with the name of a complete checkpoint, newest (step, attempt) first."""
        try:
            listed = os.listdir(self.root)
        except FileNotFoundError:
            return []
        named = [(parse_name(name), name) for name in listed]
        return [name for key, name in sorted((k, n) for k, n in named if k is not None)][::-1]

    def entries(self, suffix: str) -> list[Path]:
        """Directories of checkpoints that carry ``suffix``."""
        return [
            self.root / name
            for name in sorted(os.listdir(self.root))
            if name.endswith(suffix) and parse_name(name[: -len(suffix)])
        ]

    def attempts(self, step: int) -> list[int]:
        """Attempt numbers of ``step`` that were ever used, moved aside ones included."""
        numbers = []
        for folder in (self.root, self.root / ASIDE):
            for name in os.listdir(folder) if folder.is_dir() else ():
                match = DIRECTORY.match(name)
                if match and int(match[1]) == step:
                    numbers.append(int(match[2]))
        return numbers

    def move_aside(self, path: Path, kind: str) -> Path:
        """Rename into ``aside/<name>.<kind>.<time>``; nothing is deleted."""
        target = self._rename_aside(path, kind)
        log.warning("moved %s to %s", path.name, target)
        return target

    def _rename_aside(self, path: Path, kind: str) -> Path:
        folder = self.root / ASIDE
        folder.mkdir(exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        target = folder / f"{path.name}.{kind}.{stamp}"
        count = 1
        while os.path.lexists(target):
            count += 1
            target = folder / f"{path.name}.{kind}.{stamp}-{count}"
        os.rename(path, target)
        sync_directory(folder)
        sync_directory(self.root)
        return target

    def write_latest(self, name: str) -> None:
        """Move the pointer; a reader sees the old name or the new one."""
        draft = self.root / (LATEST + TMP + "-file")
        write_whole(self.root / LATEST, name + "\n", draft=draft)
        sync_directory(self.root)

    def discard(self, path: Path, kind: str, reason: str) -> Path:
        """Put an attempt aside that never was a checkpoint: its log stays, its space is given back.

        Without a seal nothing can load it; kept whole, it would fill the disk that it failed on.
        One with a seal is complete but for its name, and is put aside whole.

        Raises:
            OSError: it could not be renamed.
        """
        if _sealed(path):
            return self.move_aside(path, kind)
        lines, kept = [reason, "", "It was not complete; its files were deleted:"], False
        try:
            for entry in sorted(os.scandir(path), key=lambda e: e.name):
                lines.append(f"{entry.stat(follow_symlinks=False).st_size:>18,} {entry.name}")
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
        except OSError as error:
            kept = True
            log.warning("could not delete what %s left: %s", path.name, error)
        target = self._rename_aside(path, kind)
        told = f"the reason and their names are in {target / REASON}"
        try:
            write_file(target / REASON, ("\n".join(lines) + "\n").encode())
        except OSError as error:  # the disk may still be full
            told = f"{REASON} cannot be written ({error.strerror}): {reason}"
        what = "what could be deleted of its files" if kept else "its files"
        log.warning("%s was not complete: deleted %s; %s", path.name, what, told)
        return target


def _sealed(path: Path) -> bool:
    """Whether the last files of a save are there, whole."""
    try:
        check_seal(read_small(path, MANIFEST), read_small(path, SEAL), None)
    except (BadCheckpoint, OSError):
        return False
    return True

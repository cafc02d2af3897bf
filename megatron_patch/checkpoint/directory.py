"""The directory of a store: names of checkpoints, ``latest``, identity, what is moved aside.

Local and without decisions: `checkpoint.store` decides, on all ranks together, and rank 0 does it
here. What was a complete checkpoint is deleted by `delete` alone.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_patch.checkpoint.errors import BadCheckpoint
from megatron_patch.checkpoint.manifest import MANIFEST, SEAL, check_seal, read_small
from megatron_patch.runtime.files import sync_directory, write_all, write_whole

log = logging.getLogger(__name__)

LATEST = "latest"
NEXT = "latest.next"
"""What ``latest`` names once everything newer is aside: a kill in between is made good from it."""
ASIDE = "aside"
IDENTITY = "store.json"
FORMAT = 2
"""In ``store.json``: the newest complete checkpoint is the one to continue. Earlier: absent."""
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


class Pointer(NamedTuple):
    """What ``latest`` says; all empty but ``why`` where it is lost, empty or no text at all."""

    name: str = ""
    """The checkpoint that it names, which need not be there."""
    reason: str = ""
    """Why it names none."""
    edited: str = ""
    """What somebody made of it instead: a text, or what is there in the place of the file."""


def _typed(data: bytes) -> str:
    """The text that an editor left (byte order marks, CRLF, UTF-16); "" for bytes that are none."""
    utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig").strip("\0 \t\r\n")
    except UnicodeDecodeError:
        return ""
    return text if all(c.isprintable() or c.isspace() for c in text) else ""


def write_file(path: Path, data: bytes) -> None:
    """Create or replace a file and force it to disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)


class CheckpointDirectory:
    """The directory of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # -------------------------------------------------------------- identity

    @property
    def identity(self) -> str:
        """The store's own id; without ``store.json`` every look gives another."""
        return str(self._facts()["store"])

    @property
    def current(self) -> bool:
        """Whether this version made the store, or has taken it over from an earlier one."""
        return self._facts().get("format") == FORMAT

    def mark_current(self) -> None:
        """Say so from now on."""
        self._write(IDENTITY, json.dumps({"store": self.identity, "format": FORMAT}))

    def _facts(self) -> dict[str, object]:
        path = self.root / IDENTITY
        try:
            facts: dict[str, object] = json.loads(path.read_bytes())
            if re.fullmatch(r"[0-9a-f]{32}", str(facts["store"])):
                return facts
            log.warning("%s holds no identity", path)
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%s)", path, error)
        return {"store": uuid.uuid4().hex}

    # ----------------------------------------------------------------- names

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
        folders = [folder for folder in (self.root, self.root / ASIDE) if folder.is_dir()]
        found = [DIRECTORY.match(name) for folder in folders for name in os.listdir(folder)]
        return [int(match[2]) for match in found if match and int(match[1]) == step]

    # ---------------------------------------------------------------- latest

    def read_pointer(self, name: str = LATEST) -> Pointer:
        """What ``latest`` says. A link is not followed."""
        try:
            data = read_small(self.root, name, limit=4096)
        except BadCheckpoint as bad:
            if bad.kind in ("missing", "unreadable"):
                return Pointer(reason=bad.reason)
            link = f"is a link to {os.readlink(self.root / name)}" if bad.kind == "link" else ""
            return Pointer(reason=bad.reason, edited=link or bad.reason.removeprefix(f"{name} "))
        text = _typed(data)
        if parse_name(text) is not None:
            return Pointer(text)
        return Pointer(reason=f"it holds {data[:80]!r}" if data else "it is empty", edited=text)

    def announce(self, name: str) -> None:
        """Say what ``latest`` will name, before anything is renamed for it."""
        self._write(NEXT, name)

    def publish(self) -> None:
        """Make ``latest`` name what was announced; a reader sees the old name or the new one."""
        os.replace(self.root / NEXT, self.root / LATEST)
        sync_directory(self.root)

    def finish_move(self) -> None:
        """Finish a `go_back` or a commit that was killed; an announcement of nothing is dropped."""
        if not os.path.lexists(self.root / NEXT):
            return
        name = self.read_pointer(NEXT).name
        if name in self.complete_names():
            self.go_back(name)
        else:  # killed before the directory had its name
            (self.root / NEXT).unlink()

    def go_back(
        self, name: str, *, also: Collection[str] = (), kinds: Mapping[str, str] | None = None
    ) -> dict[str, Path]:
        """Make ``name`` the newest: move newer ones and ``also`` aside, then ``latest``.

        ``kinds``: a word for the new name of some of them; of others ``abandoned``.

        Returns where each one went.

        Raises OSError: it could not be done, or in part; `finish_move` does the rest.
        """
        self.announce(name)
        moved = {
            other: self.move_aside(self.root / other, (kinds or {}).get(other, "abandoned"))
            for other in self.complete_names()
            if key_of(other) > key_of(name) or other in also
        }
        self.publish()
        return moved

    def _write(self, name: str, text: str) -> None:
        # `<name>.tmp` would look like an unfinished checkpoint of that name to a person.
        write_whole(self.root / name, text + "\n", draft=self.root / f"{name}{TMP}-file")
        sync_directory(self.root)

    # ------------------------------------------------------ aside, and delete

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

    def put_aside(self, name: str) -> None:
        """Move a file into ``aside/``, if it is there, in place of one of that name."""
        if os.path.lexists(self.root / name):
            (self.root / ASIDE).mkdir(exist_ok=True)
            os.replace(self.root / name, self.root / ASIDE / name)

    def discard(self, path: Path, kind: str, reason: str) -> Path:
        """Put an attempt aside that never was a checkpoint: its log stays, its space is given back.

        Without a seal nothing can load it; kept whole, it would fill the disk that it failed on.
        One with a seal is complete but for its name, and is put aside whole.

        Raises OSError: it could not be renamed.
        """
        if _sealed(path):
            return self.move_aside(path, kind)
        entries = sorted(os.scandir(path), key=lambda e: e.name)
        files = [f"{e.stat(follow_symlinks=False).st_size:>18,} {e.name}" for e in entries]
        shutil.rmtree(path, ignore_errors=True)  # before the rename: a kill leaves it as it was
        path.mkdir(exist_ok=True)
        what = "what could be deleted of its files" if os.listdir(path) else "its files"
        target = self._rename_aside(path, kind)
        detail = f"the reason and their names are in {target / REASON}"
        text = "\n".join([reason, "", "It was not complete; its files were deleted:", *files, ""])
        try:
            write_file(target / REASON, text.encode())
        except OSError as error:  # the disk may still be full
            detail = f"{REASON} cannot be written ({error.strerror}): {reason}"
        log.warning("%s was not complete: deleted %s; %s", path.name, what, detail)
        return target

    def delete(self, name: str) -> None:
        """Delete a complete checkpoint, or what is left of one whose deletion was killed.

        Raises OSError: it could not be deleted; `deletions` names it from now on.
        """
        doomed = self.root / (name.removesuffix(DELETING) + DELETING)
        if doomed.name != name:
            # Renamed first: a kill in the middle leaves nothing that looks complete.
            os.rename(self.root / name, doomed)
            sync_directory(self.root)
        shutil.rmtree(doomed)

    def deletions(self) -> list[str]:
        """What deletions left that were killed or failed in the middle: names for `delete`."""
        return [doomed.name for doomed in self.entries(DELETING)]


def _sealed(path: Path) -> bool:
    """Whether the last files of a save are there, whole."""
    try:
        check_seal(read_small(path, MANIFEST), read_small(path, SEAL), None)
    except (BadCheckpoint, OSError):
        return False
    return True

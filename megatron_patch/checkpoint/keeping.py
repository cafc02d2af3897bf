"""Checkpoints that age does not delete: ``kept.json`` beside them, and what retention deletes.

    {"step_00005000.attempt-1": {"danger": 5600, "signs_since": 5050},
     "step_00002000.attempt-1": "before the new data"}

When attention explodes, the way back is a checkpoint of before its first signs. ``danger`` comes
hundreds of steps before anybody looks, and by then ``keep_last`` would have deleted it. So the one
to go back to is written down at the danger. The first of a branch stays until a person takes the
entry out: it is the one that no later mistake of the early warning can push out. Of those of later
dangers the last stays. Entries that a person wrote, any text, stay as well.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.checkpoint.errors import BadCheckpoint
from megatron_patch.checkpoint.files import read_small
from megatron_patch.checkpoint.manifest import Manifest
from megatron_patch.checkpoint.shelf import DELETING, TMP, Shelf, key_of, parse_name
from megatron_patch.runtime.files import sync_directory, write_whole

log = logging.getLogger(__name__)

FILE = "kept.json"
MAX_BYTES = 1 << 20
EXAMPLE = '{"step_00005000.attempt-1": {"danger": 5600, "signs_since": 5050}}'


class KeptFileError(ValueError):
    """The file does not say which checkpoints are kept: until it does, none may be deleted."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Why one is kept: a person's words, or a danger of the early warning."""

    words: str = ""
    danger: int | None = None
    """Step of the record at danger; None: a person wrote the entry."""
    since: int = 0
    """Step of the first record that showed a sign."""

    def __str__(self) -> str:
        if self.danger is None:
            return "".join(c if c.isprintable() else "?" for c in self.words) or "without a reason"
        told = f"danger at step {self.danger:,}"
        return told if self.since == self.danger else f"{told}, signs since step {self.since:,}"

    def entry(self) -> str | dict[str, int]:
        """As the file has it."""
        if self.danger is None:
            return self.words
        return {"danger": self.danger, "signs_since": self.since}

    @classmethod
    def of(cls, name: str, entry: object) -> Kept:
        """The other way round.

        Raises:
            ValueError: it is no such entry.
        """
        if isinstance(entry, str):
            return cls(words=entry)
        if isinstance(entry, dict) and set(entry) == {"danger", "signs_since"}:
            danger, since = entry["danger"], entry["signs_since"]
            if type(danger) is int and type(since) is int:
                return cls(danger=danger, since=since)
        raise ValueError(f"why {name} is kept is no text and no danger but {entry!r:.80}")


def read(root: Path) -> dict[str, Kept]:
    """The kept checkpoints and why, by name; they need not be there any more.

    Raises:
        KeptFileError: it cannot be read, or is not what this program writes.
    """
    try:
        found = json.loads(read_small(root, FILE, limit=MAX_BYTES))
        if not isinstance(found, dict):
            raise ValueError(f"holds no JSON object but a {type(found).__name__}")
        kept = {}
        for name, entry in found.items():
            if parse_name(name) is None:
                raise ValueError(f"{name!r:.80} is no checkpoint's name")
            kept[name] = Kept.of(name, entry)
    except BadCheckpoint as bad:
        if bad.kind == "missing":
            return {}
        raise _damaged(root, bad.why) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(root, str(error)) from None
    return kept


def _damaged(root: Path, why: str) -> KeptFileError:
    return KeptFileError(
        f"{root / FILE}: {why}; it names checkpoints that must not be deleted: put the right one "
        f"back, e.g. {EXAMPLE}, or delete it to keep none of them"
    )


def write(root: Path, kept: Mapping[str, Kept]) -> None:
    """Replace the file.

    Raises:
        OSError: it could not be written; the old one is whole.
    """
    text = json.dumps({name: why.entry() for name, why in kept.items()}, indent=1) + "\n"
    write_whole(root / FILE, text, draft=root / (FILE + TMP + "-file"))
    sync_directory(root)


def choose(line: Sequence[str], began: int, good: Callable[[str], bool]) -> str | None:
    """The newest checkpoint from before the first signs; the oldest where none is that old.

    Args:
        line: the trained branch, newest first.
        began: first step of the first record that shows a sign: later ones may be sick already.
        good: whether a checkpoint can be gone back to, as far as that is cheap to tell.
    """
    before = (name for name in line if key_of(name)[0] < began and good(name))
    return next(before, None) or next((name for name in reversed(line) if good(name)), None)


def keep(
    root: Path, line: Sequence[str], *, danger: int, began: int, good: Callable[[str], bool]
) -> bool:
    """Write down which checkpoint of the trained branch to go back to; whether one is kept now.

    One danger goes on as long as its signs do: while they go back to a danger for which a good one
    is kept, nothing changes. Another one, after a calm, gets its own.

    Args:
        root: directory of the store.
        line: complete checkpoints of the trained branch, newest first.
        danger: step of the record at `danger`.
        began: see `choose`.
        good: see `choose`.

    Raises:
        KeptFileError: as `read`; nothing was written.
        OSError: it could not be written.
    """
    kept = read(root)
    mine = [n for n in reversed(line) if n in kept and kept[n].danger is not None and good(n)]
    if any(began <= (kept[n].danger or 0) for n in mine):
        return True
    name = choose(line, began, good)
    if name is None:
        return False
    if name not in kept or kept[name].danger is not None:  # a person's word for it stays
        passed = mine[1:]  # neither the first of this branch nor the newest
        rest = {n: why for n, why in kept.items() if n not in passed}
        write(root, {**rest, name: Kept(danger=danger, since=began)})
    which = "the newest from before the signs"
    if key_of(name)[0] >= began:
        which = f"the oldest there is, none is from before the signs (step {began:,})"
    text = "checkpoint %s is kept: %s that led to danger at step %s; to go back to it see "
    log.info(text + "docs/checkpoints.md, going back", name, which, f"{danger:,}")
    return True


def finish_deletions(shelf: Shelf) -> None:
    """Delete what a kill in the middle of a deletion left.

    Raises:
        OSError: it could not be deleted.
    """
    for doomed in shelf.entries(DELETING):
        shutil.rmtree(doomed)


def delete(shelf: Shelf, old: Sequence[str], read_manifest: Callable[[Path], Manifest]) -> None:
    """Delete checkpoints that have had their time: this store's own, and none that is kept.

    Args:
        shelf: directory of the store.
        old: complete checkpoints.
        read_manifest: of a directory, verified.

    Raises:
        OSError: one could not be deleted.
    """
    try:
        kept = read(shelf.root)
    except KeptFileError as error:
        log.warning("no old checkpoint is deleted: %s", error)
        return
    identity = shelf.identity(create=False)
    for name in old:
        if name in kept:
            continue
        path = shelf.root / name
        try:
            manifest = read_manifest(path)
        except (BadCheckpoint, OSError) as error:
            log.warning("old checkpoint %s is kept: %s", name, error)
            continue
        if manifest.store != identity:
            log.warning("old checkpoint %s is kept: another store wrote it", name)
            continue
        doomed = shelf.root / (name + DELETING)
        # Renamed first: a kill in the middle leaves nothing that looks complete.
        os.rename(path, doomed)
        shutil.rmtree(doomed)
        log.info("deleted old checkpoint %s", name)

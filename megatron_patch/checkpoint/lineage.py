"""Which checkpoint was continued to which: the branches that going back leaves in a store.

Whoever goes back to step 1000 leaves 1500 and 2000 behind, and trains another 1100. From there the
newest good checkpoint below 1100 is 1000, not 2000, whatever the numbers say. So every checkpoint
records its parent: the one it was resumed from, or the one saved before it by the same process.
The manifest says it (``info.parent``), and the file ``lineage`` of the store repeats it, a line a
checkpoint, because a manifest that cannot be read, or was put aside, must not hide the way back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_patch.checkpoint.errors import BadCheckpoint
from megatron_patch.checkpoint.files import read_small
from megatron_patch.checkpoint.shelf import LATEST, key_of, parse_name
from megatron_patch.runtime.records import append_line

log = logging.getLogger(__name__)

LINEAGE = "lineage"
NONE, UNKNOWN = "-", "?"
"""Stand for the parent of one that continues none, and of one whose writer never looked."""
MAX_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Branch:
    """The complete checkpoints of a store, seen from one of them."""

    live: list[str] = field(default_factory=list)
    """It and its ancestors, nearest first."""
    newer: list[str] = field(default_factory=list)
    """Newer than a start whose parent nobody recorded (older stores): perhaps left behind."""
    other: list[str] = field(default_factory=list)
    """Left behind: no ancestors of it."""


@dataclass(slots=True)
class Record:
    """What the file ``lineage`` says."""

    parents: dict[str, str | None] = field(default_factory=dict)
    last: str | None = None
    """The checkpoint saved last."""


def record(root: Path, name: str, parent: str) -> None:
    """Append a line and force it to disk; ``parent`` is a name, NONE or UNKNOWN.

    Raises:
        OSError: it could not be written.
    """
    append_line(root / LINEAGE, f"{name} {parent}", durable=True)


def recorded(root: Path) -> Record:
    """Read the file; lines that are none are passed over."""
    found = Record()
    try:
        text = read_small(root, LINEAGE, limit=MAX_BYTES).decode("ascii", "replace")
    except (BadCheckpoint, OSError):
        return found
    for line in text.splitlines():
        name, _, parent = line.partition(" ")
        if parse_name(name) is None:
            continue
        if parent == NONE or parse_name(parent) is not None:
            found.parents[name] = None if parent == NONE else parent
        elif parent != UNKNOWN:
            continue
        found.last = name
    return found


def start(root: Path, names: list[str], known: Record) -> str:
    """The checkpoint to continue from, if it is good: what ``latest`` names, else the last saved.

    It need not be there any more: then its ancestors are next.

    Args:
        root: directory of the store.
        names: complete checkpoints, newest first; at least one.
        known: `recorded`.
    """
    pointer = root / LATEST
    try:
        latest = read_small(root, LATEST, limit=200).decode("ascii", "replace").strip()
    except BadCheckpoint as bad:
        log.warning("%s: %s; taking the newest complete checkpoint", pointer, bad.why)
    else:
        if latest in names:
            if latest != names[0]:
                log.warning("%s names %s although %s is newer", LATEST, latest, names[0])
            return latest
        where = "the newest before it" if latest in known.parents else "the newest"
        text = "%s names %r, which is not a complete checkpoint here; taking %s"
        log.warning(text, pointer, latest[:80], where)
        if latest in known.parents:
            return latest
    return known.last or names[0]


def branch(
    names: list[str],
    start: str,
    known: Record,
    parent_of: Callable[[str], str | None],
    *,
    guess: bool = True,
) -> Branch:
    """Tell the ancestors of ``start`` from what was left behind.

    Where a parent is not recorded the checkpoint comes from an earlier version of this program (or
    from a process that never looked what there is), and so do all before it: older ones of that
    kind count as its ancestors.

    Args:
        names: complete checkpoints, newest first.
        start: a name; it need not be there any more.
        known: `recorded`.
        parent_of: parent of a name; KeyError where nobody recorded it.
        guess: whether such older ones count; they may be another training's.
    """
    live: list[str] = []
    newer: list[str] = []
    seen: set[str] = set()
    at: str | None = start
    while at is not None and at not in seen:
        seen.add(at)
        if at in names:
            live.append(at)
        try:
            parent = parent_of(at)
        except KeyError:
            key = key_of(at)
            old = [n for n in names if n not in known.parents and n not in live]
            live += [n for n in old if guess and key_of(n) < key]
            if at == start:
                newer = [n for n in old if key_of(n) > key]
            break
        at = parent
    return Branch(live, newer, [n for n in names if n not in live and n not in newer])


def retired(names: list[str], line: list[str], *, keep_last: int, behind: int) -> list[str]:
    """Which complete checkpoints have had their time once another is complete.

    Of the branch that is trained the last ``keep_last`` stay, however many of another branch lie
    between them; what was left behind goes when as many newer ones are there, as ever. Of the
    branch that is trained the newest stays too that is ``behind`` steps older than the one just
    saved, or the oldest while none is: saves off the interval, at a graceful stop, push the last
    ``keep_last`` together.

    Args:
        names: complete checkpoints, newest first.
        line: the one just saved and its ancestors, nearest first.
        keep_last: how many stay.
        behind: steps that it must be possible to go back.
    """
    newest = key_of(line[0])
    older = [name for name in names if key_of(name) < newest]
    live = [name for name in line if name in older]
    back = next((name for name in line if key_of(name)[0] <= newest[0] - behind), line[-1])
    kept = [*live[: keep_last - 1], back]
    return [name for name in older[keep_last - 1 :] if name not in kept]

"""Stores of earlier versions, read once: which checkpoints their ``latest`` had left behind.

There a person went back by writing an older name into ``latest``; newer checkpoints stayed where
they were, and the file ``lineage`` (``NAME PARENT`` a line) told the branches apart. From now on
the newest complete checkpoint is the one to continue, so what was left behind has to move aside
first. Pinned checkpoints were named by ``kept.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_patch.checkpoint.directory import CheckpointDirectory, key_of, parse_name
from megatron_patch.checkpoint.errors import BadCheckpoint
from megatron_patch.checkpoint.manifest import read_small

LINEAGE, KEPT = "lineage", "kept.json"
NONE, UNKNOWN = "-", "?"
"""Stand for the parent of one that continues none, and of one whose writer never looked."""


def left_behind(directory: CheckpointDirectory, start: str = "") -> tuple[str, list[str]]:
    """(the checkpoint that the run was at, those that are not among its ancestors).

    The run was at ``start``, else at the one that ``latest`` names, which need not be there any
    more, else at the one saved last. Older ones whose parent nobody recorded count as ancestors.
    """
    names = directory.complete_names()
    parents, last = _lineage(directory.root)
    latest = directory.read_pointer().name
    known = latest in names or latest in parents
    start = start or (latest if known else last or names[0])
    line: list[str] = []
    at: str | None = start
    while at is not None and at not in line:
        line.append(at)
        at = parents.get(at)
    open_end = line[-1] not in parents

    def stays(name: str) -> bool:
        unrecorded = open_end and name not in parents and key_of(name) < key_of(start)
        return name in line or unrecorded

    return start, [name for name in names if not stays(name)]


def _lineage(root: Path) -> tuple[dict[str, str | None], str]:
    """(parent by name, the checkpoint saved last); lines that are none are passed over."""
    parents: dict[str, str | None] = {}
    last = ""
    try:
        text = read_small(root, LINEAGE, limit=1 << 28).decode("ascii", "replace")
    except (BadCheckpoint, OSError):
        return parents, last
    for line in text.splitlines():
        name, _, parent = line.partition(" ")
        if parse_name(name) is None:
            continue
        if parent == NONE or parse_name(parent) is not None:
            parents[name] = None if parent == NONE else parent
        elif parent != UNKNOWN:
            continue
        last = name
    return parents, last


def close(directory: CheckpointDirectory) -> None:
    """Nothing is left behind any more: the store is one of this version."""
    directory.put_aside(LINEAGE)
    directory.mark_current()


def kept(root: Path) -> dict[str, str]:
    """Why each checkpoint is kept that ``kept.json`` names, as `checkpoint.pinned` says it.

    Raises ValueError: it is damaged.
    """
    try:
        found = json.loads(read_small(root, KEPT, limit=1 << 20))
        reasons = {name: _reason(entry) for name, entry in found.items()}
        if any(parse_name(name) is None for name in reasons):
            raise ValueError("it names something that is no checkpoint")
    except BadCheckpoint as bad:
        if bad.kind == "missing":
            return {}
        raise ValueError(bad.reason) from None
    except (AttributeError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"malformed: {error!r}") from None
    return reasons


def _reason(entry: object) -> str:
    if isinstance(entry, str):
        return " ".join(entry.split())
    if isinstance(entry, dict):
        danger, since = int(entry["danger"]), int(entry["signs_since"])
        return f"danger at step {danger}, signs since step {since}"
    raise ValueError(f"{entry!r:.80} is no reason")

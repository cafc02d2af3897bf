"""The file ``pinned`` of a store: checkpoints that are never deleted for their age, a line each.

    step_00005000.attempt-1 danger at step 5600, signs since step 5050
    step_00002000.attempt-1 before the new data

When attention diverges, the way back is a checkpoint from before its first signs. ``danger`` comes
hundreds of steps after them, and somebody looks later still: ``keep_last`` would have deleted it.
So the early warning pins one. It pins two at most: the one from before the first danger, which
nothing but a person releases, and the one from before the latest. Lines that a person wrote stay.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_patch.checkpoint import earlier
from megatron_patch.checkpoint.directory import ASIDE, TMP, CheckpointDirectory, key_of, parse_name
from megatron_patch.checkpoint.errors import BadCheckpoint
from megatron_patch.checkpoint.manifest import read_small
from megatron_patch.runtime.files import sync_directory, write_whole

log = logging.getLogger(__name__)

FILE = "pinned"
EXAMPLE = "step_00005000.attempt-1 before the new data"
MAX_BYTES = 1 << 20
WARNING = re.compile(r"danger at step (\d+), signs since step (\d+)")


class PinnedFileError(ValueError):
    """The file does not say which checkpoints are pinned: until it does, none may be deleted."""


def read(root: Path) -> dict[str, str]:
    """Why each pinned checkpoint is pinned, by name; they need not be there any more.

    Raises PinnedFileError: it, or the ``kept.json`` of an earlier version, cannot be read.
    """
    file = earlier.KEPT
    try:
        pins = earlier.kept(root)
        file = FILE
        return pins | _parse(root)
    except (OSError, ValueError, BadCheckpoint) as error:
        raise PinnedFileError(
            f"{root / file}: {error}; it names checkpoints that must not be deleted: mend it, or "
            "delete it to pin none"
        ) from None


def _parse(root: Path) -> dict[str, str]:
    if not os.path.lexists(root / FILE):
        return {}
    pins = {}
    for line in read_small(root, FILE, limit=MAX_BYTES).decode().splitlines():
        name, _, reason = line.strip().partition(" ")
        if not name:
            continue
        if parse_name(name) is None:
            raise ValueError(f"{name!r:.80} is no checkpoint's name ('{EXAMPLE}' is a good line)")
        pins[name] = "".join(c if c.isprintable() else "?" for c in reason.strip())
    return pins


def missing_warning(root: Path, names: Sequence[str]) -> str:
    """A warning about what a person pinned and is not there, where the one meant may go; or "".

    ``names`` are the complete checkpoints. Those moved aside are there, and those of the early
    warning were.
    """
    try:
        pins = read(root)
    except PinnedFileError as error:
        return str(error)
    aside = os.listdir(root / ASIDE) if (root / ASIDE).is_dir() else []
    missing = [
        name
        for name, why in pins.items()
        if name not in names
        and not WARNING.fullmatch(why)
        and not any(left.startswith(f"{name}.") for left in aside)
    ]
    text = f"{root / FILE} names {', '.join(missing)}: no checkpoint here, and none is kept for it"
    return f"{text}; mend the line, or remove it" if missing else ""


def write(root: Path, pins: Mapping[str, str]) -> None:
    """Replace the file.

    Raises OSError: it could not be written; the old one is whole.
    """
    text = "".join(f"{name} {reason}".strip() + "\n" for name, reason in pins.items())
    write_whole(root / FILE, text, draft=root / f"{FILE}{TMP}-file")
    sync_directory(root)


def adopt(directory: CheckpointDirectory) -> None:
    """Take over the ``kept.json`` of an earlier version. A damaged one stays, and is logged."""
    root = directory.root
    if not os.path.lexists(root / earlier.KEPT):
        return
    try:
        write(root, read(root))
        directory.put_aside(earlier.KEPT)
    except (PinnedFileError, OSError) as error:  # it counts as well where it is
        log.warning("%s stays: %s", earlier.KEPT, error)
        return
    log.warning("%s is now %s, a line for each checkpoint", root / earlier.KEPT, root / FILE)


def pin_before(
    root: Path, names: Sequence[str], *, danger: int, began: int, good: Callable[[str], bool]
) -> bool:
    """Pin the checkpoint to go back to from a danger; whether one is pinned now.

    It is the newest from before the signs, or the oldest where none is that old. A danger goes on
    as long as its signs do: while they reach back to one that has a good pin, nothing changes.

    Args:
        names: complete checkpoints, newest first.
        danger: step of the record at `danger`.
        began: first step of the first record that shows a sign: later ones may be sick already.
        good: whether a checkpoint can be gone back to, as far as that is cheap to tell.

    Raises:
        PinnedFileError: as `read`; nothing was written.
        OSError: it could not be written.
    """
    pins = read(root)
    warned = {n: int(found[1]) for n, why in pins.items() if (found := WARNING.fullmatch(why))}
    mine = [n for n in reversed(names) if n in warned and good(n)]
    if any(began <= warned[n] for n in mine):
        return True
    before = (n for n in names if key_of(n)[0] < began and good(n))
    name = next(before, None) or next((n for n in reversed(names) if good(n)), None)
    if name is None:
        return False
    if name not in pins or name in warned:  # a person's reason stays
        rest = {n: why for n, why in pins.items() if n not in mine[1:]}  # the first one stays
        write(root, {**rest, name: f"danger at step {danger}, signs since step {began}"})
    which = "the newest from before the signs"
    if key_of(name)[0] >= began:
        which = f"the oldest there is, none is from before the signs (step {began:,})"
    text = "checkpoint %s is pinned: %s that led to danger at step %s; to go back to it: "
    text += "megatron-patch checkpoint rollback (docs/checkpoints.md)"
    log.info(text, name, which, f"{danger:,}")
    return True

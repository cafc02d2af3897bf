"""The rule: the newest complete checkpoint is the one to continue. And how a run goes back.

Whoever goes back moves the newer ones to ``aside/``: a person with ``megatron-patch checkpoint
rollback``, a rewind after a loss spike, a load that refused the newest. ``latest`` always names the
newest, for people and scripts. Where it names another one somebody edited it, as earlier versions
asked for, and nothing is continued before a person has said which one is meant.

Local; `checkpoint.store` calls this on rank 0.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from megatron_patch.checkpoint import earlier, pinned
from megatron_patch.checkpoint.directory import LATEST, NEXT, CheckpointDirectory
from megatron_patch.checkpoint.errors import CheckpointError

log = logging.getLogger(__name__)


def candidates(directory: CheckpointDirectory) -> list[str]:
    """The complete checkpoints to try, newest first. Changes nothing.

    Raises:
        CheckpointError: ``latest`` names another than the newest, or one that is not there.
    """
    names = directory.complete_names()
    if not names:
        return []
    if not directory.current:
        start, left = earlier.left_behind(directory)
        stay = [name for name in names if name not in left]
        if not stay:
            raise CheckpointError(_edited(directory.root, start, names[0]))
        return stay
    announced, _ = directory.read_pointer(NEXT)
    if announced in names:  # a process was killed, or is, in the middle of a move
        return names[names.index(announced) :]
    latest, why = directory.read_pointer()
    if why:
        log.warning("%s: %s; taking the newest, %s", directory.root / LATEST, why, names[0])
    elif latest != names[0]:
        raise CheckpointError(_edited(directory.root, latest, names[0]))
    return names


def _edited(root: Path, latest: str, newest: str) -> str:
    command = f"megatron-patch checkpoint rollback {shlex.quote(str(root))} --to"
    text = f"{root / LATEST} names {latest}, which is not a complete checkpoint here"
    if (root / latest).is_dir():
        text = (
            f"{root / LATEST} names {latest}, and {newest} is newer; to go back, which moves newer "
            f"ones aside: {command} {latest}"
        )
    return f"{text}; to continue from the newest: {command} {newest}"


def take_over(directory: CheckpointDirectory) -> None:
    """Before a run reads or writes its store: finish what was killed, adopt an earlier version's.

    There ``latest`` may name an older checkpoint, because a person went back. It is honoured once:
    no unattended start after an upgrade continues what was left behind.

    Raises:
        CheckpointError: ``latest`` of an earlier version names none, and nothing is older.
        OSError: something could not be moved.
    """
    directory.finish_move()
    pinned.adopt(directory)
    if directory.current:
        return
    stay = candidates(directory)
    if stay:
        start, left = earlier.left_behind(directory)
        if left:
            log.warning(
                "%s is of an earlier version, and its run was at %s: moving what is newer or of "
                "another branch to aside/ (%s); from now on the newest complete checkpoint is the "
                "one to continue, and megatron-patch checkpoint rollback goes back",
                *(directory.root, start, ", ".join(left)),
            )
            directory.go_back(stay[0], also=left)
    earlier.close(directory)


def go_back(directory: CheckpointDirectory, name: str) -> dict[str, Path]:
    """Make a complete checkpoint the newest; the others, and where each one went.

    Raises:
        OSError: it could not be done, or in part; the next start does the rest.
    """
    pinned.adopt(directory)
    left = [] if directory.current else earlier.left_behind(directory, name)[1]
    moved = directory.go_back(name, also=left)
    if not directory.current:
        earlier.close(directory)
    return moved

"""The rule: the newest complete checkpoint is the one to continue. And how a run goes back.

Whoever goes back moves the newer ones to ``aside/``: a person with ``megatron-patch checkpoint
rollback``, a rewind after a loss spike, a load that refused the newest. ``latest`` always names the
newest, for people and scripts. Where it says anything else somebody edited it, as earlier versions
and other trainers ask for, and nothing is continued before a person has said which one is meant.
Lost, empty or torn, it says nothing.

Local; `checkpoint.store` calls this on rank 0.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_patch.checkpoint import earlier, pinned
from megatron_patch.checkpoint.directory import ASIDE, LATEST, NEXT, CheckpointDirectory, parse_name
from megatron_patch.checkpoint.errors import CheckpointError
from megatron_patch.checkpoint.manifest import MANIFEST

log = logging.getLogger(__name__)


def candidates(directory: CheckpointDirectory, *, own: bool = True) -> list[str]:
    """The complete checkpoints to try, newest first. Changes nothing.

    ``own`` is False for the store of another run, where the remedy is another.

    Raises CheckpointError: ``latest`` names another than the newest, or one that is not there, or
    holds something that is no name.
    """
    names = directory.complete_names()
    if not names:
        return []
    refuse_edited(directory, own=own)
    if not directory.current:
        start, left = earlier.left_behind(directory)
        stay = [name for name in names if name not in left]
        if not stay:
            raise CheckpointError(_edited(directory.root, "", start, names, own=own))
        return stay
    announced = directory.read_pointer(NEXT).name
    if announced in names:  # a process was killed, or is, in the middle of a move
        return names[names.index(announced) :]
    latest = directory.read_pointer()
    if latest.reason:
        log.warning(
            "%s: %s; taking the newest, %s", directory.root / LATEST, latest.reason, names[0]
        )
    elif latest.name != names[0]:
        raise CheckpointError(_edited(directory.root, "", latest.name, names, own=own))
    return names


def refuse_edited(directory: CheckpointDirectory, *, own: bool = True) -> None:
    """Do not take what somebody made of ``latest`` for damage.

    What a crash leaves of it is the beginning of the name that it held. A move that was announced
    is finished: ``latest`` is about to be replaced.

    Raises CheckpointError: it holds another text than that, or is a link or a directory; or, in the
    store of an earlier version, names a checkpoint of which nothing is known.
    """
    names, latest = directory.complete_names(), directory.read_pointer()
    if not names or directory.read_pointer(NEXT).name in names:
        return
    at = names[0]
    if not directory.current:
        at = earlier.left_behind(directory)[0]  # what `latest` names, if anything is known of it
    elif latest.name:
        return  # `candidates` knows what is newer
    if at.startswith(latest.name or latest.edited):
        return
    text = (
        f"holds {latest.edited[:200]!r}" if latest.reason.startswith("it holds") else latest.edited
    )
    raise CheckpointError(_edited(directory.root, text, latest.name, names, own=own))


def unfinished(directory: CheckpointDirectory) -> str:
    """What to say where going back was interrupted before all newer ones were aside; else empty.

    The next start finishes it, so the newest is not the one that counts.
    """
    names, to = directory.complete_names(), directory.read_pointer(NEXT).name
    if to not in names[1:]:
        return ""
    command = f"megatron-patch checkpoint rollback {shlex.quote(str(directory.root))} --to"
    return (
        f"{directory.root}: going back to {to} was interrupted, and newer ones are there still; "
        f"finish it: {command} {to}; or continue from the newest: {command} {names[0]}"
    )


def _edited(root: Path, text: str, name: str, names: Sequence[str], *, own: bool) -> str:
    """Why ``latest`` is for a person, and the commands that decide it.

    It holds the ``name`` of a checkpoint, or "" and what ``text`` says of it.
    """
    command = f"megatron-patch checkpoint rollback {shlex.quote(str(root))} --to"
    text = f"{root / LATEST} {f'names {name}' if name else text}"
    if name in names[1:]:
        text += f", and {names[0]} is newer"
    else:
        aside = sorted((root / ASIDE).glob(f"{name}.*")) if name else []
        moved = f" (it was moved to {aside[-1]})" if aside else ""
        text += f", which is not a complete checkpoint here{moved}"
    if not own:
        named = root / (name if name in names else names[0])
        return f"{text}; name the one to start from: checkpoint.load_from: {named}"
    to = name if name in names[1:] else "STEP"
    text += f"; to go back, which moves newer ones aside: {command} {to}"
    return f"{text}; to continue from the newest: {command} {names[0]}"


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

    Raises OSError: it could not be done, or in part; the next start does the rest.
    """
    pinned.adopt(directory)
    left = [] if directory.current else earlier.left_behind(directory, name)[1]
    if directory.read_pointer().edited and (directory.root / LATEST).is_dir():
        directory.move_aside(directory.root / LATEST, "replaced")  # no file takes its place
    moved = directory.go_back(name, also=left)
    if not directory.current:
        earlier.close(directory)
    return moved


def of_step(path: Path, step: int) -> Path:
    """The last checkpoint of a step in a run directory or store, or itself where it is of it.

    Raises CheckpointError: there is none; naming the steps there are.
    """
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    names = [path.name]
    if not (path / MANIFEST).is_file():
        names = CheckpointDirectory(root).complete_names()
    found = {name: key[0] for name in names if (key := parse_name(name)) is not None}
    for name in (name for name, its in found.items() if its == step):
        return path if name == path.name else root / name
    steps = ", ".join(map(str, sorted(set(found.values())))) or "none"
    raise CheckpointError(f"checkpoint.load_step {step}: {path} has the steps {steps}")

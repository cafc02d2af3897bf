"""Looking at the checkpoints of a run without training: what is there, is it good, what may go.

Nothing here needs torch, a GPU or the run's configuration, and nothing but `delete` changes a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_patch.checkpoint import keeping
from megatron_patch.checkpoint.errors import BadCheckpoint, CheckpointError
from megatron_patch.checkpoint.files import describe, read_small
from megatron_patch.checkpoint.manifest import SEAL, Manifest, check_file
from megatron_patch.checkpoint.shelf import ASIDE, DELETING, IDENTITY, LATEST, TMP, parse_name
from megatron_patch.checkpoint.store import CheckpointStore
from megatron_patch.runtime.files import sync_directory

State = Literal["complete", "good", "damaged", "unreadable", "unfinished", "being deleted", "aside"]
Progress = Callable[[int, int], None]


class NoCheckpointsError(ValueError):
    """The path holds no checkpoints; the text says what it is and what is expected."""


class PruneError(CheckpointError):
    """A deletion failed; what was deleted before is gone, everything else stands."""

    exit_code = 1


class KeyFileError(ValueError):
    """The key cannot be used."""


class BusyError(ValueError):
    """A trainer uses the run directory right now."""


@dataclass(slots=True)
class Entry:
    """One directory of the store."""

    path: Path
    name: str
    step: int | None
    attempt: int | None
    state: State
    reason: str = ""
    """Why it is damaged or unreadable."""
    size: int = 0
    """Bytes of its files."""
    created: str = ""
    """UTC time of the commit; of an unfinished one, of its last change."""
    signed: bool = False
    latest: bool = False
    """Whether ``latest`` names it."""
    kept: str = ""
    """Why age does not delete it (`checkpoint.keeping`); empty where it may."""
    manifest: Manifest | None = None

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        names = ("name", "step", "attempt", "state", "reason", "size", "created", "signed",
                 "latest", "kept")  # fmt: skip
        return {n: getattr(self, n) for n in names} | {"path": str(self.path)}


def resolve(path: str | Path) -> tuple[Path, str | None]:
    """(directory of the store, name of the one checkpoint meant or None for all).

    Args:
        path: a run directory, its ``checkpoints``, or one checkpoint.

    Raises:
        NoCheckpointsError: it is none of them.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise NoCheckpointsError(
            f"{path} {what}; name a run directory, its checkpoints/, or one checkpoint in it"
        )
    path = Path(os.path.abspath(path))
    if parse_name(path.name) is not None:
        return path.parent, path.name
    for root in (path / "checkpoints", path):
        if (root / IDENTITY).is_file() or _has_checkpoints(root):
            return root, None
    raise NoCheckpointsError(
        f"{path} holds no checkpoints: neither it nor its checkpoints/ has {IDENTITY} or "
        "step_*.attempt-* directories (a run with checkpoint.directory keeps them there)"
    )


def _has_checkpoints(root: Path) -> bool:
    if not root.is_dir():
        return False
    return any(parse_name(name.removesuffix(TMP)) for name in os.listdir(root))


def survey(root: Path, *, key: bytes | None = None, only: str | None = None) -> list[Entry]:
    """Every directory of the store, newest first, those moved aside last. Hashes nothing.

    Args:
        root: directory of the store.
        key: checks signatures as well; without it they are only reported.
        only: name of one checkpoint.
    """
    store = CheckpointStore(root, keep_last=None, hmac_key=key)
    latest = ""
    with contextlib.suppress(BadCheckpoint):
        latest = read_small(root, LATEST, limit=200).decode("ascii", "replace").strip()
    kept: dict[str, keeping.Kept] = {}
    with contextlib.suppress(keeping.KeptFileError):  # `kept_problem` tells of it
        kept = keeping.read(root)
    found: list[Entry] = []
    for name in sorted(os.listdir(root)):
        for suffix, state in ((TMP, "unfinished"), (DELETING, "being deleted"), ("", "complete")):
            key_ = parse_name(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if key_ is not None and (only is None or name == only):
                entry = Entry(root / name, name, *key_, state=state)  # type: ignore[arg-type]
                _describe(entry, store)
                entry.latest = name == latest
                if name in kept:
                    entry.kept = str(kept[name])
                found.append(entry)
                break
    found.sort(key=lambda e: (e.step or 0, e.attempt or 0), reverse=True)
    if only is None and (root / ASIDE).is_dir():
        for name in sorted(os.listdir(root / ASIDE)):
            entry = Entry(root / ASIDE / name, f"{ASIDE}/{name}", None, None, state="aside")
            _describe(entry, store)
            found.append(entry)
    return found


def kept_problem(root: Path) -> str:
    """What is wrong with the file that names the kept ones; empty where nothing is."""
    try:
        keeping.read(root)
    except keeping.KeptFileError as error:
        return str(error)
    return ""


def _describe(entry: Entry, store: CheckpointStore) -> None:
    """Size and time; of a complete one what its manifest says."""
    with contextlib.suppress(OSError):
        entry.size = sum(f.lstat().st_size for f in entry.path.iterdir())
        changed = time.gmtime(entry.path.stat().st_mtime)
        entry.created = time.strftime("%Y-%m-%dT%H:%M:%SZ", changed)
    if entry.state != "complete":
        return
    found = store.examine(entry.path)
    if isinstance(found, BadCheckpoint):
        entry.state = "damaged" if found.damaged else "unreadable"
        entry.reason = found.why
        return
    entry.manifest, entry.created = found, found.created
    with contextlib.suppress(BadCheckpoint, OSError):
        entry.signed = b"hmac-sha256" in read_small(entry.path, SEAL)


def verify(
    entries: list[Entry], *, jobs: int = 4, sampled: bool = False, progress: Progress | None = None
) -> None:
    """Hash the files of the complete ones; sets their state to good, damaged or unreadable.

    Args:
        entries: from `survey`; others than complete ones are left as they are.
        jobs: files hashed at once (hashing releases the interpreter lock).
        sampled: of large files a fixed sample of pages only.
        progress: called now and then with (bytes done, bytes of all).
    """
    work = [
        (entry, name, digest)
        for entry in entries
        if entry.state == "complete" and entry.manifest is not None
        for name, digest in sorted(entry.manifest.files.items(), key=lambda x: -x[1].size)
    ]
    total, done, lock = sum(d.size for _, _, d in work), 0, threading.Lock()

    def check(item: Any) -> None:
        nonlocal done
        entry, name, digest = item
        if not entry.reason:  # one bad file is enough
            try:
                check_file(entry.path, name, digest, sampled=sampled)
            except BadCheckpoint as bad:
                entry.state = "damaged" if bad.damaged else "unreadable"
                entry.reason = bad.why
        with lock:
            done += digest.size
            if progress is not None:
                progress(done, total)

    with ThreadPoolExecutor(max(1, jobs), "verify") as pool:
        list(pool.map(check, work))
    for entry in entries:
        if entry.state == "complete" and entry.manifest is not None:
            entry.state = "good"


# ------------------------------------------------------------------------------------------- prune


@dataclass(frozen=True, slots=True)
class Plan:
    """What a prune keeps, with reasons, and what it would delete."""

    kept: list[tuple[Entry, str]]
    doomed: list[Entry]


def plan(root: Path, entries: list[Entry], *, last: int | None, every: int | None) -> Plan:
    """Apply the rule: the newest ``last``, every step that is a multiple of ``every``; union.

    Always kept: the newest one, what ``latest`` names, what ``kept.json`` names, damaged and
    unreadable ones (evidence), those another store wrote. Unfinished ones and ``aside/`` are no
    business of a prune.

    Raises:
        KeptFileError: ``kept.json`` is damaged.
    """
    keeping.read(root)  # where it does not tell, any of them may be one to keep
    identity = CheckpointStore(root, keep_last=None).identity()
    complete = [e for e in entries if e.state in ("complete", "good")]
    kept: list[tuple[Entry, str]] = []
    doomed: list[Entry] = []
    for place, entry in enumerate(complete):
        assert entry.manifest is not None and entry.step is not None
        if entry.latest:
            kept.append((entry, "latest names it"))
        elif place < max(last or 1, 1):
            kept.append((entry, f"among the newest {last or 1}"))
        elif every is not None and entry.step % every == 0:
            kept.append((entry, f"multiple of {every}"))
        elif entry.kept:
            kept.append((entry, f"kept: {entry.kept}"))
        elif entry.manifest.store != identity:
            kept.append((entry, "another store wrote it"))
        else:
            doomed.append(entry)
    kept += [(e, e.reason) for e in entries if e.state in ("damaged", "unreadable")]
    return Plan(kept, doomed)


def delete(root: Path, found: Plan, *, jobs: int = 4, progress: Progress | None = None) -> int:
    """Carry a plan out; the bytes that came free.

    What ``kept.json`` names by now stays, and the plan says so afterwards. Before anything is
    deleted one checkpoint that stays is hashed and found good, newest first.

    Raises:
        CheckpointError: none of those that stay is good; nothing was deleted.
        BusyError: a trainer uses the directory.
        KeptFileError: ``kept.json`` is damaged; nothing was deleted.
    """
    if not found.doomed:
        return 0
    with alone(root):
        for entry, _ in found.kept:
            verify([entry], jobs=jobs, progress=progress)
            if entry.state == "good":
                break
        else:
            raise CheckpointError(
                f"none of the checkpoints that would stay in {root} is good, so nothing was "
                "deleted; see 'megatron-patch checkpoint verify'"
            )
        kept = keeping.read(root)  # a trainer that has just ended may have written it
        late = [entry for entry in found.doomed if entry.name in kept]
        found.kept.extend((entry, f"kept: {kept[entry.name]}") for entry in late)
        found.doomed[:] = [entry for entry in found.doomed if entry not in late]
        freed = 0
        for entry in found.doomed:
            # Renamed first: a kill in the middle leaves nothing that looks complete.
            away = entry.path.with_name(entry.name + DELETING)
            try:
                os.rename(entry.path, away)
                sync_directory(root)
                shutil.rmtree(away)
            except OSError as error:
                raise PruneError(f"{entry.name} cannot be deleted: {describe(error)}") from None
            freed += entry.size
    return freed


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the locks of the run directory and of the store, where there are any.

    The run directory may be elsewhere (``checkpoint.directory``); earlier versions locked only it.

    Raises:
        BusyError: a trainer holds one.
    """
    with contextlib.ExitStack() as held:
        for folder in (root.parent, root):
            lock = folder / ".lock"
            if not lock.is_file():
                continue
            handle = held.enter_context(lock.open("r+"))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"{folder}: a trainer uses this run right now; prune when it has stopped, or "
                    "let it keep fewer with checkpoint.keep_last"
                ) from None
            except OSError:  # a file system without locks, as the trainer itself accepts
                continue
        yield

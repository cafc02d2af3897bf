"""Looking after the checkpoints of a run without training: list, verify, prune, roll back.

Nothing here needs torch, a GPU or the run's configuration. `delete` and `roll_back` change files,
and only while no trainer uses the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatron_patch.checkpoint import newest, pinned
from megatron_patch.checkpoint.directory import ASIDE, DELETING, IDENTITY, TMP, key_of, parse_name
from megatron_patch.checkpoint.errors import BadCheckpoint, CheckpointError, describe, gone
from megatron_patch.checkpoint.manifest import SEAL, FileDigest, Manifest, check_file, read_small
from megatron_patch.checkpoint.store import CheckpointStore

State = Literal[
    "complete", "good", "damaged", "unreadable", "gone", "unfinished", "being deleted", "aside"
]
STATES: dict[str, State] = {"": "complete", TMP: "unfinished", DELETING: "being deleted"}


class RequestError(ValueError):
    """What was asked for cannot be done; the text says what can."""


class BusyError(RequestError):
    """A trainer uses the run directory right now."""


class ChangeError(CheckpointError):
    """A deletion or a move failed; what was done before it stands."""

    exit_code = 1


@dataclass(slots=True)
class Entry:
    """One directory of the store."""

    path: Path
    name: str
    step: int | None
    attempt: int | None
    state: State
    reason: str = ""
    """Why it is damaged, unreadable or gone."""
    size: int = 0
    """Bytes of its files."""
    created: str = ""
    """UTC time of the commit; of an unfinished one, of its last change."""
    signed: bool = False
    latest: bool = False
    """Whether ``latest`` names it."""
    pinned: str | None = None
    """Why age does not delete it (`checkpoint.pinned`); None where it may."""
    manifest: Manifest | None = None

    def refuse(self, bad: BadCheckpoint) -> None:
        """It cannot be loaded, and why. What the run has just deleted is not damaged."""
        self.state, self.reason = "damaged" if bad.damaged else "unreadable", bad.reason
        if reason := gone(self.path):
            self.state, self.reason = "gone", reason

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        names = [field.name for field in fields(self) if field.name != "manifest"]
        return {n: getattr(self, n) for n in names} | {"path": str(self.path)}


def resolve(path: str | Path) -> tuple[Path, str | None]:
    """(directory of the store, name of the one checkpoint meant or None for all).

    ``path``: a run directory, its ``checkpoints``, or one checkpoint.

    Raises RequestError: it is none of them.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise RequestError(
            f"{path} {what}; name a run directory, its checkpoints/, or one checkpoint in it"
        )
    path = Path(os.path.abspath(path))
    if parse_name(path.name) is not None:
        return path.parent, path.name
    for root in (path / "checkpoints", path):
        names = os.listdir(root) if root.is_dir() else []
        if (root / IDENTITY).is_file() or any(parse_name(n.removesuffix(TMP)) for n in names):
            return root, None
    raise RequestError(
        f"{path} holds no checkpoints: neither it nor its checkpoints/ has {IDENTITY} or "
        "step_*.attempt-* directories (a run with checkpoint.directory keeps them there)"
    )


def survey(root: Path, *, key: bytes | None = None, only: str | None = None) -> list[Entry]:
    """Every directory of the store, newest first, those moved aside last. Hashes nothing.

    A ``key`` checks signatures, which are only reported without one; ``only`` names one checkpoint.
    """
    store = CheckpointStore(root, keep_last=None, hmac_key=key)
    latest = store.directory.read_pointer().name
    pins: dict[str, str] = {}
    with contextlib.suppress(pinned.PinnedFileError):  # `list` tells of it
        pins = pinned.read(root)
    found: list[Entry] = []
    for name in [only] if only else sorted(os.listdir(root)):
        suffix = next((s for s in (TMP, DELETING) if name.endswith(s)), "")
        key_ = parse_name(name.removesuffix(suffix))
        if key_ is not None:
            entry = Entry(root / name, name, *key_, state=STATES[suffix])
            _describe(entry, store)
            entry.latest, entry.pinned = name == latest, pins.get(name)
            found.append(entry)
    found.sort(key=lambda e: (e.step or 0, e.attempt or 0), reverse=True)
    if only is None and (root / ASIDE).is_dir():
        for path in sorted(p for p in (root / ASIDE).iterdir() if p.is_dir()):
            found.append(Entry(path, f"{ASIDE}/{path.name}", None, None, state="aside"))
            _describe(found[-1], store)
    return found


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
        entry.refuse(found)
        return
    entry.manifest, entry.created = found, found.created
    with contextlib.suppress(BadCheckpoint, OSError):
        entry.signed = b"hmac-sha256" in read_small(entry.path, SEAL)


def verify(
    entries: list[Entry],
    *,
    jobs: int = 4,
    sampled: bool = False,
    progress: Callable[[int], object] = lambda count: None,
) -> None:
    """Hash the files of the complete ones; sets their state to good, damaged, unreadable or gone.

    ``jobs`` files are hashed at once (hashing releases the interpreter lock); ``sampled`` reads a
    fixed sample of pages of large ones. ``progress`` is called after each file with its bytes.
    """
    work = [
        (entry, name, digest)
        for entry in entries
        if entry.state == "complete" and entry.manifest is not None
        for name, digest in sorted(entry.manifest.files.items(), key=lambda x: -x[1].size)
    ]

    def check(item: tuple[Entry, str, FileDigest]) -> int:
        entry, name, digest = item
        if not entry.reason:  # one bad file is enough
            try:
                check_file(entry.path, name, digest, sampled=sampled)
            except BadCheckpoint as bad:
                entry.refuse(bad)
        return digest.size

    with ThreadPoolExecutor(max(1, jobs), "verify") as pool:
        for size in pool.map(check, work):
            progress(size)
    for entry, _, _ in work:
        if entry.state == "complete":
            entry.state = "good"


# ---------------------------------------------------------------------------------- prune, go back


@dataclass(frozen=True, slots=True)
class Plan:
    """What a prune keeps, with reasons, and what it would delete."""

    kept: list[tuple[Entry, str]]
    doomed: list[Entry]


def plan(root: Path, entries: list[Entry], *, last: int | None, every: int | None) -> Plan:
    """Apply the rule: the newest ``last``, every step that is a multiple of ``every``; union.

    Always kept: the newest one, what ``latest`` names, pinned ones, damaged and unreadable ones
    (evidence), those another store wrote. What a killed deletion left goes whatever the rule is.
    Unfinished saves and ``aside/`` are no business of it.

    Raises:
        PinnedFileError: what is pinned cannot be read.
        CheckpointError: what ``latest`` was set to is no checkpoint.
        RequestError: going back was interrupted.
    """
    pinned.read(root)  # where it does not tell, any of them may be pinned
    directory = CheckpointStore(root).directory
    newest.refuse_edited(directory)  # which may mean any of them, too
    if text := newest.unfinished(directory):  # what it goes to would be deleted as an old one
        raise RequestError(text)
    identity = directory.identity
    kept: list[tuple[Entry, str]] = []
    doomed: list[Entry] = []
    for place, entry in enumerate(e for e in entries if e.state in ("complete", "good")):
        assert entry.manifest is not None and entry.step is not None
        if entry.latest:
            kept.append((entry, "latest names it"))
        elif place < max(last or 1, 1):
            kept.append((entry, f"among the newest {last or 1}"))
        elif every is not None and entry.step % every == 0:
            kept.append((entry, f"multiple of {every}"))
        elif entry.pinned is not None:
            kept.append((entry, f"pinned: {entry.pinned}"))
        elif entry.manifest.store != identity:
            kept.append((entry, "another store wrote it"))
        else:
            doomed.append(entry)
    kept += [(e, e.reason) for e in entries if e.state in ("damaged", "unreadable")]
    doomed += [e for e in entries if e.state == "being deleted"]
    return Plan(kept, doomed)


def delete(
    root: Path,
    found: Plan,
    *,
    jobs: int = 4,
    progress: Callable[[int], object] = lambda count: None,
) -> int:
    """Carry a plan out; the bytes that came free.

    What is pinned by now stays, and the plan says so afterwards. Before anything is deleted one
    checkpoint that stays is hashed and found good, newest first.

    Raises:
        CheckpointError: none of those that stay is good; nothing was deleted.
        BusyError: a trainer uses the directory.
        PinnedFileError: what is pinned cannot be read; nothing was deleted.
    """
    if not found.doomed:
        return 0
    directory = CheckpointStore(root).directory
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
        pins = pinned.read(root)  # a trainer that has just ended may have written it
        late = [entry for entry in found.doomed if entry.name in pins]
        found.kept.extend((entry, f"pinned: {pins[entry.name]}") for entry in late)
        found.doomed[:] = [entry for entry in found.doomed if entry not in late]
        for entry in found.doomed:
            try:
                directory.delete(entry.name)
            except OSError as error:
                raise ChangeError(f"{entry.name} cannot be deleted: {describe(error)}") from None
    return sum(entry.size for entry in found.doomed)


def roll_back(root: Path, to: str) -> tuple[str, dict[str, Path]]:
    """Make a checkpoint the newest: (its name, where each newer one was moved).

    Args:
        root: directory of the store.
        to: step, or name where a step has several checkpoints (the last attempt is the default).

    Raises:
        RequestError: there is none, or it is damaged; a BusyError: a trainer uses the run.
        ChangeError: one could not be moved.
    """
    store = CheckpointStore(root)
    with alone(root):
        names = store.directory.complete_names()
        name = next((n for n in names if to in (n, str(key_of(n)[0]))), None)
        if name is None:
            steps = ", ".join(str(s) for s in sorted({key_of(n)[0] for n in names})) or "none"
            raise RequestError(f"{root} has no checkpoint of step {to}; there are: {steps}")
        found = store.examine(root / name)
        if isinstance(found, BadCheckpoint):
            raise RequestError(f"{name} cannot be continued: {found.reason}; nothing was moved")
        try:
            return name, newest.go_back(store.directory, name)
        except OSError as error:
            raise ChangeError(
                f"cannot go back to {name}: {describe(error)}; the same command does the rest"
            ) from None


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the locks of the run directory and of the store, where there are any.

    The run directory may be elsewhere (``checkpoint.directory``); earlier versions locked only it.

    Raises BusyError: a trainer holds one.
    """
    with contextlib.ExitStack() as locks:
        for folder in (root.parent, root):
            lock = folder / ".lock"
            if not lock.is_file():
                continue
            handle = locks.enter_context(lock.open("r+"))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"{folder}: a trainer uses this run right now; stop it first, or let it keep "
                    "fewer checkpoints with checkpoint.keep_last"
                ) from None
            except OSError:  # a file system without locks, as the trainer itself accepts
                continue
        yield

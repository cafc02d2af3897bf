"""The checkpoint store: directories, manifests, verification, retention. Knows nothing of Megatron.

    root/
      step_00000100.attempt-1/       complete: shards, manifest.json, manifest.seal
      step_00000200.attempt-1.tmp/   being written
      aside/                         abandoned and damaged directories; never deleted by the store
      latest                         name of the newest complete directory
      store.json                     identity of the store

Saving: ``begin`` makes the ``.tmp`` directory, ranks write and hash their own files, ``commit``
writes the manifest after the last of them, renames the directory into place, then moves ``latest``.
Until the rename nothing counts; after it nothing changes. Every step is forced to disk before the
next. Loading: ``find`` verifies candidates, newest first, before a byte of them is parsed.

Methods that say so are collective: every rank calls them and comes to the same result. The
directory must be on a file system that all ranks see.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_patch.checkpoint.collective import Collective, SingleProcess
from megatron_patch.checkpoint.errors import BadCheckpoint, CheckpointError, SaveError
from megatron_patch.checkpoint.files import (
    check_listing,
    describe,
    read_small,
    share_files,
    sync_directory,
    write_file,
)
from megatron_patch.checkpoint.manifest import (
    MANIFEST,
    SEAL,
    FileDigest,
    Manifest,
    check_file,
    check_seal,
    decode,
    hash_file,
    seal,
)

log = logging.getLogger(__name__)

LATEST = "latest"
ASIDE = "aside"
IDENTITY = "store.json"
TMP = ".tmp"
DELETING = ".deleting"
DIRECTORY = re.compile(r"step_(\d{6,15})\.attempt-(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One save in progress."""

    step: int
    number: int
    path: Path
    """The temporary directory the ranks write into."""

    @property
    def name(self) -> str:
        """Name of the directory once it is complete."""
        return directory_name(self.step, self.number)


@dataclass(frozen=True, slots=True)
class Found:
    """A verified checkpoint."""

    path: Path
    manifest: Manifest


def directory_name(step: int, attempt: int) -> str:
    """``step_00000100.attempt-1``."""
    return f"step_{step:08d}.attempt-{attempt}"


def parse_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a complete directory's name; None for anything else."""
    match = DIRECTORY.fullmatch(name)
    if match is None or name != directory_name(int(match[1]), int(match[2])):
        return None
    return int(match[1]), int(match[2])


def _key(name: str) -> tuple[int, int]:
    key = parse_name(name)
    assert key is not None, name
    return key


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(
        self,
        root: str | Path,
        *,
        keep_last: int | None = 3,
        hmac_key: bytes | None = None,
        verify: Literal["full", "sampled"] = "full",
        collective: Collective | None = None,
    ) -> None:
        """Nothing is read or created yet.

        Args:
            root: directory of the checkpoints; created by the first save.
            keep_last: complete checkpoints kept; None keeps all.
            hmac_key: signs manifests; then unsigned and foreign ones are refused on load.
            verify: what ``find`` hashes: every byte, or a sample of pages of large files.
            collective: the ranks of the job; a single process by default.
        """
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; use at least 1, or None to keep all")
        self.root = Path(root)
        self.keep_last = keep_last
        self.verify = verify
        self.ranks: Collective = collective or SingleProcess()
        self._key = hmac_key

    # ---------------------------------------------------------------- saving

    def begin(self, step: int) -> Attempt:
        """Make the temporary directory of a new attempt at ``step``. Collective.

        Temporary directories of earlier processes are moved aside first.

        Raises:
            SaveError: the directory cannot be made.
        """

        def make() -> int:
            self.root.mkdir(parents=True, exist_ok=True)
            self._identity(create=True)
            for left in self._entries(TMP):
                self._move_aside(left, "abandoned")
            number = 1 + max(self._attempts(step), default=0)
            os.mkdir(self.root / (directory_name(step, number) + TMP), 0o755)
            sync_directory(self.root)
            return number

        number = self._on_first_rank(make, f"cannot start a checkpoint of step {step}")
        name = directory_name(step, number)
        return Attempt(step, number, self.root / (name + TMP))

    def hash_files(self, attempt: Attempt, names: list[str]) -> dict[str, FileDigest]:
        """Hash and fsync files of this rank. Local, may run in a background thread."""
        return {name: hash_file(attempt.path, name, sync=True) for name in names}

    def agree(self, attempt: Attempt, error: BaseException | None) -> None:
        """Abandon the attempt on all ranks when one of them reports an error. Collective.

        Raises:
            SaveError: naming the ranks and their errors.
        """
        errors = self.ranks.all_gather(None if error is None else describe(error))
        if any(errors):
            reason = "; ".join(f"rank {r}: {e}" for r, e in enumerate(errors) if e)
            self.abandon(attempt, "write-failed", reason)

    def abandon(self, attempt: Attempt, kind: str, reason: str) -> None:
        """Move the attempt aside and raise on every rank. Collective, with the same arguments.

        Raises:
            SaveError: always.
        """
        where = None
        if self.ranks.rank == 0:
            try:
                where = self._move_aside(attempt.path, kind)
            except OSError as error:
                log.warning("could not move %s aside: %s", attempt.path, error)
        self.ranks.barrier()
        raise SaveError(
            f"checkpoint of step {attempt.step} (attempt {attempt.number}) was abandoned: {reason}"
            + (f"; what was written is in {where}" if where else "")
        )

    def commit(
        self, attempt: Attempt, mine: Mapping[str, FileDigest], info: Mapping[str, Any]
    ) -> Path:
        """Make the attempt a complete checkpoint. Collective; call after the last writer.

        Args:
            attempt: from ``begin``.
            mine: digests of the files this rank wrote, from ``hash_files``.
            info: JSON-able facts for the manifest; rank 0's are taken.

        Raises:
            SaveError: files are missing or unclaimed, or the directory cannot be completed.
        """
        claimed = self.ranks.all_gather(dict(mine))
        error = None
        if self.ranks.rank == 0:
            try:
                self._complete(attempt, claimed, info)
            except Exception as caught:
                error = caught
        self.agree(attempt, error)
        final = self.root / attempt.name
        self._on_first_rank(lambda: self._after(attempt), "after the commit", fatal=False)
        return final

    def _complete(
        self, attempt: Attempt, claimed: list[dict[str, FileDigest]], info: Mapping[str, Any]
    ) -> None:
        """Rank 0: manifest, seal, rename. After the rename the checkpoint is complete."""
        files = {name: digest for part in claimed for name, digest in part.items()}
        if len(files) != sum(map(len, claimed)):
            raise SaveError("two ranks claim the same file")
        check_listing(attempt.path, files, extra=())
        manifest = Manifest(
            step=attempt.step,
            attempt=attempt.number,
            store=self._identity(create=True),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            world_size=self.ranks.size,
            files=files,
            info=info,
        )
        body = manifest.encode()
        decode(body)  # what cannot be read back must not be committed
        write_file(attempt.path / MANIFEST, body)
        write_file(attempt.path / SEAL, seal(body, self._key))
        sync_directory(attempt.path)
        final = self.root / attempt.name
        if os.path.lexists(final):
            raise SaveError(f"{final} exists already; a complete checkpoint is never overwritten")
        os.rename(attempt.path, final)
        sync_directory(self.root)

    def _after(self, attempt: Attempt) -> None:
        """Rank 0: pointer and retention. The checkpoint counts already: failures are logged."""
        try:
            self._write_latest(attempt.name)
        except OSError as error:
            log.error("checkpoint %s is complete, but %s: %s", attempt.name, LATEST, error)
            return
        try:
            self._retire(attempt)
        except OSError as error:
            log.warning("could not delete an old checkpoint: %s", error)

    def _write_latest(self, name: str) -> None:
        draft = self.root / (LATEST + TMP + "-file")
        write_file(draft, (name + "\n").encode())
        os.replace(draft, self.root / LATEST)
        sync_directory(self.root)

    def _retire(self, newest: Attempt) -> None:
        """Delete complete checkpoints of this store that are older than the last ``keep_last``."""
        for doomed in self._entries(DELETING):  # left by a kill in the middle of a deletion
            shutil.rmtree(doomed)
        if self.keep_last is None:
            return
        identity = self._identity(create=False)
        older = [d for d in self._complete_names() if _key(d) < (newest.step, newest.number)]
        for name in older[max(self.keep_last - 1, 0) :]:
            try:
                manifest = self._read_manifest(self.root / name)
            except (BadCheckpoint, OSError) as error:
                log.warning("old checkpoint %s is kept: %s", name, error)
                continue
            if manifest.store != identity:
                log.warning("old checkpoint %s is kept: another store wrote it", name)
                continue
            doomed = self.root / (name + DELETING)
            # Renamed first: a kill in the middle leaves nothing that looks complete.
            os.rename(self.root / name, doomed)
            shutil.rmtree(doomed)
            log.info("deleted old checkpoint %s", name)

    # --------------------------------------------------------------- loading

    def find(
        self, *, move_aside: bool = True, accept: Callable[[Found], None] | None = None
    ) -> Found | None:
        """The newest good checkpoint, verified; None when there is none at all. Collective.

        The one ``latest`` names is tried first, then the others, newest first. Why one was refused
        is logged; damaged ones are moved aside unless ``move_aside`` is False. ``accept`` is called
        on all ranks with a verified checkpoint and may still refuse it with BadCheckpoint.

        Raises:
            CheckpointError: there are checkpoints and none is good.
        """
        names = self._on_first_rank(
            self._candidates, f"cannot list {self.root}", error=CheckpointError
        )
        refused = []
        for name in names:
            path = self.root / name
            try:
                found = self.check(path)
                if accept is not None:
                    accept(found)
            except BadCheckpoint as bad:
                self._say(logging.ERROR, "checkpoint %s refused: %s", name, bad.why)
                refused.append(f"{name}: {bad.why}")
                if move_aside and bad.damaged:
                    self._on_first_rank(
                        partial(self._move_aside, path, bad.kind),
                        f"could not move {name} aside",
                        fatal=False,
                    )
                continue
            if refused:
                self._say(logging.WARNING, "continuing from the older checkpoint %s", name)
            return found
        if refused:
            listed = "".join(f"\n  {line}" for line in refused)
            raise CheckpointError(f"no good checkpoint in {self.root}:{listed}")
        return None

    def check(self, path: str | Path) -> Found:
        """Verify one checkpoint directory. Collective: ranks hash different files.

        Raises:
            BadCheckpoint: on every rank, with the same reason.
        """
        path = Path(path)
        result = self.ranks.broadcast(self.examine(path) if self.ranks.rank == 0 else None)
        if isinstance(result, BadCheckpoint):
            raise result
        mine = share_files(result.files, self.ranks.rank, self.ranks.size)
        problem: BadCheckpoint | None = None
        for name in mine:
            try:
                check_file(path, name, result.files[name], sampled=self.verify == "sampled")
            except BadCheckpoint as bad:
                problem = bad
                break
        for refusal in self.ranks.all_gather(problem):
            if refusal is not None:
                raise refusal
        return Found(path, result)

    def newest_at(self, step: int) -> int | None:
        """Step of the newest complete checkpoint of at most ``step``; None: none. Collective."""
        return self._on_first_rank(
            lambda: self._newest_at(step), f"cannot list {self.root}", error=CheckpointError
        )

    def _newest_at(self, step: int) -> int | None:
        steps = (_key(name)[0] for name in self._complete_names())
        return max((s for s in steps if s <= step), default=None)

    def abandon_after(self, step: int) -> None:
        """Move the complete checkpoints of later steps aside; ``latest`` names what is left.

        Collective. Nothing is moved when nothing would be left.

        Raises:
            CheckpointError: there is no checkpoint of at most ``step``, or it cannot be done.
        """

        def work() -> None:
            if self._newest_at(step) is None:
                raise CheckpointError(f"there is no checkpoint of step {step} or before")
            names = self._complete_names()
            kept = next(name for name in names if _key(name)[0] <= step)
            self._write_latest(kept)  # first: a kill in between leaves a pointer that holds
            for name in names:
                if _key(name)[0] > step:
                    self._move_aside(self.root / name, "abandoned")

        self._on_first_rank(work, f"cannot go back to step {step}", error=CheckpointError)

    def examine(self, path: Path) -> Manifest | BadCheckpoint:
        """Seal, manifest, names and sizes of a directory, or why it is refused. Hashes nothing."""
        try:
            manifest = self._read_manifest(path)
            check_listing(path, manifest.files, extra=(MANIFEST, SEAL))
        except BadCheckpoint as bad:
            return bad
        except OSError as error:
            return BadCheckpoint("unreadable", f"cannot read {path.name}: {error}", damaged=False)
        return manifest

    def _read_manifest(self, path: Path) -> Manifest:
        """Seal first, then the JSON, then that the directory is the one the manifest speaks of."""
        if path.is_symlink():
            raise BadCheckpoint("link", f"{path.name} is a symbolic link")
        body = read_small(path, MANIFEST)
        check_seal(body, read_small(path, SEAL), self._key)
        manifest = decode(body)
        if (manifest.step, manifest.attempt) != parse_name(path.name):
            raise BadCheckpoint(
                "foreign",
                f"{path.name} holds step {manifest.step} attempt {manifest.attempt}",
            )
        return manifest

    def _candidates(self) -> list[str]:
        """Rank 0: names of complete directories, the one ``latest`` names first, newest first."""
        names = self._complete_names()
        if not names:
            return []
        try:
            latest = read_small(self.root, LATEST, limit=200).decode("ascii", "replace").strip()
        except BadCheckpoint as bad:
            latest = ""
            log.warning(
                "%s: %s; taking the newest complete checkpoint", self.root / LATEST, bad.why
            )
        else:
            if latest not in names:
                log.warning(
                    "%s names %r, which is not a complete checkpoint here; taking the newest",
                    self.root / LATEST,
                    latest[:80],
                )
        if latest in names:
            if latest != names[0]:
                log.warning("%s names %s although %s is newer", LATEST, latest, names[0])
            names.remove(latest)
            names.insert(0, latest)
        return names

    # --------------------------------------------------------------- helpers

    def _complete_names(self) -> list[str]:
        """Directories with the name of a complete checkpoint, newest (step, attempt) first."""
        try:
            listed = os.listdir(self.root)
        except FileNotFoundError:
            return []
        named = [(parse_name(name), name) for name in listed]
        return [name for key, name in sorted((k, n) for k, n in named if k is not None)][::-1]

    def _entries(self, suffix: str) -> list[Path]:
        """Directories of checkpoints that carry ``suffix``."""
        return [
            self.root / name
            for name in sorted(os.listdir(self.root))
            if name.endswith(suffix) and parse_name(name[: -len(suffix)])
        ]

    def _attempts(self, step: int) -> list[int]:
        """Attempt numbers of ``step`` that were ever used, moved aside ones included."""
        numbers = []
        for folder in (self.root, self.root / ASIDE):
            for name in os.listdir(folder) if folder.is_dir() else ():
                match = DIRECTORY.match(name)
                if match and int(match[1]) == step:
                    numbers.append(int(match[2]))
        return numbers

    def _move_aside(self, path: Path, kind: str) -> Path:
        """Rename into ``aside/<name>.<kind>.<time>``; nothing is deleted."""
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
        log.warning("moved %s to %s", path.name, target)
        return target

    def identity(self) -> str:
        """The store's own id; nothing is written: without one, every call gives another."""
        return self._identity(create=False)

    def _identity(self, *, create: bool) -> str:
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
            write_file(draft, (json.dumps({"store": identity}) + "\n").encode())
            os.replace(draft, path)
            sync_directory(self.root)
        return identity

    def _on_first_rank(
        self,
        work: Callable[[], Any],
        failed: str,
        *,
        fatal: bool = True,
        error: type[CheckpointError] = SaveError,
    ) -> Any:
        """Do ``work`` on rank 0 and give its result, or its error, to every rank."""
        result: tuple[Any, str | None] = (None, None)
        if self.ranks.rank == 0:
            try:
                result = (work(), None)
            except Exception as caught:
                result = (None, describe(caught))
        value, problem = self.ranks.broadcast(result)
        if problem is not None:
            if fatal:
                raise error(f"{failed}: {problem}")
            self._say(logging.WARNING, "%s: %s", failed, problem)
        return value

    def _say(self, level: int, text: str, *args: Any) -> None:
        if self.ranks.rank == 0:
            log.log(level, text, *args)

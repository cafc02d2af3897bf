"""The checkpoint store: saving, verification, retention. Knows nothing of Megatron.

    root/
      step_00000100.attempt-1/       complete: shards, manifest.json, manifest.seal
      step_00000200.attempt-1.tmp/   being written
      aside/                         damaged checkpoints, those a run went back from, logs of saves
                                     that were abandoned
      latest                         name of the newest complete directory, for people and scripts
      pinned                         which ones age does not delete (`checkpoint.pinned`)
      store.json                     identity and format of the store

The newest complete checkpoint is the one to continue (`checkpoint.newest`).

Saving: ``begin`` makes the ``.tmp`` directory, ranks write and hash their own files, ``commit``
writes the manifest after the last of them, renames the directory into place, then moves ``latest``.
Until the rename nothing counts; after it nothing changes. Every step is forced to disk before the
next. Loading: ``find`` verifies candidates, newest first, before a byte of them is parsed.

Methods that say so are collective: every rank calls them and comes to the same result. The
directory must be on a file system that all ranks see.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_patch.checkpoint import newest, pinned
from megatron_patch.checkpoint.collective import Collective
from megatron_patch.checkpoint.directory import (
    LATEST,
    TMP,
    CheckpointDirectory,
    directory_name,
    key_of,
    parse_name,
    write_file,
)
from megatron_patch.checkpoint.errors import (
    BadCheckpoint,
    CheckpointError,
    SaveError,
    describe,
    first_problem,
    is_passing,
    no_checkpoint,
    unreadable,
)
from megatron_patch.checkpoint.manifest import (
    MANIFEST,
    SEAL,
    FileDigest,
    Manifest,
    check_file,
    check_listing,
    check_seal,
    decode,
    hash_file,
    read_small,
    seal,
    share_files,
)
from megatron_patch.runtime.files import sync_directory

log = logging.getLogger(__name__)


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


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(
        self,
        root: str | Path,
        *,
        keep_last: int | None = 3,
        keep_behind: int = 0,
        hmac_key: bytes | None = None,
        verify: Literal["full", "sampled"] = "full",
        collective: Collective | None = None,
    ) -> None:
        """Nothing is read or created yet.

        Args:
            root: directory of the checkpoints; created by the first save.
            keep_last: complete checkpoints kept; None keeps all.
            keep_behind: one that is this many steps older than the newest is kept as well.
            hmac_key: signs manifests; then unsigned and foreign ones are refused on load.
            verify: what ``find`` hashes: every byte, or a sample of pages of large files.
            collective: the ranks of the job; a single process by default.
        """
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; use at least 1, or None to keep all")
        self.directory = CheckpointDirectory(Path(root))
        self.keep_last, self.keep_behind = keep_last, keep_behind
        self.verify = verify
        self.ranks = collective or Collective()
        self._key = hmac_key
        self.failed_saves = 0
        """Attempts that this process abandoned because of an error."""

    @property
    def root(self) -> Path:
        """Directory of the checkpoints."""
        return self.directory.root

    # ---------------------------------------------------------------- saving

    def begin(self, step: int) -> Attempt:
        """Make the temporary directory of a new attempt at ``step``. Collective.

        What earlier processes left unfinished is discarded first: its log goes to ``aside/``. So
        do checkpoints of later steps, which this training did not continue.

        Raises SaveError: the directory cannot be made; a CheckpointError: the store belongs to
        another training, all of whose checkpoints are of later steps.
        """

        def make() -> int:
            self.root.mkdir(parents=True, exist_ok=True)
            directory = self.directory
            newest.take_over(directory)
            for left in directory.entries(TMP):
                directory.discard(left, "abandoned", "its process ended in the middle of the save")
            names = directory.complete_names()
            if names and key_of(names[0])[0] > step:
                directory.go_back(self._newest_of(names, step))
            number = 1 + max(directory.attempts(step), default=0)
            os.mkdir(self.root / (directory_name(step, number) + TMP), 0o755)
            sync_directory(self.root)
            return number

        number = self._on_first_rank(make, f"cannot start a checkpoint of step {step}")
        name = directory_name(step, number)
        return Attempt(step, number, self.root / (name + TMP))

    def _newest_of(self, names: list[str], step: int) -> str:
        for name in names:
            if key_of(name)[0] <= step:
                return name
        found = names[0] if names else "nothing"
        raise CheckpointError(
            f"{self.root} holds {found} and no checkpoint of step {step} or before"
        )

    def hash_files(self, attempt: Attempt, names: list[str]) -> dict[str, FileDigest]:
        """Hash and fsync files of this rank. Local, may run in a background thread."""
        return {name: hash_file(attempt.path, name, sync=True) for name in names}

    def agree(self, attempt: Attempt, error: BaseException | None) -> None:
        """Abandon the attempt on all ranks when one of them reports an error. Collective.

        Raises SaveError: naming the ranks and their errors.
        """
        errors = self.ranks.all_gather(None if error is None else describe(error))
        if any(errors):
            reason = "; ".join(f"rank {r}: {e}" for r, e in enumerate(errors) if e)
            self.failed_saves += 1
            self.abandon(attempt, "write-failed", reason)

    def abandon(self, attempt: Attempt, kind: str, reason: str) -> None:
        """Discard the attempt and raise on every rank. Collective, with the same arguments.

        Raises SaveError: always.
        """
        where = None
        if self.ranks.rank == 0:
            try:
                where = self.directory.discard(attempt.path, kind, reason)
            except OSError as error:
                log.warning("could not move %s aside: %s", attempt.path, error)
        self.ranks.barrier()
        raise SaveError(
            f"checkpoint of step {attempt.step} (attempt {attempt.number}) was abandoned: {reason}"
            + (f"; its log is in {where}" if where else "")
        )

    def commit(
        self, attempt: Attempt, mine: Mapping[str, FileDigest], info: Mapping[str, Any]
    ) -> Path:
        """Make the attempt a complete checkpoint. Collective; call after the last writer.

        Args:
            mine: digests of the files this rank wrote, from ``hash_files``.
            info: JSON-able facts for the manifest; rank 0's are taken.

        Raises SaveError: files are missing or unclaimed, or the directory cannot be completed.
        """
        claimed = self.ranks.all_gather(dict(mine))
        error = None
        if self.ranks.rank == 0:
            try:
                self._complete(attempt, claimed, info)
            except Exception as caught:
                error = caught
        self.agree(attempt, error)
        self._on_first_rank(lambda: self._after(attempt), "after the commit", fatal=False)
        return self.root / attempt.name

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
            store=self.directory.identity,
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
        self.directory.announce(attempt.name)
        os.rename(attempt.path, final)
        sync_directory(self.root)

    def _after(self, attempt: Attempt) -> None:
        """Rank 0: pointer and retention. The checkpoint counts already: failures are logged."""
        try:
            self.directory.publish()
        except OSError as error:
            log.error("checkpoint %s is complete, but %s: %s", attempt.name, LATEST, error)
            return
        try:
            self._retire()
        except OSError as error:
            log.warning("no old checkpoint is deleted: %s", error)

    def _retire(self) -> None:
        """Delete this store's own checkpoints that are neither among the last nor pinned.

        The newest stays too that is ``keep_behind`` steps older than the one just saved, or the
        oldest while none is: saves off the interval, at a graceful stop, push the last together.
        """
        for doomed in self.directory.deletions():
            self._delete(doomed)
        if self.keep_last is None:
            return
        names = self.directory.complete_names()
        floor = key_of(names[0])[0] - self.keep_behind
        behind = next((name for name in names if key_of(name)[0] <= floor), names[-1])
        try:
            stay = {behind, *pinned.read(self.root)}
        except pinned.PinnedFileError as error:
            log.warning("no old checkpoint is deleted: %s", error)
            return
        identity = self.directory.identity
        for name in (name for name in names[self.keep_last :] if name not in stay):
            reason: object = "another store wrote it"
            try:
                own = self._read_manifest(self.root / name).store == identity
            except (BadCheckpoint, OSError) as error:
                own, reason = False, error
            if not own:
                log.warning("old checkpoint %s is not deleted: %s", name, reason)
            elif self._delete(name):
                log.info("deleted old checkpoint %s", name)

    def _delete(self, name: str) -> bool:
        """Whether it is gone. One that cannot be (write-protected) must not make the others stay:
        the disk would fill up."""
        try:
            self.directory.delete(name)
        except OSError as error:
            text = "old checkpoint %s cannot be deleted: %s; it is tried again after every save"
            log.warning(text, name, error)
            return False
        return True

    # --------------------------------------------------------------- loading

    def find(
        self, *, own: bool = True, accept: Callable[[Found], None] | None = None
    ) -> Found | None:
        """The newest good checkpoint, verified; None when there is none at all. Collective.

        Why newer ones were refused is logged, and they are moved aside, but not in the store of
        another run (``own``: False). Where none is good, or a newer one only could not be read this
        time, all stay.

        ``accept``: called on all ranks with a verified checkpoint; may refuse it by BadCheckpoint.

        Raises CheckpointError: there are checkpoints and none of these is good, or ``latest`` was
        edited; an UnavailableError where one newer than the good ones, or all of them, only could
        not be read this time.
        """

        def look() -> list[str]:
            if own and self.directory.complete_names():
                newest.take_over(self.directory)
                missing = pinned.missing_warning(self.root, self.directory.complete_names())
                if missing:
                    log.warning("%s", missing)
            return newest.candidates(self.directory, own=own)

        names: list[str] = self._on_first_rank(
            look, f"cannot list {self.root}", error=CheckpointError
        )
        refused: dict[str, BadCheckpoint] = {}
        for name in names:
            try:
                found = self.check(self.root / name)
                self._refuse_older(name, refused, own=own)
                if accept is not None:
                    accept(found)
            except BadCheckpoint as bad:
                self._log(logging.ERROR, "checkpoint %s refused: %s", name, bad.reason)
                refused[name] = bad
                continue
            if refused:
                self._log(logging.WARNING, "continuing from the older checkpoint %s", name)
            if refused and own:
                kinds = {before: bad.kind for before, bad in refused.items()}
                # Damaged or not, it is not continued.
                self._on_first_rank(
                    partial(self.directory.go_back, name, kinds=kinds),
                    "could not move what was refused aside",
                    fatal=False,
                )
            return found
        if refused:
            listed = "".join(f"\n  {name}: {bad.reason}" for name, bad in refused.items())
            raise no_checkpoint(
                f"no good checkpoint in {self.root}:{listed}",
                passing=all(bad.passing for bad in refused.values()),
            )
        return None

    def _refuse_older(self, name: str, refused: Mapping[str, BadCheckpoint], *, own: bool) -> None:
        """Do not give steps up for a newer checkpoint that only could not be read this time.

        Raises UnavailableError: the next attempt may read it; nothing was moved.
        """
        for newer, bad in refused.items():
            if bad.passing:
                here = f"checkpoint.load_from: {self.root / name}"
                if own:
                    here = "megatron-patch checkpoint rollback"
                    here += f" {shlex.quote(str(self.root))} --to {name}"
                raise no_checkpoint(
                    f"{newer} could not be read this time: {bad.reason}; nothing was moved, and "
                    f"the next attempt may read it; to give it up for {name}: {here}",
                    passing=True,
                )

    def check(self, path: str | Path) -> Found:
        """Verify one checkpoint directory. Collective: ranks hash different files.

        Raises BadCheckpoint: on every rank, with the same reason.
        """
        path = Path(path)
        result = self.ranks.broadcast(self.examine(path) if self.ranks.rank == 0 else None)
        if isinstance(result, BadCheckpoint):
            raise result
        problem: BadCheckpoint | None = None
        try:
            for name in share_files(result.files, self.ranks.rank, self.ranks.size):
                check_file(path, name, result.files[name], sampled=self.verify == "sampled")
        except BadCheckpoint as bad:
            problem = bad
        refusal = first_problem(self.ranks.all_gather(problem))
        if refusal is not None:
            raise refusal
        return Found(path, result)

    def newest_at(self, step: int) -> int | None:
        """Step of the run's newest good checkpoint of at most ``step``, or None. Collective.

        Why one was refused is logged.

        Raises CheckpointError: the directory cannot be listed.
        """
        names = self._on_first_rank(
            self.directory.complete_names, f"cannot list {self.root}", error=CheckpointError
        )
        for name in (name for name in names if key_of(name)[0] <= step):
            try:
                self.check(self.root / name)
            except BadCheckpoint as bad:
                self._log(logging.ERROR, "checkpoint %s refused: %s", name, bad.reason)
            else:
                return key_of(name)[0]
        return None

    def abandon_after(self, step: int) -> None:
        """Move the complete checkpoints of later steps aside; ``latest`` names what is left.

        Collective. Nothing is moved when nothing would be left.

        Raises CheckpointError: there is no checkpoint of at most ``step``, or it cannot be done.
        """

        def work() -> None:
            self.directory.go_back(self._newest_of(self.directory.complete_names(), step))

        self._on_first_rank(work, f"cannot go back to step {step}", error=CheckpointError)

    def examine(self, path: Path) -> Manifest | BadCheckpoint:
        """Seal, manifest, names and sizes of a directory, or why it is refused. Hashes nothing."""
        try:
            manifest = self._read_manifest(path)
            check_listing(path, manifest.files, extra=(MANIFEST, SEAL))
        except BadCheckpoint as bad:
            return bad
        except OSError as error:
            return unreadable(path.name, error)
        return manifest

    def is_whole(self, name: str) -> bool:
        """Whether a complete checkpoint passes `examine`: nothing is hashed."""
        return isinstance(self.examine(self.root / name), Manifest)

    def _read_manifest(self, path: Path) -> Manifest:
        """Seal first, then the JSON, then that the directory is the one the manifest speaks of."""
        if path.is_symlink():
            raise BadCheckpoint("link", f"{path.name} is a symbolic link")
        body = read_small(path, MANIFEST)
        check_seal(body, read_small(path, SEAL), self._key)
        manifest = decode(body)
        if (manifest.step, manifest.attempt) != parse_name(path.name):
            raise BadCheckpoint(
                "foreign", f"{path.name} holds step {manifest.step} attempt {manifest.attempt}"
            )
        return manifest

    # --------------------------------------------------------------- helpers

    def _on_first_rank(
        self,
        work: Callable[[], Any],
        failed: str,
        *,
        fatal: bool = True,
        error: type[CheckpointError] = SaveError,
    ) -> Any:
        """Do ``work`` on rank 0 and give its result, or its error, to every rank."""
        value: Any = None
        problem: CheckpointError | None = None
        if self.ranks.rank == 0:
            try:
                value = work()
            except CheckpointError as caught:
                problem = caught
            except Exception as caught:
                text = f"{failed}: {describe(caught)}"
                problem = error(text)
                if error is CheckpointError:
                    problem = no_checkpoint(text, passing=is_passing(caught))
        value, problem = self.ranks.broadcast((value, problem))
        if problem is not None:
            if fatal:
                raise problem
            self._log(logging.WARNING, "%s", problem)
        return value

    def _log(self, level: int, text: str, *args: Any) -> None:
        if self.ranks.rank == 0:
            log.log(level, text, *args)

"""The checkpoint store: directories, manifests, verification, retention. Knows nothing of Megatron.

    root/
      step_00000100.attempt-1/       complete: shards, manifest.json, manifest.seal
      step_00000200.attempt-1.tmp/   being written
      aside/                         damaged checkpoints, and logs of saves that were abandoned
      latest                         name of the newest complete directory
      lineage                        a line a save: its name, and that of its parent
      kept.json                      which ones age does not delete (`checkpoint.keeping`)
      store.json                     identity of the store

Saving: ``begin`` makes the ``.tmp`` directory, ranks write and hash their own files, ``commit``
writes the manifest after the last of them, renames the directory into place, then moves ``latest``.
Until the rename nothing counts; after it nothing changes. Every step is forced to disk before the
next. Loading: ``find`` verifies candidates, newest first, before a byte of them is parsed; what a
person left behind by going back (`checkpoint.lineage`) is none of them.

Methods that say so are collective: every rank calls them and comes to the same result. The
directory must be on a file system that all ranks see.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_patch.checkpoint import keeping, lineage
from megatron_patch.checkpoint.collective import Collective, SingleProcess
from megatron_patch.checkpoint.errors import (
    BadCheckpoint,
    CheckpointError,
    SaveError,
    first_problem,
    is_passing,
    no_checkpoint,
    unreadable,
)
from megatron_patch.checkpoint.files import (
    check_listing,
    describe,
    read_small,
    share_files,
    write_file,
)
from megatron_patch.checkpoint.lineage import Branch
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
from megatron_patch.checkpoint.shelf import LATEST, TMP, Shelf, directory_name, key_of, parse_name
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
        self.shelf = Shelf(Path(root))
        self.keep_last, self.keep_behind = keep_last, keep_behind
        self.verify = verify
        self.ranks: Collective = collective or SingleProcess()
        self._key = hmac_key
        # Found or saved last, which the next save continues; "" before either was tried.
        self._parent: str | None = ""

    @property
    def root(self) -> Path:
        """Directory of the checkpoints."""
        return self.shelf.root

    # ---------------------------------------------------------------- saving

    def begin(self, step: int) -> Attempt:
        """Make the temporary directory of a new attempt at ``step``. Collective.

        What earlier processes left unfinished is discarded first: its log goes to ``aside/``.

        Raises:
            SaveError: the directory cannot be made.
        """

        def make() -> int:
            self.root.mkdir(parents=True, exist_ok=True)
            self.shelf.identity(create=True)
            for left in self.shelf.entries(TMP):
                self.shelf.discard(left, "abandoned", "its process ended in the middle of the save")
            number = 1 + max(self.shelf.attempts(step), default=0)
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
        """Discard the attempt and raise on every rank. Collective, with the same arguments.

        Raises:
            SaveError: always.
        """
        where = None
        if self.ranks.rank == 0:
            try:
                where = self.shelf.discard(attempt.path, kind, reason)
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
        self._parent = attempt.name
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
            store=self.shelf.identity(create=True),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            world_size=self.ranks.size,
            files=files,
            info=info if self._parent == "" else {**info, "parent": self._parent},
        )
        body = manifest.encode()
        decode(body)  # what cannot be read back must not be committed
        write_file(attempt.path / MANIFEST, body)
        write_file(attempt.path / SEAL, seal(body, self._key))
        sync_directory(attempt.path)
        final = self.root / attempt.name
        if os.path.lexists(final):
            raise SaveError(f"{final} exists already; a complete checkpoint is never overwritten")
        unknown = lineage.UNKNOWN if self._parent == "" else lineage.NONE
        lineage.record(self.root, attempt.name, self._parent or unknown)
        os.rename(attempt.path, final)
        sync_directory(self.root)

    def _after(self, attempt: Attempt) -> None:
        """Rank 0: pointer and retention. The checkpoint counts already: failures are logged."""
        try:
            self.shelf.write_latest(attempt.name)
        except OSError as error:
            log.error("checkpoint %s is complete, but %s: %s", attempt.name, LATEST, error)
            return
        try:
            self._retire(attempt)
        except OSError as error:
            log.warning("could not delete an old checkpoint: %s", error)

    def _retire(self, newest: Attempt) -> None:
        """Delete the complete checkpoints of this store that `lineage.retired` names."""
        keeping.finish_deletions(self.shelf)
        if self.keep_last is None:
            return
        names = self.shelf.complete_names()
        line = self._branch(names, newest.name).live
        old = lineage.retired(names, line, keep_last=self.keep_last, behind=self.keep_behind)
        keeping.delete(self.shelf, old, self._read_manifest)

    # --------------------------------------------------------------- loading

    def find(
        self, *, move_aside: bool = True, accept: Callable[[Found], None] | None = None
    ) -> Found | None:
        """The newest good checkpoint, verified; None when there is none at all. Collective.

        The one ``latest`` names is tried first, then its ancestors. Why one was refused is logged;
        damaged ones are moved aside unless ``move_aside`` is False, and only when another one takes
        their place: where none is good all stay, and the next attempt ends as this one does.
        ``accept`` is called on all ranks with a verified checkpoint and may still refuse it with
        BadCheckpoint.

        Raises:
            CheckpointError: there are checkpoints and none of these is good; an UnavailableError
                where all of them only could not be read this time.
        """
        found_here: Branch = self._on_first_rank(
            self._candidates, f"cannot list {self.root}", error=CheckpointError
        )
        refused: list[tuple[str, BadCheckpoint]] = []
        for name in found_here.live + found_here.newer:
            path = self.root / name
            try:
                found = self.check(path)
                if accept is not None:
                    accept(found)
            except BadCheckpoint as bad:
                self._say(logging.ERROR, "checkpoint %s refused: %s", name, bad.why)
                refused.append((name, bad))
                continue
            if refused:
                older = key_of(name) < key_of(refused[0][0])
                text = "continuing from the older checkpoint %s"
                other = f"continuing from %s, which is NEWER than {refused[0][0]}, and may be what "
                other += "somebody went back from"
                self._say(logging.WARNING, text if older else other, name)
            self._parent = name
            for before, why in refused:
                if move_aside and why.damaged:
                    self._on_first_rank(
                        partial(self.shelf.move_aside, self.root / before, why.kind),
                        f"could not move {before} aside",
                        fatal=False,
                    )
            return found
        if refused or found_here.other:
            raise no_checkpoint(
                self._none_good(refused, found_here.other),
                passing=bool(refused) and all(why.passing for _, why in refused),
            )
        self._parent = None
        return None

    def _none_good(self, refused: list[tuple[str, BadCheckpoint]], other: list[str]) -> str:
        listed = "".join(f"\n  {name}: {why.why}" for name, why in refused)
        text = f"no good checkpoint in {self.root}:{listed}"
        if not other:
            return text
        shown = ", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else "")
        return (
            f"{text}\n  left behind when somebody went back, so not taken unasked: {shown}; to "
            f"continue from one of them write its name into {self.root / LATEST}"
        )

    def _candidates(self) -> Branch:
        """Rank 0: what ``latest`` names, its ancestors, and the rest."""
        names = self.shelf.complete_names()
        if not names:
            return Branch()
        known = lineage.recorded(self.root)
        return self._branch(names, lineage.start(self.root, names, known))

    def _branch(self, names: list[str], start: str, *, guess: bool = True) -> Branch:
        """Rank 0: the ancestors of a checkpoint, and the rest; ``guess``: see `lineage.branch`."""
        known = lineage.recorded(self.root)

        def parent_of(name: str) -> str | None:
            if name in known.parents:
                return known.parents[name]
            try:
                parent = self._read_manifest(self.root / name).info["parent"]
            except (BadCheckpoint, OSError):
                raise KeyError(name) from None
            return parent if parse_name(str(parent)) is not None else None

        return lineage.branch(names, start, known, parent_of, guess=guess)

    def _ancestors(self) -> list[str]:
        """Rank 0: what this process has saved or resumed from last, and before that; newest first.

        Before either: what it would resume from.
        """
        if not self._parent:
            return self._candidates().live
        return self._branch(self.shelf.complete_names(), self._parent).live

    def trained(self) -> list[str]:
        """Rank 0: what this process has saved or resumed from last, and its recorded ancestors.

        Newest first, complete ones alone; none before either.
        """
        if not self._parent:
            return []
        return self._branch(self.shelf.complete_names(), self._parent, guess=False).live

    def _at_most(self, step: int) -> list[str]:
        return [name for name in self._ancestors() if key_of(name)[0] <= step]

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
        refusal = first_problem(self.ranks.all_gather(problem))
        if refusal is not None:
            raise refusal
        return Found(path, result)

    def newest_at(self, step: int) -> int | None:
        """Step of the run's newest good checkpoint of at most ``step``, or None. Collective.

        Why one was refused is logged. What was left behind by going back is not this run's.

        Raises:
            CheckpointError: the directory cannot be listed.
        """
        for name in self._on_first_rank(
            lambda: self._at_most(step), f"cannot list {self.root}", error=CheckpointError
        ):
            try:
                self.check(self.root / name)
            except BadCheckpoint as bad:
                self._say(logging.ERROR, "checkpoint %s refused: %s", name, bad.why)
            else:
                return key_of(name)[0]
        return None

    def abandon_after(self, step: int) -> None:
        """Move the complete checkpoints of later steps aside; ``latest`` names what is left.

        Collective. Nothing is moved when nothing would be left.

        Raises:
            CheckpointError: there is no checkpoint of at most ``step``, or it cannot be done.
        """

        def work() -> None:
            kept = self._at_most(step)
            if not kept:
                raise CheckpointError(f"there is no checkpoint of step {step} or before")
            self.shelf.write_latest(kept[0])  # first: a kill in between leaves a pointer that holds
            for name in self.shelf.complete_names():
                if key_of(name)[0] > step:
                    self.shelf.move_aside(self.root / name, "abandoned")

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
                "foreign",
                f"{path.name} holds step {manifest.step} attempt {manifest.attempt}",
            )
        return manifest

    # --------------------------------------------------------------- helpers

    def identity(self) -> str:
        """The store's own id; nothing is written: without one, every call gives another."""
        return self.shelf.identity(create=False)

    def _on_first_rank(
        self,
        work: Callable[[], Any],
        failed: str,
        *,
        fatal: bool = True,
        error: type[CheckpointError] = SaveError,
    ) -> Any:
        """Do ``work`` on rank 0 and give its result, or its error, to every rank."""
        result: tuple[Any, str | None, bool] = (None, None, False)
        if self.ranks.rank == 0:
            try:
                result = (work(), None, False)
            except Exception as caught:
                result = (None, describe(caught), is_passing(caught))
        value, problem, passing = self.ranks.broadcast(result)
        if problem is not None:
            if fatal and error is CheckpointError:
                raise no_checkpoint(f"{failed}: {problem}", passing=passing)
            if fatal:
                raise error(f"{failed}: {problem}")
            self._say(logging.WARNING, "%s: %s", failed, problem)
        return value

    def _say(self, level: int, text: str, *args: Any) -> None:
        if self.ranks.rank == 0:
            log.log(level, text, *args)

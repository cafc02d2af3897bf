"""`Checkpointer`: what the training loop saves and resumes.

    checkpointer = Checkpointer(run, layout, chunks, optimizer, schedule)
    progress = checkpointer.load()              # TrainState, or None for a fresh start
    for step in ...:
        checkpointer.finalize(blocking=False)   # at every step boundary: commits a background save
        if due: checkpointer.save(progress)
    checkpointer.finalize(blocking=True)        # before the process ends

Every method is collective. The store (`checkpoint.store`) decides what counts as complete and good;
content and layout of the state are in `checkpoint.content`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_patch.checkpoint import (
    content,
    last_checkpoint,
    newest,
    optimizer_state,
    random_state,
    writer,
)
from megatron_patch.checkpoint.collective import make_collective
from megatron_patch.checkpoint.content import Parts
from megatron_patch.checkpoint.errors import (
    BadCheckpoint,
    CheckpointError,
    MismatchError,
    SaveError,
    describe,
    first_problem,
    gone,
    is_passing,
    no_checkpoint,
)
from megatron_patch.checkpoint.manifest import MANIFEST, FileDigest, read_key
from megatron_patch.checkpoint.safe_metadata import read_metadata
from megatron_patch.checkpoint.store import Attempt, CheckpointStore, Found
from megatron_patch.checkpoint.train_state import TrainState
from megatron_patch.parallel.first_rank import on_first_rank
from megatron_patch.parallel.setup import Layout
from megatron_patch.runtime import environment
from megatron_patch.schema.checkpoint import CARRIED
from megatron_patch.schema.run import RunConfig

log = logging.getLogger(__name__)

EVERYTHING = frozenset(CARRIED)


@dataclass(slots=True)
class _Pending:
    """A save whose files are being written."""

    attempt: Attempt
    plan: writer.Plan
    thread: threading.Thread | None = None
    digests: dict[str, FileDigest] | None = None
    error: BaseException | None = None

    def work(self, store: CheckpointStore) -> None:
        """Write and hash this rank's files; runs in the background of an asynchronous save."""
        try:
            self.plan.write()
            self.digests = store.hash_files(self.attempt, self.plan.names)
        except BaseException as error:  # said by every rank at the next step boundary
            self.error = error


class Checkpointer:
    """Saves and resumes one run."""

    def __init__(
        self,
        run: RunConfig,
        layout: Layout,
        chunks: list[Any],
        optimizer: Any,
        schedule: Any,
        *,
        config_text: str = "",
        root: str | Path | None = None,
        run_dir: Path | None = None,
        foreign: Callable[[str], str | None] | None = None,
        inherit: Callable[[Path, dict[str, Any]], None] | None = None,
        extra: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Nothing is read or written yet. Collective: makes a gloo group of all ranks.

        Args:
            run, layout, chunks, optimizer, schedule: what is saved and loaded into; the chunks of
                this rank, wrapped or not, and Megatron's optimizer and OptimizerParamScheduler.
            config_text: the resolved configuration as YAML, kept inside every checkpoint.
            root: directory of the checkpoints; default: ``checkpoint.directory`` or
                ``<run_dir>/checkpoints``.
            run_dir: remembers the newest checkpoint (`checkpoint.last_checkpoint`); None: nothing.
            foreign: why a checkpoint in ``root`` with this configuration text is another run's and
                must not be continued; None where it is this run's.
            inherit: called with another run's checkpoint, and what it holds under ``run``, before
                anything of it is loaded; collective, and may refuse it on all ranks alike.
            extra: plain data to save as well; ``loaded_extra`` holds what a checkpoint had.

        Raises ValueError: the key file cannot be used.
        """
        self.run, self.layout = run, layout
        self.parts = Parts(
            list(chunks), optimizer, schedule, run.parallel.use_distributed_optimizer
        )
        self.config_text = config_text
        self._extra = extra
        self._run_dir, self._foreign, self._inherit = run_dir, foreign, inherit
        self.loaded_extra: dict[str, Any] = {}
        self.loaded_own: dict[str, Any] | None = None
        """Plain data of the loaded checkpoint of this run: progress, schedule, config ..."""
        options, spike = run.checkpoint, run.faults.spike
        key = read_key(options.hmac_key_file) if options.hmac_key_file is not None else None
        self.ranks = make_collective()
        self._open: Callable[[Path], CheckpointStore] = partial(
            CheckpointStore,
            keep_last=options.keep_last,
            keep_behind=spike.rewind_margin if spike.action == "rewind" else 0,
            hmac_key=key,
            verify=options.verify,
            collective=self.ranks,
        )
        self.store = self._open(Path(root) if root is not None else run.checkpoint_directory)
        self._pending: _Pending | None = None

    # ---------------------------------------------------------------- saving

    @property
    def saving(self) -> bool:
        """Whether a background save is not committed yet."""
        return self._pending is not None

    @property
    def saving_step(self) -> int | None:
        """Its step; None where there is none."""
        return None if self._pending is None else self._pending.attempt.step

    def save(self, progress: TrainState) -> None:
        """Save everything at ``progress``; with ``checkpoint.async_save`` in the background.

        An earlier background save is committed first. The state may change as soon as this returns.

        Raises SaveError: the attempt was abandoned on all ranks; earlier checkpoints are untouched.
        """
        self.finalize(blocking=True)
        failed = progress.abandoned_saves + self.store.failed_saves
        progress = replace(progress, abandoned_saves=failed)
        attempt = self.store.begin(progress.step)
        background = self.run.checkpoint.async_save
        # Core plans a save with collectives of its own. A rank that fails before them would leave
        # the others waiting in them, so what is local is done, and agreed on, first.
        how = self.run.checkpoint.optimizer_sharding
        add = partial(content.add_optimizer, optimizer_sharding=how, loading=False)
        state = self._attempted(attempt, lambda: self._own_state(progress))
        self._attempted(attempt, lambda: add(state, self.parts))
        plan: writer.Plan = self._attempted(attempt, lambda: writer.plan(state, attempt.path))
        self._attempted(attempt, lambda: plan.stage(copy=background))
        self._pending = pending = _Pending(attempt, plan)
        if background:
            pending.thread = threading.Thread(
                target=pending.work, args=(self.store,), name="checkpoint-writer"
            )
            pending.thread.start()
        else:
            pending.work(self.store)
            self._commit()

    def finalize(self, *, blocking: bool = False) -> bool:
        """Commit a background save whose writers are done on all ranks; whether none is left.

        ``blocking`` waits for the writers.

        Raises SaveError: a rank could not write; the attempt was abandoned on all ranks.
        """
        pending = self._pending
        if pending is None:
            return True
        if pending.thread is not None:
            if blocking:
                pending.thread.join()
            if any(self.ranks.all_gather(pending.thread.is_alive())):
                return False
        self._commit()
        return True

    def _commit(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        attempt, plan = pending.attempt, pending.plan
        self.store.agree(attempt, pending.error)
        results = self.ranks.all_gather(plan.results)
        mine, error = dict(pending.digests or {}), None
        if self.ranks.rank == 0:
            try:
                names = plan.finish(results, attempt.path)
                mine |= self.store.hash_files(attempt, names)
            except Exception as caught:
                error = caught
        self.store.agree(attempt, error)
        info = {
            "layout": self._shape(),
            "optimizer_sharding": self.run.checkpoint.optimizer_sharding,
            "distributed_optimizer": self.parts.distributed_optimizer,
            "precision": self.run.training.precision,
            "config_sha256": hashlib.sha256(self.config_text.encode()).hexdigest(),
            "environment": self._environment,
        }
        path = self.store.commit(attempt, mine, info)
        if self.ranks.rank == 0:
            log.info("saved %s", path)
        self._remember(path, attempt.step)

    def _remember(self, path: Path, step: int) -> None:
        if self._run_dir is not None and self.ranks.rank == 0:
            last_checkpoint.remember(self._run_dir, path, step=step)

    def _attempted(self, attempt: Attempt, work: Callable[[], Any]) -> Any:
        """Do ``work`` on all ranks; where it fails on one, all abandon the attempt."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except (Exception, CheckpointException) as caught:  # torch's is a BaseException
            error = caught
        self.store.agree(attempt, error)
        return result

    def _own_state(self, progress: TrainState) -> dict[str, Any]:
        """What this rank has to save, the optimizer left out. Local."""
        state = content.local_part(
            self.parts,
            optimizer_sharding=self.run.checkpoint.optimizer_sharding,
            rng=(self.layout.rank, self.layout.world_size),
        )
        state["run"] = {
            "progress": progress.as_dict(),
            "schedule": self.parts.schedule.state_dict(),
            "optimizer_step": optimizer_state.read_step(self.parts.optimizer),
            "config": self.config_text,
            "environment": self._environment,
            "extra": self._extra(),
        }
        return state

    @cached_property
    def _environment(self) -> Any:
        # Plain JSON: torch's own version is a class, and only data may enter a checkpoint.
        return json.loads(json.dumps(environment.report(), default=str))

    def _shape(self) -> dict[str, Any]:
        """What must be equal for random streams to be taken over."""
        return {
            **self.layout.sizes("{}"),
            "virtual_stages": len(self.parts.chunks),
            "device": self.run.training.device,
        }

    # --------------------------------------------------------------- loading

    def load(self) -> TrainState | None:
        """Resume: model, optimizer, schedule and random streams; None for a fresh start.

        The run's own newest good checkpoint is taken, else ``checkpoint.load_from``.

        Raises:
            CheckpointError: checkpoints exist and none is good, one is required and missing, or
                the run directory knows of one that is not there.
            MismatchError: a good checkpoint does not fit the configuration, or is another run's.
        """
        options = self.run.checkpoint
        if options.resume != "never":
            progress = self._load_newest(self.store, carried=EVERYTHING, own=True)
            if progress is not None:
                return progress
            if self._run_dir is not None:
                here = self._run_dir, self.store.root
                self._asked(lambda: last_checkpoint.refuse_to_forget(*here))
        if options.resume == "required":
            raise CheckpointError(
                f"checkpoint.resume is required, and there is no checkpoint in {self.store.root}"
            )
        if options.load_from is None:
            return None
        return self._load_from(Path(options.load_from), options.carried)

    def abandon_after(self, step: int) -> None:
        """Move the checkpoints of later steps aside; a background save ends first. Collective.

        One of a later step is given up: committed, it would count for ``keep_last``, and the
        checkpoint to go back to could be deleted for it.

        Raises CheckpointError: nothing would be left.
        """
        pending = self._pending
        with contextlib.suppress(SaveError):  # the run goes on without it
            if pending is None or pending.thread is None or pending.attempt.step <= step:
                self.finalize(blocking=True)
            else:
                self._pending = None
                pending.thread.join()
                self.ranks.barrier()  # no rank writes any more
                reason = f"the run went back to step {step} before it was complete"
                self.store.abandon(pending.attempt, "abandoned", reason)
        self.store.abandon_after(step)

    def reload(self) -> TrainState:
        """Go back to the run's newest good checkpoint, in the middle of a run. Collective.

        Raises CheckpointError: none is good.
        """
        progress = self._load_newest(self.store, carried=EVERYTHING, own=True)
        if progress is None:
            raise CheckpointError(f"there is no checkpoint in {self.store.root}")
        return progress

    def _load_from(self, path: Path, carried: frozenset[str]) -> TrainState | None:
        """Another run's checkpoint: its directory, that of its checkpoints, or the run's."""
        progress: TrainState | None
        if self.run.checkpoint.load_step is not None:
            path = self._asked(partial(newest.of_step, path, self.run.checkpoint.load_step))
        if (path / MANIFEST).is_file():
            try:
                found = self._open(path.parent).check(path)
                progress = self._apply(found, carried, own=False)
            except BadCheckpoint as bad:
                text = f"checkpoint.load_from {path}: {gone(path) or bad.reason}"
                raise no_checkpoint(text, passing=bad.passing) from None
        else:
            root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
            progress = self._load_newest(self._open(root), carried=carried, own=False)
            if progress is None:
                raise CheckpointError(f"checkpoint.load_from: there is no checkpoint in {root}")
        return progress if "step" in carried else None

    def _load_newest(
        self, store: CheckpointStore, *, carried: frozenset[str], own: bool
    ) -> TrainState | None:
        """From the run's own store (damaged ones are moved aside), or from another run's."""
        progress: list[TrainState] = []

        def accept(found: Found) -> None:
            progress[:] = [self._apply(found, carried, own=own)]

        found = store.find(own=own, accept=accept)
        if found is None:
            return None
        if own:
            self._remember(found.path, found.manifest.step)
        return progress[0]

    def _asked[T](self, work: Callable[[], T]) -> T:
        """`on_first_rank` over the ranks of the store, for CheckpointErrors. Collective."""
        ranks = self.ranks
        return on_first_rank(work, CheckpointError, rank=ranks.rank, to_all=ranks.broadcast)

    def _apply(self, found: Found, carried: frozenset[str], *, own: bool) -> TrainState:
        """Load a verified checkpoint into the live objects. Collective.

        Raises:
            BadCheckpoint: its content is not what it should be; on all ranks.
            MismatchError: it does not fit; on all ranks.
        """
        path, info = found.path, found.manifest.info
        sizes = {name: digest.size for name, digest in found.manifest.files.items()}
        same_layout = info.get("layout") == self._shape()
        together = partial(self._together, found)
        ours: dict[str, Any] = {
            "distributed_optimizer": self.parts.distributed_optimizer,
            "precision": self.run.training.precision,
            "layout": self._shape(),
        }
        try:
            together(lambda: content.check_options(info, carried=carried, **ours))
            index = together(lambda: read_metadata(path, sizes))
            if not own and self._inherit is not None:
                self._inherit(path, dict(together(lambda: content.read({}, path, index))["run"]))
            request = together(lambda: self._request(info, carried, same_layout))
            together(lambda: content.ask_for_what_is_saved(request, index))
            skip = f"{content.COMMON}/|{content.RNG}"
            if "optimizer" not in carried:
                skip = content.NOT_MODEL.pattern
            asked = self.ranks.all_gather(together(lambda: content.describe(request)))
            together(lambda: content.check_fit(asked, index, skip=skip))
        except MismatchError as error:
            raise MismatchError(f"{path.name}: {error}") from None
        loaded = together(lambda: content.read(request, path, index))
        if own:
            together(lambda: self._check_run(path, str(loaded["run"]["config"])))
        self.loaded_own = dict(loaded["run"]) if own else None
        return together(lambda: self._put(loaded, carried, same_layout))

    def _together(self, found: Found, work: Callable[[], Any]) -> Any:
        """Do ``work`` on all ranks; where it fails on one it fails on all, with that reason."""
        result: Any = None
        problem: Exception | None = None
        try:
            result = work()
        except (BadCheckpoint, CheckpointError) as caught:
            problem = caught
        except Exception as caught:
            log.debug("loading %s failed", found.path, exc_info=True)
            problem = no_checkpoint(
                f"{found.path.name} cannot be loaded: {describe(caught)}",
                passing=is_passing(caught),
            )
        refusal = first_problem(self.ranks.all_gather(problem))
        if refusal is not None:
            raise refusal
        return result

    def _check_run(self, path: Path, config_text: str) -> None:
        """That a checkpoint of the own store is this run's: two runs may name one directory."""
        reason = self._foreign(config_text) if self._foreign is not None and config_text else None
        if reason is not None:
            raise MismatchError(f"{path}: {reason}")

    def _request(
        self, info: Mapping[str, Any], carried: frozenset[str], same_layout: bool
    ) -> dict[str, Any]:
        goes_on = same_layout and "step" in carried
        rng = (self.layout.rank, self.layout.world_size) if goes_on else None
        sharding = str(info.get("optimizer_sharding"))
        state = content.local_part(self.parts, optimizer_sharding=sharding, rng=rng)
        if "optimizer" in carried:
            content.add_optimizer(state, self.parts, optimizer_sharding=sharding, loading=True)
        return state

    def _put(
        self, loaded: dict[str, Any], carried: frozenset[str], same_layout: bool
    ) -> TrainState:
        """Hand what was loaded to the live objects."""
        run = loaded["run"]
        progress = TrainState.from_dict(run["progress"])
        for name, model in self.parts.models().items():
            model.load_state_dict(loaded[name], strict=True)
        if "optimizer" in carried:
            updates = int(run["optimizer_step"])
            optimizer_state.load(self.parts.optimizer, loaded["optimizer"], updates)
        else:
            self.parts.optimizer.reload_model_params()
        if "step" not in carried:
            what = "weights and optimizer" if "optimizer" in carried else "weights"
            self._warn("took the %s of step %d", what, progress.step)
            return progress
        self.parts.schedule.num_steps = 0  # core adds the saved steps to those it has taken
        steps = max(0, progress.step - self.run.optimizer.begin_step)
        self.parts.schedule.load_state_dict(dict(run["schedule"]) | {"num_steps": steps})
        self.loaded_extra = dict(run.get("extra", {}))
        if same_layout:
            random_state.restore(loaded[content.RNG])
        else:
            seed = random_state.reseed(self.run.training.seed, progress.step, self.layout.pp_rank)
            self._warn(
                "the layout changed: random streams start anew from seed %d (training.seed and "
                "step %d); results agree to rounding, dropout differs",
                seed,
                progress.step,
            )
        return progress

    def _warn(self, text: str, *args: Any) -> None:
        if self.ranks.rank == 0:
            log.warning(text, *args)

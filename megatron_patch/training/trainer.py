"""The training run, from a checked configuration to an exit code. Read this file first.

    prepare   process, process groups, run directory
    build     data, model, optimizer, schedule, watchers, checkpoints
    resume    the newest good checkpoint, if there is one
    loop      steps; metrics, evaluation and checkpoints when due
    finish    last checkpoint, FINISHED

A run ends in one of four ways: at ``train_steps`` (marker FINISHED, exit code 0), gracefully by
signal or limit (checkpoint, exit code 0, no marker), by the stability guard (checkpoint, exit code
5), or by an error (its own exit code; no save is begun).

All ranks run this file in step. What says "Collective" communicates: every rank makes these calls
in the same order, so none of them may stand behind a condition that differs between ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_patch.checkpoint import last_checkpoint
from megatron_patch.checkpoint.train_state import TrainState
from megatron_patch.core_patches.optimizer import use_fused_kernel
from megatron_patch.faults import hang, ledger
from megatron_patch.faults.spike import RewindsUsedUp, SpikePolicy
from megatron_patch.faults.straggler import Stragglers
from megatron_patch.monitor.hub import Monitor
from megatron_patch.parallel import setup
from megatron_patch.parallel.buffers import unwrap
from megatron_patch.parallel.first_rank import of_all, on_first_rank
from megatron_patch.runtime import garbage
from megatron_patch.runtime.heartbeat import Heartbeat, phase
from megatron_patch.runtime.watcher import Action, Pin, ResumePoint, RewindWanted, StepResult, Stop
from megatron_patch.stability.guard import StabilityStop
from megatron_patch.training import run_directory as directories
from megatron_patch.training.evaluate import Evaluation, parameters_in_place
from megatron_patch.training.finite import NonFiniteError
from megatron_patch.training.inheritance import Inheritance
from megatron_patch.training.process import announce, prepare_process
from megatron_patch.training.recorder import Recorder
from megatron_patch.training.resume_rules import DATA_RECORD, keep_recorded
from megatron_patch.training.saver import Saver, check_host_memory
from megatron_patch.training.session import build_session
from megatron_patch.training.signals import NO_STOP, REASONS, StopFlags
from megatron_patch.training.step import fetch, train_step

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_patch.checkpoint.megatron import Checkpointer
    from megatron_patch.data.reader import Reader
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.schema.run import Loaded

TOGETHER = (NonFiniteError, StabilityStop, RewindsUsedUp, ledger.SameStepError)
"""Errors that all ranks raise at the same place."""


def train(loaded: Loaded) -> int:
    """Run the training described by ``loaded``; returns the exit code 0.

    Raises:
        ConfigError, DataError, BackendError: exit code 2.
        NonFiniteError: exit code 3.
        CheckpointError: exit code 4 (no good checkpoint where one is required); an
            UnavailableError, 1, where it could not be read this time.
        StabilityStop: exit code 5, after a checkpoint (``stability.guard: stop``).
        RewindsUsedUp: exit code 7 (``faults.spike``).
        SameStepError: exit code 8, one step crashed every attempt (where the launcher asks).

    A hang ends every rank with exit code 6 from a thread of its own (`faults.hang`).
    """
    loaded = keep_recorded(loaded)
    run = loaded.config
    run_dir = run.directory
    stop = StopFlags(run.training.exit_after_minutes)
    prepare_process(run)
    hang.record_collectives(run_dir)  # before the process group starts
    layout = setup.initialize(run)
    stop.install()
    hangs = hang.start(run.faults, layout, run_dir)  # Collective
    try:
        _train(loaded, layout, stop)
        setup.destroy()
    except BaseException as error:
        if hangs is not None:
            hangs.await_report(error)
        ledger.record_error(run_dir, layout.rank, error)
        # Elsewhere other ranks may be inside a collective: leaving the groups together is not
        # possible, and the launcher ends them.
        if _raised_together(error, layout):
            setup.destroy()
        raise
    finally:
        if hangs is not None:
            hangs.stop()
        stop.restore()
        garbage.release()
    return 0


def _raised_together(error: BaseException, layout: Layout) -> bool:
    return layout.world_size == 1 or isinstance(error, TOGETHER)


# --------------------------------------------------------------------------------- prepare


def _train(loaded: Loaded, layout: Layout, stop: StopFlags) -> None:
    """The run between the start and the end of the process groups."""
    run = loaded.config
    if not layout.print_rank:  # log records below errors come from the first rank only
        logging.getLogger("megatron_patch").setLevel(logging.ERROR)
    directory = directories.take(loaded, layout)  # Collective
    monitor = Monitor(run, directory.path, active=layout.print_rank)
    try:
        monitor.relay_logs()
        if directory.finished:
            monitor.say(f"run {run.name} has finished already; raise training.train_steps to go on")
            return
        monitor.check()
        _refuse_repeated_crash(layout, directory.path)  # Collective
        announce(monitor, run, layout)
        for line in directory.notes:
            monitor.say(line)
        trainer = Trainer(loaded, layout, stop=stop, monitor=monitor, accepted=directory.settle)
        try:
            trainer.run_to_end()
        except Exception as error:
            if _raised_together(error, layout):
                trainer.commit_last_save()
            raise
    except BaseException as error:
        monitor.note(f"stopped by {type(error).__name__}: {error}")
        raise
    finally:
        monitor.close()
        directory.close()


def _refuse_repeated_crash(layout: Layout, run_dir: Path) -> None:
    """Stop when the ledger says that one step crashes every attempt. Collective.

    Raises SameStepError: with the report; only where the launcher set a limit.
    """
    if ledger.LIMIT not in os.environ:
        return
    report = on_first_rank(lambda: ledger.check(run_dir), rank=layout.rank)
    if report is not None:
        raise ledger.SameStepError(report)


class Trainer:
    """The parts of one attempt and the loop over them. Every method is collective.

    ``accepted``: called when nothing has refused to go on with this configuration. Local.
    """

    # ------------------------------------------------------------------------------- build

    def __init__(
        self,
        loaded: Loaded,
        layout: Layout,
        *,
        stop: StopFlags,
        monitor: Monitor,
        accepted: Callable[[], None],
    ) -> None:
        from megatron_patch.data.loader import build_loaders
        from megatron_patch.data.verify import verify_datasets

        run = loaded.config
        self.loaded, self.run, self.layout, self.monitor = loaded, run, layout, monitor
        self.run_dir, self._accepted = run.directory, accepted
        for line in verify_datasets(run):
            monitor.say(line)
        self.loaders = build_loaders(run, layout)
        for line in self.loaders.describe():
            monitor.say(line)
        self.session, vocab = build_session(run, layout, self.loaders, stop=stop, monitor=monitor)
        self.recorder = Recorder(self.session, vocab_size=vocab)
        monitor.say(self.recorder.line)
        self.evaluation = Evaluation(self.session, self.loaders, self.recorder, monitor=monitor)
        self.heartbeat = Heartbeat(layout.rank)
        self.inheritance = Inheritance(loaded, layout, self.loaders)
        self.checkpointer = self._make_checkpointer()
        check_host_memory(self.checkpointer, monitor)
        self.saver = Saver(self.checkpointer, monitor)
        self._watch()
        self.position = TrainState()
        self._begin = 0  # step this attempt went on from, or went back to
        self._stop: Stop | None = None  # what a watcher asked for
        self._batches: Reader | None = None

    def _make_checkpointer(self) -> Checkpointer:
        from megatron_patch.checkpoint.megatron import Checkpointer

        s = self.session
        return Checkpointer(
            self.run, self.layout, s.chunks, s.optimizer, s.schedule,
            config_text=self.loaded.dump_yaml(), run_dir=self.run_dir,
            foreign=self.inheritance.another_run, inherit=self.inheritance.check,
            extra=self._extra,
        )  # fmt: skip

    def _watch(self) -> None:
        """The watchers of this run. Their order is the order of their collectives on all ranks."""
        from megatron_patch.stability.adapters.trainer import Stability

        s, layout, monitor = self.session, self.layout, self.monitor
        roots = [unwrap(chunk) for chunk in s.chunks]
        hosts = of_all(ledger.node())
        self.stability = Stability(
            self.run, layout, s.chunks, monitor=monitor, run_dir=self.run_dir
        )
        self.spikes = SpikePolicy(
            self.run.faults.spike,
            s.guard,
            layout,
            roots=roots,
            run_dir=self.run_dir,
            log=monitor.say,
            samples=partial(self.loaders.samples, "train"),
            last_maxima=lambda: self.stability.attention.max_logits,
        )
        self.spikes.can_rewind = self.saver.can_rewind
        stragglers = Stragglers(self.run.faults, layout, log=monitor.say, hosts=hosts)
        s.watchers = [self.spikes, self.stability, stragglers]

    def run_to_end(self) -> None:
        """Resume, train, save; leaves FINISHED when train_steps was reached."""
        self._resume()
        self._accepted()
        self._begin = self.position.step
        self.monitor.start(self._begin, has_saved=self._has_saved(), settings=self.loaded.tree)
        try:
            stop = self._loop()
        finally:
            for watcher in self.session.watchers:
                watcher.close()
        self._finish(stop)

    # ------------------------------------------------------------------------------ resume

    def _resume(self) -> None:
        """Take over the newest good checkpoint, where there is one.

        Raises ConfigError: data or schedule are not those of the run so far, and no key asks for
        it, or the run is beyond its end; of another run's checkpoint: see `inheritance`.
        """
        position = self.checkpointer.load()
        if position is None:
            self.monitor.say("no checkpoint: starting at step 0")
        else:
            self.position = position
            self.monitor.say(
                f"resuming after step {position.step:,} ({position.consumed_tokens:,} tokens)"
            )
        self._load_watchers()
        self._keep_optimizer_kernel()
        for line in self.inheritance.resume(
            self.checkpointer, self.session.schedule, step=self.position.step,
            skips=self.spikes.skips,
        ):  # fmt: skip
            self.monitor.say(line)

    @property
    def _next_batch(self) -> int:
        return self.spikes.skips.batch(self.position.step + 1)

    def _load_watchers(self, *, rewound: bool = False) -> None:
        """Let the watchers go on from the position, with what its checkpoint carries of them."""
        extra, has_saved = self.checkpointer.loaded_extra, self._has_saved()
        at = ResumePoint(
            self.position.step, self.position.switched_at, extra, has_saved, rewound=rewound
        )
        faults = extra.get("faults", {})
        self.session.skipped = int(faults.get("skipped", 0))
        self.session.guard.nonfinite = int(faults.get("nonfinite", 0))  # not of earlier versions
        for watcher in self.session.watchers:
            watcher.load_state(at)

    def _has_saved(self) -> bool:
        """Whether the run has checkpoints of its own; False off the first rank. Local."""
        return self.layout.print_rank and last_checkpoint.has_saved(self.run_dir)

    def _keep_optimizer_kernel(self) -> None:
        """A checkpoint carries its writer's optimizer flags: put this run's back. Local."""
        if self.run.training.device == "cuda":
            use_fused_kernel(self.session.optimizer)

    # -------------------------------------------------------------------------------- loop

    def _loop(self) -> Stop | None:
        """Train until the end (None) or a reason to stop."""
        train_steps = self.run.training.train_steps
        self.session.guard.stop_code = self.session.guard.agree_on_signal()
        stop = self._reason_to_stop()
        if self.position.step >= train_steps:
            self.evaluation.at_end(self.position)
            return None
        if stop is not None:
            return stop
        self._batches = self._read()
        self.recorder.restart()
        try:
            while self.position.step < train_steps and stop is None:
                try:
                    stop = self._step(self.position.step + 1)
                except RewindWanted as wanted:  # on all ranks
                    self._rewind(wanted)
            for watcher in self.session.watchers:
                self._carry_out(watcher.finish(self.position.step))
            self._before_save()
        finally:
            self._close_batches()
        return stop

    def _step(self, step: int) -> Stop | None:
        """One step and what follows it; the reason to stop after it, if there is one."""
        with self.heartbeat.step(step):
            for watcher in self.session.watchers:
                watcher.before_step(step)
            self.session.micro_batches = self.loaders.micro_batches_of(self._next_batch)
            batches = fetch(self.session, self._batches)
            ahead = None if self._batches is None else self._batches.ahead
            # Collective: pipeline and tensor parallelism, gradients, agreement, update.
            result = train_step(self.session, batches, step, meanwhile=ahead)
            self.position.advance(
                sequences=self.session.sequences, length=self.run.model.seq_length
            )
            self.recorder.stepped()
            with phase("record"):
                # Collective, in the order of the list. Before the save: it carries their state.
                for watcher in self.session.watchers:
                    self._carry_out(watcher.after_step(step, result))
                self.monitor.tick()
                stop = self._reason_to_stop()  # agreed on inside the step: the same on all ranks
                last = stop is not None or step == self.run.training.train_steps
                self._report(result, last=last)
            self._save(last=last)
            if step == self._begin + garbage.SETTLED_AFTER:
                with phase("record"), self.recorder.away():
                    garbage.freeze()
        return stop

    def _carry_out(self, actions: list[Action]) -> None:
        """What a watcher asks for; the same on all ranks. Of several stops the first counts."""
        for action in actions:
            if isinstance(action, Pin):
                self.saver.keep_before_danger(action.step)
            elif self._stop is None:
                self._stop = action

    def _reason_to_stop(self) -> Stop | None:
        """Why the run ends here although it is not finished; the same on all ranks. Local."""
        t, step = self.run.training, self.position.step
        if step >= t.train_steps:
            return None
        if t.exit_at_step is not None and step >= t.exit_at_step:
            return Stop(f"training.exit_at_step is {t.exit_at_step}")
        if self._stop is not None:
            return self._stop
        code = self.session.guard.stop_code
        return None if code == NO_STOP else Stop(REASONS[code])

    def _report(self, result: StepResult, *, last: bool) -> None:
        """Evaluate and log, when due."""
        t, step = self.run.training, self.position.step
        finished = step == t.train_steps
        due = finished or (t.eval_interval is not None and step % t.eval_interval == 0)
        evaluates = due and self.loaders.has("valid")
        if not (step % self.run.logging.interval == 0 or last or evaluates):
            return
        metrics = self.recorder.record(step, result, self.position.consumed_tokens)
        for watcher in self.session.watchers:
            extra = metrics.extra | watcher.scalars()
            metrics = replace(metrics, extra=extra, status=(*metrics.status, *watcher.status()))
        if evaluates:
            metrics = replace(metrics, eval_loss=self.evaluation.loss("valid"))
        self.monitor.log(metrics)
        if finished:
            self.evaluation.test(step)

    def _save(self, *, last: bool) -> None:
        """Commit a background save that is ready; begin the next one, when due."""
        interval = self.run.checkpoint.interval
        due = not last and interval is not None and self.position.step % interval == 0
        if not (due or self.checkpointer.saving):
            return
        with phase("save"):
            self.saver.poll()
            if due:
                # Under overlap_param_gather the weights are gathered first, on all ranks.
                with self.recorder.away(), parameters_in_place(self.session):
                    self._before_save()
                    self.saver.save(self.position)

    def _before_save(self) -> None:
        for watcher in self.session.watchers:
            watcher.before_save()
        self.position.switched_at = self.stability.attention.switched_at

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint carries beside the model's state: that of the watchers. Local."""
        found: dict[str, Any] = {}
        for watcher in self.session.watchers:
            found |= watcher.state()
        found["faults"]["skipped"] = self.session.skipped
        found["faults"]["nonfinite"] = self.session.guard.nonfinite
        found[DATA_RECORD] = self.loaders.identities
        found["data"] = self.loaders.position(self._next_batch)
        return found

    def _rewind(self, wanted: RewindWanted) -> None:
        """Back to the last checkpoint before the spike; the batches in between are left out."""
        assert self.saver.back_to is not None, "a rewind is wanted only where there is one"
        with phase("save"):
            for watcher in self.session.watchers:
                self._carry_out(watcher.before_rewind(self.saver.back_to))
            self._close_batches()

            def plan(back_to: int) -> None:
                for watcher in self.session.watchers:
                    watcher.plan_rewind(back_to)
                torch.distributed.barrier()  # the plan is on disk before any rank loads

            with parameters_in_place(self.session):
                self.position = self.saver.rewind(wanted.newest, plan)
            self._keep_optimizer_kernel()
            self._begin = min(self._begin, self.position.step)
            self._stop = None
            self.monitor.restart(self.position.step, has_saved=self._has_saved())
            self._load_watchers(rewound=True)
            self.recorder.restart()
            self._batches = self._read()

    def _read(self) -> Reader | None:
        """This rank's training micro-batches from the position on; None if it reads none. Local."""
        if not self.session.reads_data:
            return None
        return self.loaders.iterate(
            "train", start_step=self.position.step, batch_of=self.spikes.skips.batch
        )

    def _close_batches(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()

    # ------------------------------------------------------------------------------ finish

    def _finish(self, stop: Stop | None) -> None:
        """The last checkpoint; then why the run ends.

        Raises StabilityStop: the guard stopped the run.
        """
        with phase("save"):
            if self.position.step > self._begin:
                with parameters_in_place(self.session):
                    self.saver.save_last(self.position)
            self.loaders.close()
        self.heartbeat.close()
        if stop is None:
            step, tokens = self.position.step, self.position.consumed_tokens
            if self.layout.print_rank:
                directories.mark_finished(self.run_dir, step=step, consumed_tokens=tokens)
            self.monitor.say(f"finished: {step:,} steps")
            return
        if stop.error is not None:
            raise stop.error
        exit_at = self.run.training.exit_at_step
        reached = exit_at is not None and self.position.step >= exit_at
        how = "the command with a larger one, or none," if reached else "the same command"
        self.monitor.say(
            f"stopped gracefully after step {self.position.step:,}: {stop.reason}; {how} continues "
            "the run"
        )

    def commit_last_save(self) -> None:
        """Commit what is being saved in the background before an error ends the run.

        It is a good checkpoint of an earlier step; uncommitted, the next start would discard it.
        """
        if not self.checkpointer.saving:
            return
        with phase("save"):
            try:
                self.checkpointer.finalize(blocking=True)
            except Exception as error:  # the one that ends the run is the one to report
                self.monitor.say(f"warning: the last background save is lost: {error}")

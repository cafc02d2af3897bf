"""The training run, from a checked configuration to an exit code. Read this file first.

    prepare the process -> process groups -> run directory -> verify data -> model, optimizer,
    schedule -> checkpoint, if there is one -> steps (metrics, evaluation, checkpoints) -> FINISHED

A run ends in one of four ways: at ``train_steps`` (marker FINISHED, exit code 0), gracefully by
signal or limit (checkpoint, exit code 0, no marker), by the stability guard (checkpoint, exit code
5), or by an error (its own exit code; no save is begun).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_patch.faults import hang, ledger
from megatron_patch.faults.spike import RewindsUsedUp, RewindWanted, Spike
from megatron_patch.monitor.hub import Monitor
from megatron_patch.parallel import setup
from megatron_patch.runtime import garbage
from megatron_patch.runtime.heartbeat import PULSE, Heartbeat
from megatron_patch.stability.guard import StabilityStop
from megatron_patch.training import startup
from megatron_patch.training.evaluate import evaluate, parameters_in_place
from megatron_patch.training.finite import NonFiniteError
from megatron_patch.training.recorder import Recorder, device_peak
from megatron_patch.training.rundir import (
    RunDirectory,
    another_run,
    mark_finished,
    run_directory,
)
from megatron_patch.training.saver import Position, Saver
from megatron_patch.training.signals import NO_STOP, REASONS, StopFlags
from megatron_patch.training.step import StepResult, fetch, train_step

if TYPE_CHECKING:
    from megatron_patch.data.loader import Loaders
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
    run = loaded.config
    stop = StopFlags(run.training.exit_after_minutes)
    startup.prepare_process(run)
    hang.record_collectives(run_directory(run))
    layout = setup.initialize(run)
    stop.install()
    watcher = hang.start(run, layout, run_directory(run))
    try:
        _train(loaded, layout, stop)
        setup.destroy()
    except BaseException as error:
        if watcher is not None:
            watcher.settle(error)
        ledger.record_error(run_directory(run), layout.rank, error)
        # Elsewhere other ranks may be inside a collective: leaving the groups together is not
        # possible, and the launcher ends them.
        if _raised_together(error, layout):
            setup.destroy()
        raise
    finally:
        if watcher is not None:
            watcher.stop()
        stop.restore()
        garbage.release()
    return 0


def _raised_together(error: BaseException, layout: Layout) -> bool:
    return layout.world_size == 1 or isinstance(error, TOGETHER)


def _train(loaded: Loaded, layout: Layout, stop: StopFlags) -> None:
    run = loaded.config
    startup.silence_other_ranks(layout)
    directory = startup.take_directory(loaded, layout)
    monitor = Monitor(run, run_directory(run), active=layout.print_rank)
    try:
        monitor.relay_logs()
        if directory is not None and directory.finished:
            monitor.say(f"run {run.name} has finished already; raise training.train_steps to go on")
            return
        monitor.check()
        startup.refuse_repeated_crash(run, layout)
        startup.announce(monitor, run, layout)
        for note in directory.notes if directory is not None else []:
            monitor.say(note)
        parts = _Training(loaded, layout, stop=stop, monitor=monitor, directory=directory)
        try:
            parts.run_to_end()
        except Exception as error:
            if _raised_together(error, layout):
                parts.commit_last_save()
            raise
    except BaseException as error:
        monitor.note(f"stopped by {type(error).__name__}: {error}")
        raise
    finally:
        monitor.close()
        if directory is not None:
            directory.close()


class _Training:
    """The parts of one attempt and the loop over them."""

    def __init__(
        self,
        loaded: Loaded,
        layout: Layout,
        *,
        stop: StopFlags,
        monitor: Monitor,
        directory: RunDirectory | None,
    ) -> None:
        from megatron_patch.checkpoint.megatron import Checkpointer
        from megatron_patch.data.loader import build_loaders
        from megatron_patch.data.verify import verify_datasets

        run = loaded.config
        self.loaded, self.run, self.layout, self.monitor = loaded, run, layout, monitor
        self.directory = directory
        for line in verify_datasets(run):
            monitor.say(line)
        self.loaders: Loaders = build_loaders(run, layout)
        for line in self.loaders.describe():
            monitor.say(line)
        self.session, vocab = startup.build_session(
            run, layout, self.loaders, stop=stop, monitor=monitor
        )
        peak, line = device_peak(run, layout)
        monitor.say(line)
        self.heartbeat = Heartbeat(layout.rank)
        self.recorder = Recorder(self.session, vocab_size=vocab, peak=peak)
        s = self.session
        self.faults = s.faults = startup.watch_faults(s, self.loaders, monitor)
        checkpointer = Checkpointer(
            run, layout, s.chunks, s.optimizer, s.schedule, config_text=loaded.dump_yaml(),
            run_dir=run_directory(run), foreign=partial(another_run, loaded=loaded),
            extra=lambda: self.faults.state() | {"stability": self.stability.state()},
        )  # fmt: skip
        startup.check_host_memory(checkpointer, monitor)
        self.saver = Saver(checkpointer, monitor)
        self.faults.spikes.can_rewind = self.saver.can_rewind
        self.position = Position()
        self._begin = 0
        self._batches: Reader | None = None
        self.stability = s.stability = startup.watch_stability(
            s, monitor, self.saver.keep_before_danger
        )

    def run_to_end(self) -> None:
        """Resume, train, save; leaves FINISHED when train_steps was reached."""
        self._resume()
        self._begin = self.position.step
        self.monitor.start(self._begin, settings=self.loaded.tree)
        try:
            reason = self._steps()
        finally:
            self.stability.close()
        self.faults.close()
        PULSE.enter("save")
        if self.position.step > self._begin:
            self._check_directory()
            with parameters_in_place(self.session):
                self.saver.save_last(self.position)
        self.loaders.close()
        self.heartbeat.close()
        if reason is not None and reason == self.stability.stop_reason:
            raise StabilityStop(
                f"stability.guard stopped the run after step {self.position.step:,}, saved: "
                f"{reason}; change attention.stabilizer or optimizer.lr, or set "
                "stability.guard: warn, and give the same command again"
            )
        if reason is not None:
            last = self.run.training.exit_at_step
            reached = last is not None and self.position.step >= last
            how = "the command with a larger one, or none," if reached else "the same command"
            self.monitor.say(
                f"stopped gracefully after step {self.position.step:,}: {reason}; {how} continues "
                "the run"
            )
            return
        if self.layout.print_rank:
            mark_finished(
                run_directory(self.run),
                step=self.position.step,
                consumed_tokens=self.position.consumed_tokens,
            )
        self.monitor.say(f"finished: {self.position.step:,} steps")

    def commit_last_save(self) -> None:
        """Commit what is being saved in the background before an error ends the run. Collective.

        It is a good checkpoint of an earlier step; uncommitted, the next start would discard it.
        """
        if not self.saver.saving:
            return
        PULSE.enter("save")
        try:
            self.saver.finish()
        except Exception as error:  # the one that ends the run is the one to tell
            self.monitor.say(f"warning: the last background save is lost: {error}")

    def _resume(self) -> None:
        """Take over the newest good checkpoint, where there is one.

        Raises:
            ConfigError: the data is not what the run was trained on so far.
        """
        position = self.saver.load()
        if position is None:
            self.monitor.say("no checkpoint: starting at step 0")
        else:
            self.position = position
            self.monitor.say(
                f"resuming after step {position.step:,} ({position.consumed_tokens:,} tokens)"
            )
        self.faults.resume(self.saver.extra, step=self.position.step)
        self._start_stability()
        startup.keep_optimizer_kernel(self.session)
        startup.check_data_identity(self.run, self.layout, self.loaders, step=self.position.step)

    def _start_stability(self) -> None:
        """Telemetry and guard go on after the step the run is at. Collective."""
        self.stability.start(
            self.position.step,
            switched_at=self.position.switched_at,
            saved=self.saver.extra.get("stability"),
        )
        self.position.switched_at = self.stability.switched_at

    def _steps(self) -> str | None:
        """Train until the end (None) or a reason to stop."""
        t = self.run.training
        self.session.guard.stop_code = self.session.guard.agree_on_signal()
        reason = self._reason_to_stop()
        if self.position.step >= t.train_steps or reason is not None:
            return reason
        self._batches = self._read()
        self.recorder.restart()
        try:
            while self.position.step < t.train_steps and reason is None:
                try:
                    reason = self._step(self.position.step + 1)
                except RewindWanted as wanted:
                    self._rewind(wanted.spike)
            self.stability.last(self.position.step)
            self.stability.before_save()
            self.position.switched_at = self.stability.switched_at
        finally:
            self._close_batches()
        return reason

    def _step(self, step: int) -> str | None:
        """One step and what follows it; the reason to stop after it, if there is one."""
        self.heartbeat.beat(step)
        self.stability.begin(step)
        self.faults.begin(step)
        batches = fetch(self.session, self._batches)
        ahead = None if self._batches is None else self._batches.ahead
        result = train_step(self.session, batches, step, meanwhile=ahead)
        self.position.advance(self.run)
        self.recorder.stepped()
        self.stability.finish(step, result)
        self.position.switched_at = self.stability.switched_at
        self.faults.stepped(step)
        self.monitor.tick()
        reason = self._reason_to_stop()
        last = reason is not None or step == self.run.training.train_steps
        self._report(result, last=last)
        self._save(last=last)
        if step == self._begin + garbage.SETTLED_AFTER:
            with self.recorder.away():
                garbage.settle()
        PULSE.stepped()
        return reason

    def _rewind(self, spike: Spike) -> None:
        """Back to the last checkpoint before the spike; the batches in between are left out."""
        PULSE.enter("save")
        self.stability.leave(self.saver.back_to)
        self._close_batches()
        self.stability.close()

        def plan(back_to: int) -> None:
            self.stability.remember_switch(back_to)
            self.faults.plan_rewind(spike, back_to=back_to)

        with parameters_in_place(self.session):
            self.position = self.saver.rewind(
                spike.step - 1 - self.run.faults.spike.rewind_margin, plan
            )
        startup.keep_optimizer_kernel(self.session)
        self.faults.rewound(self.saver.extra, step=self.position.step)
        self._begin = min(self._begin, self.position.step)
        self.monitor.restart(self.position.step)
        self.stability = self.session.stability = startup.watch_stability(
            self.session, self.monitor, self.saver.keep_before_danger
        )
        self._start_stability()
        self.recorder.restart()
        self._batches = self._read()

    def _check_directory(self) -> None:
        """Write no checkpoint into a directory that is not the run's any more (first rank only)."""
        if self.directory is not None:
            self.directory.check_still_there()

    def _read(self) -> Reader | None:
        """This rank's training micro-batches from the current step on; None if it reads none."""
        if not self.session.reads_data:
            return None
        return self.loaders.iterate(
            "train", start_step=self.position.step, batch_of=self.faults.skips.batch
        )

    def _close_batches(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()

    def _reason_to_stop(self) -> str | None:
        """Why the run ends here although it is not finished; the same on all ranks."""
        t, step = self.run.training, self.position.step
        if step >= t.train_steps:
            return None
        if t.exit_at_step is not None and step >= t.exit_at_step:
            return f"training.exit_at_step is {t.exit_at_step}"
        if self.stability.stop_reason is not None:
            return self.stability.stop_reason
        code = self.session.guard.stop_code
        return None if code == NO_STOP else REASONS[code]

    def _report(self, result: StepResult, *, last: bool) -> None:
        """Evaluate and log, when due. Collective."""
        t, step = self.run.training, self.position.step
        finished = step == t.train_steps
        due = finished or (t.eval_interval is not None and step % t.eval_interval == 0)
        evaluates = due and self.loaders.has("valid")
        if not (step % self.run.logging.interval == 0 or last or evaluates):
            return
        PULSE.enter("record")
        metrics = self.recorder.record(step, result, self.position.consumed_tokens)
        metrics = replace(metrics, extra=metrics.extra | self.stability.latest)
        if evaluates:
            PULSE.enter("evaluation")
            with self.recorder.away():
                metrics = replace(metrics, eval_loss=evaluate(self.session, self.loaders))
        self.monitor.log(metrics)

    def _save(self, *, last: bool) -> None:
        """Commit a background save that is ready; begin the next one, when due. Collective."""
        interval = self.run.checkpoint.interval
        due = not last and interval is not None and self.position.step % interval == 0
        if due or self.saver.saving:
            PULSE.enter("save")
        self.saver.poll()
        if not due:
            return
        self._check_directory()
        with self.recorder.away(), parameters_in_place(self.session):
            self.stability.before_save()
            self.saver.save(self.position)

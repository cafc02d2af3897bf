"""The training run, from a checked configuration to an exit code. Read this file first.

    prepare the process -> process groups -> run directory -> verify data -> model, optimizer,
    schedule -> checkpoint, if there is one -> steps (metrics, evaluation, checkpoints) -> FINISHED

A run ends in one of three ways: at ``train_steps`` (marker FINISHED, exit code 0), gracefully by
signal or limit (checkpoint, exit code 0, no marker), or by an error (its own exit code; nothing is
saved).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_patch.monitor.hub import Monitor
from megatron_patch.parallel import setup
from megatron_patch.training import startup
from megatron_patch.training.recorder import Recorder, device_peak, tokens_per_step
from megatron_patch.training.rundir import mark_finished, run_directory
from megatron_patch.training.signals import NO_STOP, REASONS, StopFlags

if TYPE_CHECKING:
    from megatron_patch.config import Loaded
    from megatron_patch.data.loader import Loaders
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.training.step import StepResult


def train(loaded: Loaded) -> int:
    """Run the training described by ``loaded``; returns the exit code 0.

    Raises:
        ConfigError, DataError, BackendError: exit code 2.
        NonFiniteError: exit code 3.
        CheckpointError: exit code 4 (no good checkpoint where one is required).
    """
    run = loaded.config
    stop = StopFlags(run.training.exit_after_minutes)
    startup.prepare_process(run)
    layout = setup.initialize(run)
    stop.install()
    try:
        _train(loaded, layout, stop)
        setup.destroy()
    except BaseException:
        # Other ranks may be inside a collective: leaving the groups together is not possible,
        # and the launcher ends them. A world of one can always clean up.
        if layout.world_size == 1:
            setup.destroy()
        raise
    finally:
        stop.restore()
    return 0


def _train(loaded: Loaded, layout: Layout, stop: StopFlags) -> None:
    run = loaded.config
    startup.silence_other_ranks(layout)
    directory = startup.take_directory(loaded, layout)
    monitor = Monitor(run, run_directory(run), active=layout.print_rank)
    try:
        if directory is not None and directory.finished:
            monitor.say(f"run {run.name} has finished already; raise training.train_steps to go on")
            return
        monitor.check()
        startup.announce(monitor, run, layout)
        for note in directory.notes if directory is not None else []:
            monitor.say(note)
        _Training(loaded, layout, stop=stop, monitor=monitor).run_to_end()
    except BaseException as error:
        monitor.note(f"stopped by {type(error).__name__}: {error}")
        raise
    finally:
        monitor.close()
        if directory is not None:
            directory.close()


@dataclass(slots=True)
class _Position:
    """How far the run is."""

    step: int = 0
    consumed_tokens: int = 0


class _Training:
    """The parts of one attempt and the loop over them."""

    def __init__(
        self, loaded: Loaded, layout: Layout, *, stop: StopFlags, monitor: Monitor
    ) -> None:
        from megatron_patch.data.loader import build_loaders
        from megatron_patch.data.verify import verify_datasets

        run = loaded.config
        self.loaded, self.run, self.layout, self.monitor = loaded, run, layout, monitor
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
        self.recorder = Recorder(self.session, vocab_size=vocab, peak=peak)
        self.position = _Position()

    def run_to_end(self) -> None:
        """Resume, train, save; leaves FINISHED when train_steps was reached."""
        self.monitor.start(self.position.step, settings=self.loaded.tree)
        reason = self._steps()
        if reason is None:
            if self.layout.print_rank:
                mark_finished(
                    run_directory(self.run),
                    step=self.position.step,
                    consumed_tokens=self.position.consumed_tokens,
                )
            self.monitor.say(f"finished: {self.position.step:,} steps")
        else:
            self.monitor.say(
                f"stopped gracefully after step {self.position.step:,}: {reason}; the same "
                "command continues the run"
            )

    def _steps(self) -> str | None:
        """Train until the end (None) or a reason to stop."""
        from megatron_patch.training.step import fetch, train_step

        t, position = self.run.training, self.position
        batches = self._batches()
        self.recorder.restart()
        reason = None
        try:
            while position.step < t.train_steps and reason is None:
                result = train_step(self.session, fetch(self.session, batches), position.step + 1)
                position.step += 1
                position.consumed_tokens += tokens_per_step(self.run)
                self.recorder.stepped()
                self.monitor.tick()
                reason = self._reason_to_stop()
                self._report(result, last=reason is not None or position.step == t.train_steps)
        finally:
            if batches is not None:
                batches.close()  # type: ignore[attr-defined]
        return reason

    def _batches(self) -> Iterator[Any] | None:
        """This rank's training micro-batches from the current step on; None if it reads none."""
        if not self.session.reads_data or self.position.step >= self.run.training.train_steps:
            return None
        return self.loaders.iterate("train", start_step=self.position.step)

    def _reason_to_stop(self) -> str | None:
        """Why the run ends after this step although it is not finished; the same on all ranks."""
        if self.position.step >= self.run.training.train_steps:
            return None
        if self.position.step == self.run.training.exit_at_step:
            return f"training.exit_at_step is {self.position.step}"
        code = self.session.guard.stop_code
        return None if code == NO_STOP else REASONS[code]

    def _report(self, result: StepResult, *, last: bool) -> None:
        """Evaluate and log, when due. Collective."""
        from dataclasses import replace

        from megatron_patch.training.evaluate import evaluate

        t, step = self.run.training, self.position.step
        finished = step == t.train_steps
        due = finished or (t.eval_interval is not None and step % t.eval_interval == 0)
        evaluates = due and self.loaders.has("valid")
        if not (step % self.run.logging.interval == 0 or last or evaluates):
            return
        metrics = self.recorder.record(step, result, self.position.consumed_tokens)
        if evaluates:
            with self.recorder.away():
                metrics = replace(metrics, eval_loss=evaluate(self.session, self.loaders))
        self.monitor.log(metrics)

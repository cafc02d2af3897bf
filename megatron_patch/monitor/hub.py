"""The Monitor: one place that receives records and messages and hands them to every sink.

Only the rank that writes (rank 0) has a Monitor with sinks; the others hold one that does nothing,
so calling code needs no rank tests.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from megatron_patch.monitor.metrics import StepMetrics, console_line
from megatron_patch.monitor.sinks import CsvSink, Sink, WandbSink, require_wandb
from megatron_patch.runtime.records import AppendOnlyFile, BestEffort
from megatron_patch.schema.run import RunConfig

RATE_RECORDS = 20  # records the time left is estimated from


class Monitor:
    """Console, log file and sinks of one process.

    Args:
        run: configuration.
        run_dir: directory of the run; created when missing.
        active: False makes every call a no-op (ranks that do not write).
        stream: where console lines go; default: standard output.
    """

    def __init__(
        self, run: RunConfig, run_dir: Path, *, active: bool = True, stream: TextIO | None = None
    ) -> None:
        self.run, self.run_dir, self.active = run, run_dir, active
        self._stream = stream or sys.stdout
        self._sinks: list[Sink] = []
        self._bar: Any = None
        self._settings: dict[str, Any] | None = None
        self._rates: deque[float] = deque(maxlen=RATE_RECORDS)
        self._file: AppendOnlyFile | None = None
        self._console = BestEffort("the console", report=lambda line: self.say(f"warning: {line}"))
        self._relay: _Relay | None = None
        if active:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = AppendOnlyFile(
                run_dir / "train.log", report=lambda line: self.say(f"warning: {line}")
            )

    def relay_logs(self) -> None:
        """Show what this program's modules log (saves, resumes, warnings) here, until ``close``."""
        if self.active:
            self._relay = _Relay(self)

    def check(self) -> None:
        """Fail now, not after the model is built, when a sink cannot work.

        Raises MissingPackageError: a configured sink's package is not installed.
        """
        if self.active and self.run.logging.wandb.enabled:
            require_wandb()

    def start(
        self, start_step: int, *, has_saved: bool = False, settings: dict[str, Any] | None = None
    ) -> None:
        """Open the sinks for the steps after ``start_step``: a new attempt in every file.

        Args:
            start_step: steps done.
            has_saved: whether the run has checkpoints of its own; without them a table that ends
                before ``start_step`` is another run's beginning, and no gap.
            settings: of the run, for Weights & Biases.
        """
        self._settings = settings
        if not self.active:
            return
        logging = self.run.logging
        table = CsvSink(self.run_dir / "metrics.csv")
        for line in table.messages(start_step, interval=logging.interval, own=has_saved):
            self.say(line)
        self._sinks.append(table)
        if logging.tensorboard:
            from megatron_patch.monitor.events import TensorBoardSink

            self._sinks.append(TensorBoardSink(self.run_dir / "tensorboard", start_step=start_step))
        if logging.wandb.enabled:
            self._open_wandb(start_step)
        self._open_bar(start_step)

    def _open_wandb(self, start_step: int) -> None:
        """At step 0 what is wrong is raised: most likely a key or a name. Later on its server may
        be away, and a run of weeks must not wait for it at a restart or a rewind."""
        try:
            settings, name = self._settings or {}, self.run.name
            sink = WandbSink(self.run.logging.wandb, self.run_dir, name=name, settings=settings)
        except Exception as error:  # its own kinds, which are no OSError
            if start_step == 0:
                raise
            self.say(
                f"warning: Weights & Biases cannot be opened ({type(error).__name__}: "
                f"{str(error)[:300]}); the run goes on without it until it is started again"
            )
        else:
            self._sinks.append(sink)

    def restart(self, start_step: int, *, has_saved: bool = False) -> None:
        """The run went back to ``start_step``: open the sinks again."""
        self._close_sinks()
        self.start(start_step, has_saved=has_saved, settings=self._settings)

    def _open_bar(self, start_step: int) -> None:
        wanted = self.run.logging.progress
        if wanted == "off" or (wanted == "auto" and not self._stream.isatty()):
            return
        from tqdm import tqdm

        self._bar = tqdm(
            total=self.run.training.train_steps,
            initial=start_step,
            file=self._stream,
            unit="step",
            dynamic_ncols=True,
            leave=False,
        )

    def say(self, message: str) -> None:
        """A line for people: console and train.log."""
        if not self.active:
            return
        self._show(message)
        self.note(message)

    def _show(self, message: str) -> None:
        """A line for the console alone; it may be a file, on a disk that is full."""
        bar, stream = self._bar, self._stream
        if bar is not None:
            self._console.attempt(lambda: bar.write(message, file=stream))
        else:
            self._console.attempt(lambda: print(message, file=stream, flush=True))

    def note(self, message: str) -> None:
        """A line for train.log alone (what the console shows by another way)."""
        if self._file is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            lines = [f"{stamp} {line}\n" for line in message.splitlines() or [""]]
            self._file.append("".join(lines).encode(errors="backslashreplace"))

    def tick(self) -> None:
        """One step was dispatched: move the progress bar, touch nothing on the device."""
        bar = self._bar
        if bar is not None:
            self._console.attempt(lambda: bar.update(1), records=0)

    def log(self, metrics: StepMetrics) -> None:
        """Hand a record to the console, the log file and every sink."""
        if not self.active:
            return
        if metrics.step_seconds:
            self._rates.append(metrics.step_seconds)
        total = self.run.training.train_steps
        left = None
        if self._rates:
            left = (total - metrics.step) * statistics.median(self._rates)
        self.say(console_line(metrics, train_steps=total, seconds_left=left))
        for sink in self._sinks:
            sink.log(metrics)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Further numbers of a step, by full name, for the sinks that draw curves."""
        for sink in self._sinks:
            sink.scalars(step, values)

    def close(self) -> None:
        """Close bar, sinks and log file; safe to call twice."""
        self._close_sinks()  # before the relay goes: they tell what is missing in their files
        if self._relay is not None:
            self._relay.detach()
            self._relay = None
        self._console.close()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _close_sinks(self) -> None:
        if self._bar is not None:
            self._console.attempt(self._bar.close, records=0)
            self._bar = None
        for sink in self._sinks:
            sink.close()
        self._sinks = []


class _Relay(logging.Handler):
    """Hands the records of the package's loggers to a Monitor, until it is detached."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(logging.INFO)
        self._monitor = monitor
        self._logger = logging.getLogger("megatron_patch")
        self._before = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        self._monitor.say(prefix + record.getMessage())

    def detach(self) -> None:
        self._logger.removeHandler(self)
        self._logger.level, self._logger.propagate = self._before

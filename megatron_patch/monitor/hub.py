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
from typing import TYPE_CHECKING, Any, TextIO

from megatron_patch.monitor.metrics import StepMetrics, console_line
from megatron_patch.monitor.sinks import CsvSink, Sink, TensorBoardSink, WandbSink, require_wandb

if TYPE_CHECKING:
    from megatron_patch.config.root import RunConfig

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
        self._file: TextIO | None = None
        self._relay: _Relay | None = None
        if active:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (run_dir / "train.log").open("a", buffering=1)

    def relay_logs(self) -> None:
        """Show what this program's modules log (saves, resumes, warnings) here, until ``close``."""
        if self.active:
            self._relay = _Relay(self)
            self._relay.attach()

    def check(self) -> None:
        """Fail now, not after the model is built, when a sink cannot work.

        Raises:
            MissingPackageError: a configured sink's package is not installed.
        """
        if self.active and self.run.logging.wandb.enabled:
            require_wandb()

    def start(self, start_step: int, *, settings: dict[str, Any] | None = None) -> None:
        """Open the sinks. Rows of steps after ``start_step`` are taken over as abandoned."""
        self._settings = settings
        if not self.active:
            return
        logging = self.run.logging
        table = CsvSink(
            self.run_dir / "metrics.csv", start_step=start_step, interval=logging.interval
        )
        if table.abandoned:
            self.say(
                f"metrics.csv: {table.abandoned} rows beyond step {start_step} moved to "
                "metrics.abandoned.csv; those steps are about to be repeated"
            )
        if table.ends_early is not None:
            self.say(
                f"warning: metrics.csv ends at step {table.ends_early:,} and the run goes on after "
                f"step {start_step:,}: the rows in between are not there and will not come"
            )
        self._sinks.append(table)
        if logging.tensorboard:
            self._sinks.append(TensorBoardSink(self.run_dir / "tensorboard", start_step=start_step))
        if logging.wandb.enabled:
            self._sinks.append(
                WandbSink(logging.wandb, self.run_dir, name=self.run.name, settings=settings or {})
            )
        self._open_bar(start_step)

    def restart(self, start_step: int) -> None:
        """The run went back to ``start_step``: open the sinks again; later rows are abandoned."""
        self._close_sinks()
        self.start(start_step, settings=self._settings)

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
        if self._bar is not None:
            self._bar.write(message, file=self._stream)
        else:
            print(message, file=self._stream, flush=True)
        self.note(message)

    def note(self, message: str) -> None:
        """A line for train.log alone (what the console shows by another way)."""
        if self._file is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            for line in message.splitlines() or [""]:
                self._file.write(f"{stamp} {line}\n")

    def tick(self) -> None:
        """One step was dispatched: move the progress bar, touch nothing on the device."""
        if self._bar is not None:
            self._bar.update(1)

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
        if self._relay is not None:
            self._relay.detach()
            self._relay = None
        self._close_sinks()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _close_sinks(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for sink in self._sinks:
            sink.close()
        self._sinks = []


class _Relay(logging.Handler):
    """Hands the records of the package's loggers to a Monitor."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(logging.INFO)
        self._monitor = monitor
        self._logger = logging.getLogger("megatron_patch")
        self._before = self._logger.level, self._logger.propagate

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        self._monitor.say(prefix + record.getMessage())

    def attach(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False

    def detach(self) -> None:
        self._logger.removeHandler(self)
        self._logger.level, self._logger.propagate = self._before

"""Where records go: metrics.csv, Weights & Biases; TensorBoard is in `events`."""

from __future__ import annotations

import importlib.util
import uuid
from pathlib import Path
from typing import Any, Protocol

from megatron_patch.monitor.metrics import CSV_COLUMNS, StepMetrics
from megatron_patch.runtime.files import write_whole
from megatron_patch.runtime.records import BestEffort, StepCsv, gap, read_rows
from megatron_patch.schema.logging import WandbConfig


class Sink(Protocol):
    """A receiver of records."""

    def log(self, metrics: StepMetrics) -> None:
        """Take one record."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Take further numbers of a step, named in full."""

    def close(self) -> None:
        """Flush and release; no record follows."""


class MissingPackageError(ValueError):
    """A sink was asked for whose package is not installed."""


def require_wandb() -> None:
    """Fail when Weights & Biases is wanted but absent.

    Raises MissingPackageError: ``wandb`` is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise MissingPackageError(
            "logging.wandb.enabled is true but the package wandb is not installed: install the "
            "extra (pip install 'megatron-patch-stable[wandb]') or set logging.wandb.enabled: false"
        )


class CsvSink:
    """``metrics.csv``: one row a record, written at once, continued by every attempt.

    Rows of steps that are about to be repeated stay; see `megatron_patch.runtime.records`.
    """

    def __init__(self, path: Path) -> None:
        self.table = StepCsv(path, [name for name in CSV_COLUMNS if name != "step"])

    def messages(self, start_step: int, *, interval: int, own: bool) -> list[str]:
        """What is to be logged of the file as it was found; arguments as `records.gap` has them."""
        table, name = self.table, self.table.path.name
        found = []
        if later := sum(step > start_step for step in table.steps):
            found.append(
                f"{name}: {later} rows beyond step {start_step:,} stay; those steps are about to "
                f"be repeated, as attempt {table.attempt}"
            )
        if added := [column for column in table.added if column != "attempt"]:
            text = f"{name} gets the columns {', '.join(added)}, empty up to step {start_step:,}"
            if table.unknown:
                names = ", ".join(table.unknown)
                text = f"warning: {text}; this version does not know {names}: kept, and empty from "
                text += "here on"
            found.append(text)
        if table.begun and (line := gap(name, table.steps, start_step, apart=interval, own=own)):
            found.append(line)
        if table.zeros_after is not None:
            found.append(
                f"warning: {name} is damaged: it holds zero bytes after step "
                f"{table.zeros_after:,}, and the rows that were there are lost"
            )
        return found

    def log(self, metrics: StepMetrics) -> None:
        row = metrics.csv_row()
        if metrics.loss is None:  # an evaluation alone: the row that this one replaces has the step
            rows = read_rows(self.table.path)
            before = next((r for r in rows if r["step"] == row["step"]), {})
            row |= {name: before.get(name, "") for name, value in row.items() if not value}
        self.table.append_rows(row)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """They have files of their own."""

    def close(self) -> None:
        self.table.close()


class WandbSink:
    """Weights & Biases; the run id is kept in the run directory, so a resumed run continues it.

    Raises MissingPackageError: ``wandb`` is not installed.
    """

    def __init__(
        self, config: WandbConfig, run_dir: Path, *, name: str, settings: dict[str, Any]
    ) -> None:
        require_wandb()
        import wandb

        id_file = run_dir / "wandb_id"
        run_id = id_file.read_text().strip("\0 \n") if id_file.exists() else ""
        if not run_id:  # what a crash may leave of a file that was not written whole
            run_id = uuid.uuid4().hex
            write_whole(id_file, run_id + "\n")
        self._best_effort = BestEffort("the record of Weights & Biases")
        self._known: set[str] = set()
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=settings,
        )

    def log(self, metrics: StepMetrics) -> None:
        self._send(metrics.scalars() | {"step": metrics.step})

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._send(values | {"stability/step": step})

    def _send(self, row: dict[str, float]) -> None:
        """One row. W&B counts them itself, and drops one that comes with a lower count: whatever
        is repeated after a crash or a rewind. So steps travel as numbers, and are the axes."""

        def work() -> None:
            for name in sorted(row.keys() - self._known):
                axis = "stability/step" if name.startswith("stability/") else "step"
                self._run.define_metric(name, step_metric=None if name == axis else axis)
                self._known.add(name)
            self._run.log(row)

        self._best_effort.attempt(work)

    def close(self) -> None:
        self._best_effort.attempt(self._run.finish)
        self._best_effort.close()

"""Where records go: metrics.csv, Weights & Biases; TensorBoard is in `events`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_patch.monitor.metrics import CSV_COLUMNS, StepMetrics
from megatron_patch.runtime.appending import Spared, Table
from megatron_patch.runtime.growing import lacks_after, zeros_after

if TYPE_CHECKING:
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

    Raises:
        MissingPackageError: ``wandb`` is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise MissingPackageError(
            "logging.wandb.enabled is true but the package wandb is not installed: install the "
            "extra (pip install 'megatron-patch-stable[wandb]') or set logging.wandb.enabled: false"
        )


class CsvSink:
    """``metrics.csv``: one row a record, written at once, continued by a resumed run.

    Rows of steps that a resumed run is about to repeat are moved to ``metrics.abandoned.csv``, so
    the file always tells one story and nothing that was measured is lost.
    """

    def __init__(self, path: Path, *, start_step: int, interval: int = 1) -> None:
        self.path = path
        new = not path.exists()
        aside = path.with_name("metrics.abandoned.csv")
        self._table = Table(path, CSV_COLUMNS, start_step=start_step, aside=aside)
        self.abandoned = self._table.dropped
        self.new_columns = self._table.note(path.name)
        """What to tell of a table of another version."""
        self.ends_early: int | None = None
        """Step of the last row (0: none), where those up to ``start_step`` are not all there."""
        self.zeros_after: int | None = None
        if self._table.begun:
            self.ends_early = lacks_after(path, start_step, apart=interval)
            self.zeros_after = None if new else zeros_after(path)

    def log(self, metrics: StepMetrics) -> None:
        row = metrics.csv_row()
        self._table.rows([[row[name] for name in CSV_COLUMNS]])

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """They have files of their own."""

    def close(self) -> None:
        self._table.close()


class WandbSink:
    """Weights & Biases; the run id is kept in the run directory, so a resumed run continues it.

    Raises:
        MissingPackageError: ``wandb`` is not installed.
    """

    def __init__(
        self, config: WandbConfig, run_dir: Path, *, name: str, settings: dict[str, Any]
    ) -> None:
        require_wandb()
        import wandb

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(wandb.util.generate_id() + "\n")
        self._spared = Spared("the record of Weights & Biases")
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            name=name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(run_dir),
            config=settings,
        )

    def log(self, metrics: StepMetrics) -> None:
        self._spared.attempt(lambda: self._run.log(metrics.scalars(), step=metrics.step))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        # W&B refuses steps that lie behind: the record's own step travels as a number.
        self._spared.attempt(lambda: self._run.log(values | {"stability/step": step}))

    def close(self) -> None:
        self._spared.attempt(self._run.finish)
        self._spared.close()

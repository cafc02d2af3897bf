"""Loss, gradient norm and throughput of one or several runs, drawn from their metrics.csv."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.runtime.records import read_rows

PANELS = (
    ("loss", "loss (nats/token)"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_s", "tokens/s"),
)


class PlotError(ValueError):
    """A run has nothing that could be drawn, or the picture cannot be written."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Columns of one metrics.csv; None where a cell is empty or unreadable."""

    name: str
    columns: dict[str, list[float | None]]

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """(steps, values) of the rows in which ``column`` is a finite number."""
        steps, values = self.columns["step"], self.columns.get(column, [])
        pairs = [
            (s, v)
            for s, v in zip(steps, values, strict=False)
            if s is not None and v is not None and math.isfinite(v)
        ]
        return [s for s, _ in pairs], [v for _, v in pairs]

    def restarts(self) -> list[float]:
        """Steps at which a new process took over: where its elapsed time starts again."""
        found, last = [], None
        for step, elapsed in zip(
            self.columns["step"], self.columns.get("elapsed_seconds", []), strict=False
        ):
            if step is None or elapsed is None:
                continue
            if last is not None and elapsed < last:
                found.append(step)
            last = elapsed
        return found


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text not in (None, "") else None
    except ValueError:
        return None


def read_curves(run_dir: Path) -> Curves:
    """Read ``<run_dir>/metrics.csv`` (a path to the file itself works too).

    Raises:
        PlotError: no such file, or not one complete row in it.
    """
    path = run_dir if run_dir.suffix == ".csv" else run_dir / "metrics.csv"
    if not path.is_file():
        raise PlotError(f"no metrics.csv in {run_dir}: give the directory of a run")
    rows = read_rows(path)
    if not rows:
        raise PlotError(
            f"{path} has no rows with a step: give the metrics.csv of a run, which writes one "
            "every logging.interval steps"
        )
    names = [name for name in rows[0] if name not in ("attempt", "extra")]
    columns = {name: [_number(row.get(name)) for row in rows] for name in names}
    return Curves(path.resolve().parent.name, columns)


def _draw(axis: Any, curves: Curves, column: str, *, color: str, label: str) -> None:
    steps, values = curves.points(column)
    marker = "o" if len(steps) < 3 else None  # a line needs two points to be seen
    axis.plot(steps, values, color=color, linewidth=1.2, marker=marker, label=label)
    if column == "loss":
        at, evaluated = curves.points("eval_loss")
        if at:
            axis.plot(
                at, evaluated, linestyle="--", marker="s", markersize=4, color=color, alpha=0.8,
                label=f"{label} (validation)",
            )  # fmt: skip
    for step in curves.restarts():
        axis.axvline(step, color=color, linestyle=":", linewidth=0.8, alpha=0.6)


def plot_runs(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Draw the runs, overlaid, into one PNG; dotted verticals mark resumed segments.

    Args:
        run_dirs: run directories (or metrics.csv files), at least one.
        out: path of the PNG; its directory is created.

    Returns:
        The path written.

    Raises:
        PlotError: no run given, one of them has nothing to draw, or ``out`` cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not run_dirs:
        raise PlotError("no run directory given")
    runs = [read_curves(Path(d)) for d in run_dirs]
    names = _labels(runs, run_dirs)
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(9, 9), sharex=True)
    for index, (curves, name) in enumerate(zip(runs, names, strict=True)):
        for axis, (column, _) in zip(axes, PANELS, strict=True):
            _draw(axis, curves, column, color=f"C{index % 10}", label=name)
    for axis, (_, title) in zip(axes, PANELS, strict=True):
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    try:
        return _save(figure, Path(out))
    finally:
        plt.close(figure)


def _save(figure: Any, target: Path) -> Path:
    if target.is_dir():  # matplotlib would write a file beside it
        raise PlotError(f"{target}: is a directory; name a PNG file, e.g. {target / 'runs.png'}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture's
        reason = getattr(error, "strerror", None) or str(error)
        raise PlotError(
            f"{target}: cannot be written ({reason}); name a PNG file in a directory that you can "
            "write, with --out"
        ) from None
    return target


def _labels(runs: list[Curves], run_dirs: Sequence[str | Path]) -> list[str]:
    """Directory names, or whole paths where two runs share a name."""
    names = [r.name for r in runs]
    return [n if names.count(n) == 1 else str(d) for n, d in zip(names, run_dirs, strict=True)]

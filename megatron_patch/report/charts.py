"""Line charts and heat maps as PNG, drawn by matplotlib: data URIs for the page, or a file."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_patch.report.collect import ReportError, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
SMALL = 8
"""Points: the size of text in charts."""
LARGEST = 1e100
"""Values beyond it are left out: no float32 is, and distances between such values overflow."""
PANELS = (
    ("loss", "loss (nats/token)"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_s", "tokens/s"),
)


class Series(NamedTuple):
    """One line over steps, or dots. Values that are not finite interrupt a line."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with what it shows in words."""

    title: str
    words: str
    """The alternative text, or why there is no picture."""
    image: str = ""
    """A data URI; empty where nothing could be drawn."""


def number(x: float) -> str:
    """A value in few characters."""
    if not math.isfinite(x) or x == 0:
        return f"{x:g}"
    if abs(x) >= 1e7 or abs(x) < 1e-3:
        return f"{x:.1e}"
    return f"{x:,.4g}" if abs(x) < 1000 else f"{x:,.0f}"


def line_chart(series: Sequence[Series], *, title: str, unit: str, log: bool = False) -> Chart:
    """A chart over steps; on a logarithmic scale values that are not positive are left out."""
    drawable = [s._replace(values=_drawable(s.values, log)) for s in series]
    found = np.concatenate([s.values for s in drawable])
    found = found[np.isfinite(found)]
    if not found.size:
        return Chart(title, "nothing was recorded")
    figure, axes = _figure(6.6, 1.6, left=0.85, right=0.15, top=0.25, bottom=0.45)
    for i, s in enumerate(drawable):
        _line(axes, s, color=f"C{i}")
    axes.grid(alpha=0.3)
    axes.set_xlabel("step", fontsize=SMALL)
    axes.set_ylabel(unit, fontsize=SMALL)
    if log and found.max() > 10 * found.min():  # less than a decade has no labelled tick
        form = axes.yaxis.get_major_formatter()
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(form)
        axes.yaxis.set_minor_formatter(lambda x, _: "")
    if len(series) > 1:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1, 0.97), ncols=4, fontsize=SMALL, frameon=False
        )
    return Chart(title, "; ".join(map(_words, drawable)), _uri(figure))


def heat_map(
    values: np.ndarray, *, title: str, log: bool = False, steps: Sequence[int] | None = None
) -> Chart:
    """A colored cell a value of [layers, heads], gray where nothing was measured.

    With ``steps`` values are [layers, steps].
    """
    from matplotlib.colors import LogNorm, Normalize

    shown = np.ma.masked_invalid(np.where((values > 0) | (not log), values, math.nan))
    if not shown.count():
        return Chart(title, "nothing was measured")
    rows, count = values.shape
    low, high = float(shown.min()), float(shown.max())
    # A scale needs two ends.
    ends = (low, high) if low < high else (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    width, height = max(1.6, min(0.24 * count, 6.0)), max(1.0, min(0.18 * rows, 4.2))
    figure, axes = _figure(width, height, left=0.55, right=1.05, top=0.1, bottom=0.45)
    picture = axes.imshow(
        shown, cmap="viridis", norm=(LogNorm if log else Normalize)(*ends), aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axes.set_facecolor("#d0d0d0")
    axes.set_ylabel("layer", fontsize=SMALL)
    axes.set_xlabel("head" if steps is None else "step", fontsize=SMALL)
    axes.set_yticks(range(0, rows, math.ceil(rows / 9)))
    places = range(0, count, math.ceil(count / (2 + 3 * width if steps is None else 8)))
    axes.set_xticks(places, [str(i) if steps is None else f"{steps[i]:,}" for i in places])
    bar = axes.inset_axes((1 + 0.1 / width, 0, 0.12 / width, 1))
    ticks = {low, math.sqrt(low * high) if log else (low + high) / 2, high}
    figure.colorbar(picture, cax=bar, ticks=sorted(ticks), format=lambda x, _: number(x))
    bar.minorticks_off()
    bar.tick_params(labelsize=SMALL)
    row, column = divmod(int(shown.argmax()), count)
    at = f"head {column}" if steps is None else f"step {steps[column]:,}"
    words = f"{rows} x {count} values from {number(low)} to {number(high)}; the largest is at "
    return Chart(title, f"{words}layer {row}, {at}", _uri(figure))


def draw_png(runs: Sequence[Path], out: Path) -> None:
    """Draw loss, gradient norm and tokens/s of run directories or metrics.csv files, overlaid.

    Dotted verticals mark restarts. The directory of ``out`` is made.

    Raises ReportError: one of the runs has nothing to draw, or ``out`` cannot be written.
    """
    from matplotlib.figure import Figure

    wrong = "is a directory" if out.is_dir() else "" if out.suffix else "has no ending"
    if wrong:  # matplotlib would write a file beside it
        name = out / "runs.png" if out.is_dir() else f"{out}.png"
        raise ReportError(f"{out}: {wrong}; name a PNG file, e.g. {name}")
    tables = [_table(run) for run in runs]
    names = [(run if run.is_dir() else run.parent).resolve().name for run in runs]
    names = [n if names.count(n) == 1 else str(r) for n, r in zip(names, runs, strict=True)]
    figure = Figure(figsize=(9, 9), layout="tight")
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (column, title) in zip(panels, PANELS, strict=True):
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        for i, (table, name) in enumerate(zip(tables, names, strict=True)):
            missing = [math.nan] * len(table["step"])
            series = [Series(name, table["step"], table.get(column, missing))]
            if column == "loss" and any(map(math.isfinite, table.get("eval_loss", ()))):
                label = f"{name} (validation)"
                series.append(Series(label, table["step"], table["eval_loss"], dots=True))
            for s in series:
                _line(axes, s._replace(values=_drawable(s.values)), color=f"C{i % 10}")
            for step in restarts(table):
                axes.axvline(step, color=f"C{i % 10}", linestyle=":", linewidth=0.8, alpha=0.6)
    panels[-1].set_xlabel("step")
    for text in panels[0].legend(fontsize="small").get_texts():
        text.set_parse_math(False)  # a name may hold dollar signs
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=DPI)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture's
        reason = getattr(error, "strerror", None) or str(error)
        text = f"{out}: cannot be written ({reason}); name a PNG file where you can write"
        raise ReportError(text) from None


def restarts(table: dict[str, list[float]]) -> list[float]:
    """Steps at which a new process took over: where the elapsed time of an attempt begins anew."""
    elapsed = table.get("elapsed_seconds", [])
    known = [(s, e) for s, e in zip(table["step"], elapsed, strict=False) if e == e]
    return [s for (_, before), (s, e) in pairwise(known) if e < before]


def _table(run: Path) -> dict[str, list[float]]:
    path = run if run.suffix == ".csv" else run / "metrics.csv"
    if not path.is_file():
        raise ReportError(f"no metrics.csv in {run}: give the directory of a run")
    table = read_metrics(path)
    if not table:
        raise ReportError(f"{path} has no row with a step: give the metrics.csv of a run")
    return table


def _figure(
    width: float, height: float, *, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """A figure of one chart, ``width`` x ``height`` inches inside of margins."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    w, h = width + left + right, height + top + bottom
    figure = Figure(figsize=(w, h))
    axes = figure.add_axes((left / w, bottom / h, width / w, height / h))
    axes.tick_params(labelsize=SMALL)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda x, _: number(x))
    return figure, axes


def _line(axes: Axes, series: Series, *, color: str) -> None:
    steps, values = np.asarray(series.steps), np.asarray(series.values)
    if not series.dots:
        axes.plot(steps, values, color=color, linewidth=1.1, label=series.label)
        # A value between two that are missing is in no line.
        missing = ~np.isfinite(np.concatenate([[math.nan], values, [math.nan]]))
        steps, values = (x[missing[:-2] & missing[2:]] for x in (steps, values))
    label, size = (series.label, 5) if series.dots else (None, 2.5)
    axes.plot(steps, values, "o", markersize=size, color=color, label=label, markeredgecolor="w")


def _drawable(values: Sequence[float], log: bool = False) -> list[float]:
    return [v if abs(v) < LARGEST and (v > 0 or not log) else math.nan for v in values]


def _words(series: Series) -> str:
    """The line in words."""
    known = [(v, s) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    if not known:
        return f"{series.label}: no finite value"
    ends = (("", known[0]), ("lowest ", min(known)), ("highest ", max(known)), ("last ", known[-1]))
    values = ", ".join(f"{what}{number(v)} at step {s:,.0f}" for what, (v, s) in ends)
    return f"{series.label}: {values}"


def _uri(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()

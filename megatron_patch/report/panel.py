"""The stability panel: attention telemetry as heat maps over layers and heads, and in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_patch.report import changes, legend
from megatron_patch.report.charts import Grid, Series, heat_map, line_chart, number
from megatron_patch.report.markup import Child, Markup, table, tag

if TYPE_CHECKING:
    from megatron_patch.stability.record import Telemetry

# (metric or derived name, title, logarithmic). Derived ones are made in `_metric`.
MAPS = (
    ("max_logit", "Largest attention logit", False),
    ("common_logit", "Part of the logits that all keys share", False),
    ("common_share", "How much of the largest logit all keys share", False),
    ("coherence", "Coherence of the delta error: 1 = all rows of a head err alike", False),
    ("error_to_signal", "Error of the delta in use over the signal it disturbs", True),
    ("bias_to_signal", "The coherent part of that error over the same signal", True),
    ("delta_error_rms", "RMS error of delta that a 16-bit O makes, over RMS(delta)", True),
    ("growth_noise", "Growth of the logits: error of the delta in use over the gradient", True),
    ("kappa", "kappa: how much a relative error of delta is amplified", True),
    ("entropy", "Entropy of attention (nats)", False),
    ("first_token_mass", "Attention on the first token", False),
    ("wq_norm", "Spectral norm of W_Q", False),
    ("wk_norm", "Spectral norm of W_K", False),
)
AT_WARNING = (
    "max_logit",
    "common_share",
    "coherence",
    "error_to_signal",
    "growth_noise",
    "kappa",
    "entropy",
    "wq_norm",
    "wk_norm",
)
"""Maps of the first danger too: what tells one head from the others. Not all of `MAPS`, because a
map of a large model is half a megabyte."""
LINES = (
    ("max_logit", "Largest attention logit of any head", "logit", False),
    ("common_logit", "Largest part of the logits that all keys share, of any head", "logit", False),
    ("error_to_signal", "Largest error of delta over its signal of any head", "ratio", True),
    ("growth_noise", "Largest noise in the growth of the logits of any head", "ratio", True),
    ("bias_to_signal", "Largest coherent error over signal of any head", "ratio", True),
    ("coherence", "Largest coherence of any head", "coherence", False),
    ("first_token_mass", "Largest attention on the first token of any head", "mass", False),
    ("wq_norm", "Largest spectral norm of W_Q of any head", "norm", False),
)
SPREAD = 100.0
"""Largest over smallest value of a curve, from which it is drawn logarithmically: an explosion
would leave nothing to see of the thousands of steps before it."""
TIME_COLUMNS = 60
TABLE_ROWS = 12


def build(telemetry: Telemetry) -> list[Child]:
    """The section's content."""
    steps = [int(s) for s in telemetry.steps]
    last = len(steps) - 1
    warned = _first_warned(telemetry)
    parts: list[Child] = [
        tag(
            "p",
            f"{len(steps)} records from step {steps[0]:,} to {steps[-1]:,}, one every "
            f"{telemetry.meta.get('interval', '?')} steps.",
        ),
        changes.build(telemetry),
        legend.build(telemetry.rule, _drawn(telemetry)),
    ]
    for name, title, unit, log in LINES:
        worst = [_worst(_metric(telemetry, name, i)) for i in range(len(steps))]
        series = Series(name, steps, worst)
        log = log or _spreads(worst)
        parts.append(line_chart(f"t-{name}", [series], title=title, unit=unit, log=log))
    grown = _growth(telemetry)
    if any(math.isfinite(value) for value in grown):
        title = "Growth of the fastest head's W_Q or W_K over the median head's (the early warning)"
        series = Series("head_growth", steps, grown)
        parts.append(line_chart("t-head_growth", [series], title=title, unit="ratio", log=False))
    parts.append(_layers_in_time(telemetry, steps))
    if warned is not None and warned[0] != last:
        index, level = warned
        heading = f"Heads at the first {level}, step {steps[index]:,}"
        parts += [tag("h3", heading), _maps(telemetry, index, AT_WARNING, prefix="w")]
    parts.append(tag("h3", f"Heads in the last record, step {steps[last]:,}"))
    return [*parts, _maps(telemetry, last, tuple(name for name, _, _ in MAPS), prefix="h")]


def _first_warned(telemetry: Telemetry) -> tuple[int, str] | None:
    """(record, level) of the first danger, or else of the first watch, if there was one.

    After an explosion all heads are saturated: which of them went first shows there alone.
    """
    levels = [verdict.level for _, verdict in telemetry.judged]
    found = (level for level in ("danger", "watch") if level in levels)
    return next(((levels.index(level), level) for level in found), None)


def _growth(telemetry: Telemetry) -> list[float]:
    """Head growth of every record; NaN where it was not measured."""
    return [point.growth.value for point, _ in telemetry.judged]


def _drawn(telemetry: Telemetry) -> set[str]:
    """Names of what the run has measured."""
    last = len(telemetry.records) - 1
    found = {name for name, _, _ in MAPS if _metric(telemetry, name, last) is not None}
    grown = any(math.isfinite(value) for value in _growth(telemetry))
    return found | {"head_growth"} if grown else found


def _maps(telemetry: Telemetry, index: int, names: Sequence[str], *, prefix: str) -> Markup:
    """Layer x head maps of one record; ``prefix`` of their ids."""
    step = int(telemetry.steps[index])
    maps = []
    for name, title, log in MAPS:
        values = _metric(telemetry, name, index) if name in names else None
        if values is not None:
            titled = f"{title}, step {step:,}"
            drawn = heat_map(f"{prefix}-{name}", _grid(values), title=titled, log=log)
            maps.append(tag("div", drawn, _figures(values)))
    return tag("div", maps, class_="maps")


def _metric(telemetry: Telemetry, name: str, index: int) -> np.ndarray | None:
    """[layers, heads] of one record; None where the run has no such metric."""
    from megatron_patch.stability import record

    heads = telemetry.heads
    needs = {
        "common_share": ("common_logit", "max_logit"),
        "coherence": ("delta_error_mean", "delta_error_rms"),
        "bias_to_signal": ("used_error_mean", "kappa"),
        "error_to_signal": ("used_error_rms", "kappa"),
    }
    if name in needs:
        a, b = needs[name]
        if a not in heads or b not in heads:
            return None
        return getattr(record, name)(heads[a][index], heads[b][index])
    return heads[name][index] if name in heads else None


def _spreads(values: list[float]) -> bool:
    """Whether a curve of positive values spans orders of magnitude."""
    finite = [v for v in values if math.isfinite(v)]
    return bool(finite) and min(finite) > 0 and max(finite) > SPREAD * min(finite)


def _worst(values: np.ndarray | None) -> float:
    if values is None:
        return math.nan
    finite = values[np.isfinite(values)]
    # By size: a part of the logits that all keys share runs away to either side.
    return float(finite[np.abs(finite).argmax()]) if finite.size else math.nan


def _grid(values: np.ndarray) -> Grid:
    layers, heads = values.shape
    return Grid(
        values=[[_or_none(v) for v in row] for row in values],
        row_name="layer",
        column_name="head",
        rows=[str(i) for i in range(layers)],
        columns=[str(i) for i in range(heads)],
    )


def _or_none(v: float) -> float | None:
    return float(v) if math.isfinite(v) else None


def _figures(values: np.ndarray) -> Markup:
    """The map in figures: the largest heads, and every layer's range."""
    places = [
        (float(values[i, j]), i, j)
        for i in range(values.shape[0])
        for j in range(values.shape[1])
        if math.isfinite(values[i, j])
    ]
    places.sort(reverse=True)
    top = table(
        ("layer, head", "value"),
        [(f"{i}, {j}", number(v)) for v, i, j in places[:TABLE_ROWS]],
        caption=f"Largest {min(TABLE_ROWS, len(places))} of {len(places)}",
    )
    rows = []
    for i, row in enumerate(values):
        finite = row[np.isfinite(row)]
        if finite.size:
            figures = (finite.min(), np.median(finite), finite.max())
            rows.append((str(i), *(number(float(v)) for v in figures)))
    layers = table(("layer", "smallest", "median", "largest"), rows, caption="By layer")
    return tag("details", tag("summary", "In figures"), top, layers)


def _layers_in_time(telemetry: Telemetry, steps: list[int]) -> Child:
    """Gradient norm of every layer over time."""
    norms = telemetry.layers.get("grad_norm")
    if norms is None:
        return None
    stride = max(1, math.ceil(len(steps) / TIME_COLUMNS))
    groups = [norms[i : i + stride] for i in range(0, len(steps), stride)]
    columns = [str(steps[min(i + stride, len(steps)) - 1]) for i in range(0, len(steps), stride)]
    # The largest of each group: a spike must not fall between two columns.
    worst = [[_worst(group[:, layer]) for group in groups] for layer in range(norms.shape[1])]
    grid = Grid(
        values=[[_or_none(v) for v in row] for row in worst],
        row_name="layer",
        column_name="step",
        rows=[str(i) for i in range(norms.shape[1])],
        columns=columns,
    )
    return heat_map("g-layers", grid, title="Gradient norm of each layer over time", log=True)

"""The page of a run: answers at the top, charts, changes of the early warning, head maps."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_patch.report.charts import Chart, Series, heat_map, line_chart, number
from megatron_patch.report.collect import ReportError, RunFacts, collect
from megatron_patch.runtime.files import write_named

if TYPE_CHECKING:
    import jinja2

    from megatron_patch.stability.record import Telemetry

WINDOW = 50
"""Steps whose mean is judged."""
RISE = 0.5
"""nats above the lowest loss before, from which a loss has risen."""
GOOD, FAIR, BAD, NONE = "good", "watch", "bad", "none"
# Guarded: in danger, and the same command would stop again.
_STATES = {"finished": GOOD, "running": GOOD, "stopped": FAIR, "interrupted": FAIR,
           "guarded": BAD, "failed": BAD, "non-finite": BAD}  # fmt: skip
CURVES = (
    ("loss", "Loss", "nats per token", False),
    ("grad_norm", "Gradient norm before clipping", "norm", True),
    ("lr", "Learning rate", "rate", False),
    ("tokens_per_s", "Throughput", "tokens/s", False),
)


class Metric(NamedTuple):
    """A figure of every head, measured or (in `_metric`) derived."""

    name: str
    title: str
    log: bool = False
    at_warning: bool = True
    """Whether its map is drawn at the first danger too: it tells one head from the others."""
    over_time: str = ""
    """What the largest value of any head over time is called; empty: it is not drawn."""
    unit: str = ""


METRICS = (
    Metric("max_logit", "Largest attention logit",
           over_time="Largest attention logit of any head", unit="logit"),
    Metric("common_logit", "Part of the logits that all keys share", at_warning=False,
           over_time="Largest part of the logits that all keys share, of any head", unit="logit"),
    Metric("common_share", "How much of the largest logit all keys share"),
    Metric("coherence", "Coherence of the delta error: 1 = all rows of a head err alike",
           over_time="Largest coherence of any head", unit="coherence"),
    Metric("error_to_signal", "Error of the delta in use over the signal it disturbs", log=True,
           over_time="Largest error of delta over its signal of any head", unit="ratio"),
    Metric("bias_to_signal", "The coherent part of that error over the same signal", log=True,
           at_warning=False, over_time="Largest coherent error over signal of any head",
           unit="ratio"),
    Metric("delta_error_rms", "RMS error of delta that a 16-bit O makes, over RMS(delta)",
           log=True, at_warning=False),
    Metric("growth_noise", "Growth of the logits: error of the delta in use over the gradient",
           log=True, over_time="Largest noise in the growth of the logits of any head",
           unit="ratio"),
    Metric("kappa", "kappa: how much a relative error of delta is amplified", log=True),
    Metric("entropy", "Entropy of attention (nats)"),
    Metric("first_token_mass", "Attention on the first token", at_warning=False,
           over_time="Largest attention on the first token of any head", unit="mass"),
    Metric("wq_norm", "Spectral norm of W_Q",
           over_time="Largest spectral norm of W_Q of any head", unit="norm"),
    Metric("wk_norm", "Spectral norm of W_K"),
)  # fmt: skip
SPREAD = 100.0
"""Largest over smallest value of a curve, from which it is drawn logarithmically: an explosion
would leave nothing to see of the thousands of steps before it."""
TIME_COLUMNS = 60
SHOWN_CHANGES = 6
"""Changes of the early warning that are shown of the beginning, and of the end, of a run."""
VERSIONS = (
    "utc", "commit", "megatron-patch-stable", "python", "torch", "triton", "megatron-core",
    "transformer-engine", "apex", "cuda", "cudnn", "nccl", "driver", "gpu", "world_size",
)  # fmt: skip
# Control characters that no HTML document may hold, even escaped.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")


class Answer(NamedTuple):
    """A question, a grade that color and word both show, and the answer."""

    question: str
    grade: str
    text: str


class Change(NamedTuple):
    """Where the early warning changed its verdict, or the numerics were exchanged."""

    step: str
    what: str
    """ok, watch, danger, switch, or empty for changes that are left out."""
    reason: str


class HeadMap(NamedTuple):
    """A layer x head map, with its largest heads and the range of every layer."""

    chart: Chart
    largest: list[tuple[str, str]]
    layers: list[tuple[str, ...]]
    measured: int


def write(run_dir: Path, out: Path) -> None:
    """Write the report of a run.

    Raises ReportError: ``run_dir`` is no run directory, or ``out`` cannot be written.
    """
    facts = collect(run_dir)  # first: where there is no run, there is no place for its report
    if out.is_dir():
        raise ReportError(f"{out}: is a directory; name an HTML file, e.g. {out / 'report.html'}")
    if not out.parent.is_dir():
        # A directory made for a mistyped path would hide the page where nobody looks for it.
        raise ReportError(
            f"{out}: there is no directory {out.parent}; make it first, or name an HTML file in a "
            "directory that is there, with --out"
        )
    text = render(facts)
    try:
        write_named(out, text)
    except OSError as error:
        raise ReportError(
            f"{out}: cannot be written ({error.strerror or error}); name an HTML file in a "
            "directory that you can write, with --out"
        ) from None


def environment() -> jinja2.Environment:
    """Templates in which whatever is printed is escaped, control characters visibly."""
    import jinja2

    def printable(value: object) -> object:
        if isinstance(value, str) and not hasattr(value, "__html__"):
            return _CONTROL.sub(lambda m: f"\\x{ord(m.group()):02x}", value)
        return value

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=printable,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(facts: RunFacts) -> str:
    """The page: one HTML file without script, without a request, for screen and paper."""
    return environment().get_template("report.html.j2").render(
        facts=facts,
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        answers=list(answers(facts)),
        curves=curves(facts),
        rows=_last_rows(facts),
        panel=None if facts.telemetry is None else stability_panel(facts.telemetry),
        versions=[n for n in VERSIONS if any(a.get(n) is not None for a in facts.attempts[-6:])],
        number=number,
    )  # fmt: skip


def answers(facts: RunFacts) -> Iterator[Answer]:
    yield Answer("State", _STATES[facts.state], facts.why)
    yield _loss(facts)
    evaluated = facts.finite("eval_loss")
    if len(evaluated) == 1:
        yield Answer("Validation loss", NONE, f"{evaluated[0]:.4f}, evaluated once")
    elif evaluated:
        grade = GOOD if evaluated[-1] <= min(evaluated) + RISE else BAD
        yield Answer("Validation loss", grade, f"{evaluated[-1]:.4f}, lowest {min(evaluated):.4f}")
    yield _gradients(facts)
    for name, question in (("nonfinite", "Steps not finite"), ("skipped", "Updates skipped")):
        values = facts.finite(name)
        if name == "nonfinite" and facts.state == "non-finite":
            # The step that ended the run is in no row.
            text = f"{max(values, default=0) + 1:.0f}, the last one ended the run: {facts.why}"
            yield Answer(question, BAD, text)
        elif values:
            yield Answer(question, GOOD if max(values) == 0 else BAD, f"{max(values):.0f}")
    yield _warning(facts)
    rates, mfu, memory = map(facts.finite, ("tokens_per_s", "mfu", "memory_gib"))
    if rates:
        text = f"median {statistics.median(rates):,.0f} tokens/s"
        text += f", MFU {100 * statistics.median(mfu):.1f} %" if mfu else ""
        text += f", up to {max(memory):.1f} GiB" if memory else ""
        yield Answer("Speed", GOOD, text)


def _windows(facts: RunFacts, name: str) -> list[tuple[float, float]]:
    """(last step, mean) of windows of ``WINDOW`` steps; NaN where a value in it is NaN."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for step, value in zip(facts.steps, facts.column(name), strict=True):
        groups.setdefault(int((step - 1) // WINDOW), []).append((step, value))
    return [
        (group[-1][0], sum(v for _, v in group) / len(group)) for _, group in sorted(groups.items())
    ]


def _loss(facts: RunFacts) -> Answer:
    found = _windows(facts, "loss")
    if facts.state == "non-finite":
        # The step that ended the run was never recorded: the rows before it say nothing of it.
        before = f"; {found[-1][1]:.4f} before" if found else ""
        return Answer("Loss", BAD, f"{facts.why}{before}")
    if not found:
        return Answer("Loss", NONE, "nothing was recorded yet")
    for step, value in zip(facts.steps, facts.column("loss"), strict=True):
        if not math.isfinite(value):
            return Answer("Loss", BAD, f"not finite at step {step:,.0f}")
    last, lowest, worst, at, rise = found[-1][1], math.inf, found[0][1], 0.0, 0.0
    for step, value in found:
        if value - lowest > rise:
            rise, at, worst = value - lowest, step, value
        lowest = min(lowest, value)
    if rise <= RISE:
        text = f"{last:.4f} at the end; never more than {rise:.2f} above its lowest"
        return Answer("Loss", GOOD, text)
    back = last <= lowest + RISE
    text = f"rose by {rise:.2f} above the lowest before it, to {worst:.2f} around step {at:,.0f}; "
    text += f"it came back, to {last:.4f}" if back else f"it ended at {last:.4f}"
    return Answer("Loss", FAIR if back else BAD, text)


def _gradients(facts: RunFacts) -> Answer:
    try:
        keys = ("optimizer.begin_step", "optimizer.warmup_steps")
        warmup = sum(float(facts.value(key, "0")) for key in keys)
    except ValueError:
        warmup = 0.0
    late = [w for w in _windows(facts, "grad_norm") if w[0] > warmup and math.isfinite(w[1])]
    if not late:
        return Answer("Gradient norm", NONE, "nothing was recorded after the warm-up")
    usual = statistics.median(v for _, v in late)
    step, largest = max(late, key=lambda w: w[1])
    grade = GOOD if largest < 5 * usual else FAIR if largest < 50 * usual else BAD
    text = f"median {number(usual)} after the warm-up, largest mean of {WINDOW} steps "
    return Answer("Gradient norm", grade, f"{text}{number(largest)} around step {step:,.0f}")


def _warning(facts: RunFacts) -> Answer:
    if facts.telemetry is None:
        return Answer("Early warning", NONE, facts.telemetry_problem)
    found = facts.telemetry.verdicts()
    step, last = found[-1]
    grade = (GOOD, FAIR, BAD)[last.code]
    text = f"{last.level} at step {step:,}: {last.reason}"
    first = next(((s, v) for s, v in found if v.level == "danger"), None)
    if first is not None:
        text += f"; first danger at step {first[0]:,}: {first[1].reason}"
        text += "; what to do: docs/stability.md, What to do"
        grade = BAD if last.code == 2 else FAIR
    if facts.telemetry.switched_at is not None:
        text += f"; the guard switched the stabilizer after step {facts.telemetry.switched_at:,}"
    return Answer("Early warning", grade, text)


def curves(facts: RunFacts) -> list[Chart]:
    """The charts of metrics.csv; none of a run without a row."""
    found = []
    for name, title, unit, log in CURVES if facts.steps else ():
        label = "training" if name == "loss" else name
        series = [Series(label, facts.steps, facts.column(name))]
        if name == "loss" and facts.finite("eval_loss"):
            series.append(Series("validation", facts.steps, facts.column("eval_loss"), dots=True))
        found.append(line_chart(series, title=title, unit=unit, log=log))
    return found


def _last_rows(facts: RunFacts) -> list[list[str]]:
    """Twenty rows of metrics.csv over the whole run, behind their names."""
    forms = {"step": ",.0f", "loss": ".4f", "grad_norm": ".4g", "lr": ".3g",
             "tokens_per_s": ",.0f", "eval_loss": ".4f"}  # fmt: skip
    picked = np.unique(np.linspace(0, len(facts.steps) - 1, 20).round().astype(int))
    columns = {name: facts.column(name) for name in forms}
    rows = [
        ["-" if math.isnan(columns[n][i]) else format(columns[n][i], f) for n, f in forms.items()]
        for i in (picked if facts.steps else ())
    ]
    return [list(forms), *rows]


def changes(telemetry: Telemetry) -> tuple[list[Change], int]:
    """The table of verdicts: beginning, end and what matters between; and how many there are."""
    found: list[tuple[int, str, str]] = []
    before = None
    for step, verdict in telemetry.verdicts():
        if verdict.level != before:
            found.append((step, verdict.level, verdict.reason))
            before = verdict.level
    found = sorted([*found, *_switches(telemetry)], key=lambda change: change[0])
    count = len(found)
    kept = {i for i in range(count) if i < SHOWN_CHANGES or i >= count - SHOWN_CHANGES}
    kept |= {i for i, c in enumerate(found) if c[1] == "switch"}
    kept |= set([i for i, c in enumerate(found) if c[1] == "danger"][:1])
    # A line that says that one line is left out would take the place of that line.
    kept |= {i for i in range(count) if {i - 1, i + 1} <= kept}
    rows: list[Change] = []
    left_out: list[int] = []
    for i, (step, what, reason) in enumerate(found):
        if i not in kept:
            left_out.append(step)
            continue
        if left_out:
            span = f"from step {left_out[0]:,} to step {left_out[-1]:,}"
            rows.append(Change("...", "", f"{len(left_out)} changes {span} are left out"))
            left_out = []
        rows.append(Change(f"{step:,}", what, reason))
    return rows, count


def _switches(telemetry: Telemetry) -> Iterator[tuple[int, str, str]]:
    """Where the numerics were exchanged, by the guard or at a resume: the rule starts anew there.

    Records tell of a switch from the one that made the guard decide it on.
    """
    from megatron_patch.stability.record import attention_at

    before = 0.0
    for value in telemetry.scalars.get("switched", ()):
        if value > 0 and value != before:
            reason = "the guard exchanged the numerics after this step; the rule starts anew"
            yield int(value), "switch", reason
        before = float(value)
    for until, name in telemetry.meta.get("earlier", ()):
        now = attention_at(telemetry.meta, int(until) + 1)
        reason = f"resumed with {now} in place of {name}; the rule starts anew"
        yield int(until), "switch", reason


def stability_panel(telemetry: Telemetry) -> dict[str, Any]:
    steps = [int(s) for s in telemetry.steps]
    last = len(steps) - 1
    charts = []
    for name, _, log, _, title, unit in METRICS:
        if title:
            worst = [_largest(_metric(telemetry, name, i)) for i in range(len(steps))]
            series = Series(name, steps, worst)
            log = log or spreads(worst)
            charts.append(line_chart([series], title=title, unit=unit, log=log))
    growth = [point.growth.value for point, _ in telemetry.judged]
    if any(map(math.isfinite, growth)):
        title = "Growth of the fastest head's W_Q or W_K over the median head's (the early warning)"
        charts.append(line_chart([Series("head_growth", steps, growth)], title=title, unit="ratio"))
    norms = telemetry.layers.get("grad_norm")
    if norms is not None:
        stride = math.ceil(len(steps) / TIME_COLUMNS)
        starts = range(0, len(steps), stride)
        ends = [steps[min(i + stride, len(steps)) - 1] for i in starts]
        # The largest of each group: a spike must not fall between two columns.
        grid = [[_largest(norms[i : i + stride, j]) for i in starts] for j in range(norms.shape[1])]
        title = "Gradient norm of each layer over time"
        charts.append(heat_map(np.array(grid), title=title, log=True, steps=ends))
    rows, count = changes(telemetry)
    drawn = {m.name for m in METRICS if _metric(telemetry, m.name, last) is not None}
    sections = [("the last record", steps[last], head_maps(telemetry, last))]
    warned = first_warned(telemetry)
    if warned is not None and warned[0] != last:
        index, level = warned
        maps = head_maps(telemetry, index, every=False)
        sections.insert(0, (f"the first {level}", steps[index], maps))
    return {
        "records": len(steps),
        "steps": (steps[0], steps[-1]),
        "interval": telemetry.meta.get("interval", "?"),
        "attention": telemetry.meta["attention"]
        .replace("/", ", ", 1)
        .replace("/", ", backward of "),
        "changes": rows,
        "count": count,
        "rule": telemetry.rule,
        "drawn": drawn | ({"head_growth"} if any(map(math.isfinite, growth)) else set()),
        "charts": charts,
        "sections": sections,
    }


def first_warned(telemetry: Telemetry) -> tuple[int, str] | None:
    """(record, level) of the first danger, or else of the first watch, if there was one.

    After an explosion all heads are saturated: which of them went first shows there alone.
    """
    levels = [verdict.level for _, verdict in telemetry.judged]
    found = (level for level in ("danger", "watch") if level in levels)
    return next(((levels.index(level), level) for level in found), None)


def head_maps(telemetry: Telemetry, index: int, *, every: bool = True) -> list[HeadMap]:
    """The maps of one record; without ``every`` those that tell one head from the others."""
    found = []
    for name, title, log, at_warning, *_ in METRICS:
        values = _metric(telemetry, name, index) if every or at_warning else None
        if values is None:
            continue
        chart = heat_map(values, title=f"{title}, step {int(telemetry.steps[index]):,}", log=log)
        places = [(float(v), f"{i}, {j}") for (i, j), v in np.ndenumerate(values) if np.isfinite(v)]
        places.sort(reverse=True)
        layers = []
        for i, row in enumerate(values):
            row = row[np.isfinite(row)]
            if row.size:
                ends = (row.min(), np.median(row), row.max())
                layers.append((str(i), *(number(float(v)) for v in ends)))
        largest = [(place, number(v)) for v, place in places[:12]]
        found.append(HeadMap(chart, largest, layers, len(places)))
    return found


def _metric(telemetry: Telemetry, name: str, index: int) -> np.ndarray | None:
    """[layers, heads] of one record; None where the run has no such metric."""
    from megatron_patch.stability import names

    needs = {
        "common_share": ("common_logit", "max_logit"),
        "coherence": ("delta_error_mean", "delta_error_rms"),
        "bias_to_signal": ("used_error_mean", "kappa"),
        "error_to_signal": ("used_error_rms", "kappa"),
    }.get(name, (name,))
    heads = telemetry.heads
    if any(n not in heads for n in needs):
        return None
    values = [heads[n][index] for n in needs]
    return getattr(names, name)(*values) if len(values) > 1 else values[0]


def spreads(values: Sequence[float]) -> bool:
    """Whether a curve of positive values spans orders of magnitude."""
    finite = [v for v in values if math.isfinite(v)]
    return bool(finite) and min(finite) > 0 and max(finite) > SPREAD * min(finite)


def _largest(values: np.ndarray | None) -> float:
    """By size: a part of the logits that all keys share runs away to either side."""
    finite = values[np.isfinite(values)] if values is not None else np.zeros(0)
    return float(finite[np.abs(finite).argmax()]) if finite.size else math.nan

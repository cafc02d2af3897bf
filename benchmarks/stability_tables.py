"""Tables of docs/ on stability: protocols, verdicts, heads, probes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import continued_table
import coverage_table
import drift_table
import loss_tables
import probe_tables
from table_text import (
    Tables,
    by_capture,
    captures_kept,
    kept_from,
    origin,
    run_origin,
    table,
    three_digits,
)

from megatron_patch.runtime.environment import short_commit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
PROTOCOLS = (
    "baselines",
    "baselines_bf16_residual",
    "attribution",
    "attribution_bf16_residual",
    "attribution_continued",
    "early",
    "rescue",
    "rescue_late",
    "rescue_paper",
    "scout",
)


def cells(_: dict[str, Any]) -> str:
    """The cells of every protocol, from configs/stability."""
    from megatron_patch.experiments.variants import VARIANTS

    rows = []
    for name in PROTOCOLS:
        protocol = _experiment(name).protocol
        if name == "rescue_paper":
            text = "the cells of `rescue`, the run to be saved computes the paper's emulation"
            rows.append([f"`{name}`", "all", "as there", text])
            continue
        if name.endswith("_bf16_residual"):
            text = f"the cells of `{name.removesuffix('_bf16_residual')}`, residual stream in BF16"
            rows.append([f"`{name}`", "all", "as there", text])
            continue
        for cell in protocol.cells:
            seeds = ", ".join(map(str, cell.seeds or protocol.seeds))
            plain = cell.variant == "plain"
            variant = "" if plain else f"; variant: {VARIANTS[cell.variant].meaning}"
            asks = f"{cell.asks}{variant}"
            if cell.from_cell is not None:
                asks += f"; continues `{cell.from_cell}`"
            rows.append([f"`{name}`, {protocol.steps:,} steps", f"`{cell.name}`", seeds, asks])
    lines = ["| protocol | cell | seeds | what it asks |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def verdicts(name: str) -> Callable[[dict[str, Any]], str]:
    """The verdict table of one protocol, with its plot if there is one."""

    def render(result: dict[str, Any]) -> str:
        from megatron_patch.experiments import results

        lines = [run_origin(result["environment"]), "", results.markdown(result).rstrip()]
        if made := made_for_baselines(name, result):
            text = "the same configuration from the same weights on the same batches:"
            lines += ["", f"Made for `{_baselines(name)}`, {text}", ""]
            lines += [results.verdict_table(made, result["explosion"])]
        plot = f"stability_{name}.png"
        if (ROOT / "docs" / "results" / plot).exists():
            lines += ["", f"![Loss and gradient norm of all runs](results/{plot})"]
        return "\n".join(lines)

    return render


def made_for_baselines(name: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of ``baselines`` that are what a cell of this protocol asks for, and was not made here.

    Of seeds of which something was made here, and with a fingerprint that one of them has: weights
    and batches, on one GPU model or another.
    """
    return [*controls(name, result).values()]


def controls(
    name: str, result: dict[str, Any], *, alone: bool = False
) -> dict[str, dict[str, Any]]:
    """`made_for_baselines`, by the run of this protocol that each of them is.

    With ``alone`` also of seeds of which nothing was made here that they could differ from.
    """
    path = ROOT / "docs" / "results" / f"stability_{_baselines(name)}.json"
    if name == _baselines(name) or not path.exists():
        return {}
    other = json.loads(path.read_text())
    made = {run["run"]: run for run in other["runs"] if run["steps"]}
    known = {_asked(run, _baselines(name)): run.id for run in _experiment(_baselines(name)).runs}
    begun = {run["run"] for run in result["runs"] if run["steps"]}
    found = {}
    for run in _experiment(name).runs:
        mine = {row.get("fingerprint") for row in result["runs"] if row["seed"] == run.seed}
        mine = {*mine, result["fingerprints"].get(str(run.seed))} - {None}
        if run.id in begun or run.base is not None or not (mine or alone):
            continue
        if same := made.get(known.get(_asked(run, name), "")):
            shared = other["fingerprints"].get(str(run.seed))
            # Its own where GPUs differ in a seed.
            if not mine or same.get("fingerprint", shared) in mine:
                found[run.id] = same
    return found


def _baselines(name: str) -> str:
    """The protocol whose runs are the controls of ``name``."""
    return "baselines_bf16_residual" if name.endswith("_bf16_residual") else "baselines"


@functools.cache
def _experiment(name: str) -> Any:
    from megatron_patch.experiments.protocol import read

    return read(ROOT / "configs" / "stability" / f"{name}.yaml")


def _asked(run: Any, name: str) -> str:
    """What a run computes: its whole configuration, but for name and place, and its variant."""
    from megatron_patch.experiments.protocol import trainer_config

    experiment = _experiment(name)
    config = trainer_config(experiment.config, run, steps=experiment.protocol.steps).config
    return repr((run.cell.variant, dataclasses.replace(config, name="-")))


def timeline(*names: str, during: Sequence[str] = ()) -> Callable[[dict[str, Any]], str]:
    """One head through runs (``names`` of them, or all), a line a step, the runs side by side.

    With ``during`` only the steps at which one of those runs has a record.
    """

    def render(result: dict[str, Any]) -> str:
        runs = {run: result["runs"][run] for run in names or sorted(result["runs"])}
        where = f"Layer {result['layer']}, head {result['head']}: its largest logit and the "
        where += "spectral norm of its W_Q; the gradient norm of the whole model. - : no record."
        noisy = [run for run, one in runs.items() if _measured(one, "growth_noise")]
        if noisy:
            where += " Noise: error over true derivative by a factor on the logits."
        columns = [("noise", "growth_noise", run) for run in noisy]
        shared = [run for run, one in runs.items() if _measured(one, "common_logit")]
        columns += [("common part", "common_logit", run) for run in shared]
        for told, key in TIMELINE.items():
            columns += [(told, key, run) for run in runs]
        rows = []
        at = {int(s) for run in during or runs for s, row in runs[run]["at"].items() if row}
        for step in sorted(at):
            found = [(runs[run]["at"].get(str(step)) or {}).get(key) for _, key, run in columns]
            rows.append([f"{step:,}", *map(three_digits, found)])
        where += kept_from([*runs.items()], "Read")
        head = ["step", *(f"{told}, {run}" for told, _, run in columns)]
        return "\n".join([f"{origin(result)} {where}", "", table(head, rows)])

    return render


TIMELINE = {"largest logit": "max_logit", "W_Q": "wq_norm", "gradient norm": "grad_norm_mean"}


def _measured(run: dict[str, Any], key: str) -> bool:
    return any(row and row.get(key) is not None for row in run["at"].values())


def layer_heads(result: dict[str, Any]) -> str:
    """The largest logit of every head of a layer, a line a run and step."""
    rows = []
    for run, one in result["runs"].items():
        for i, (step, values) in enumerate(sorted(one["at"].items(), key=lambda at: int(at[0]))):
            rows.append([run if i == 0 else "", f"{int(step):,}", *map(three_digits, values)])
    heads = max(len(values) for one in result["runs"].values() for values in one["at"].values())
    where = f"Largest logit of every head of layer {result['layer']}."
    where += kept_from([*result["runs"].items()], "Read")
    head = ["run", "step", *(f"head {h}" for h in range(heads))]
    return "\n".join([f"{origin(result)} {where}", "", table(head, rows)])


def growth_noise(result: dict[str, Any]) -> str:
    """A line a run: how large the ratio is, where it passes 1, and which heads go."""

    def told(head: dict[str, Any]) -> str:
        return f"{head['layer']}.{head['head']}"

    rows = []
    for name, run in result["runs"].items():
        end = run["before_step"] or run["until"]
        row = [name, f"{end:,}{'' if run['before_step'] else ' (its end)'}"]
        row += [f"{run[key]:.2g}" for key in ("median", "p99", "largest")]
        went = {told(head) for head in run["went"]}
        others = [head for head in run["passed"] if told(head) not in went]
        first = ", ".join(f"{told(h)} at {h['step']:,}" for h in others[:4])
        row += [f"{len(others)} of {run['heads'] - len(went)}{': ' + first if first else ''}"]
        told_went = (
            f"{told(h)}: {h['step']:,}"
            + (
                f", above 1 from {h['passed']['step']:,}, at logits of "
                f"{h['passed']['largest_logit']:,.0f}"
                if h["passed"]
                else ""
            )
            for h in run["went"]
        )
        rows.append([*row, "; ".join(told_went) or "none"])
    head = ["run", "until step", "noise, median", "99 %", "largest", "above 1 in other heads"]
    head += ["first heads with logits above 1,000"]
    where = "Heads as layer.head; above 1: the median of five records is."
    where += kept_from([*result["runs"].items()], "Read")
    return "\n".join([f"{origin(result)} {where}", "", table(head, rows)])


def head_errors(result: dict[str, Any]) -> str:
    """The heads with the largest errors, a line a run and stretch, beside those that ran away."""

    def named(heads: list[list[int]]) -> str:
        return ", ".join(f"{layer}.{head}" for layer, head in heads)

    rows = []
    for name, run in result["runs"].items():
        for i, span in enumerate(run["between"]):
            times = zip(span["largest"], span["over_median"], strict=True)
            told = ", ".join(f"{named([head])} ({x:.0f}x)" for head, x in times)
            gone = named(run["ran_away"]) or f"none: at most {run['largest_logit']:,.0f} in all"
            facts = [name, gone] if i == 0 else ["", ""]
            common = sum(head in run["ran_away"] for head in span["largest"])
            facts += [f"{span['after']:,} to {span['until']:,}", told]
            facts += [f"{common} of {len(run['ran_away'])}" if run["ran_away"] else "-"]
            facts += [f"{span['t_rms']:.2f} ({span['t_rms_unbiased']:.2f})"]
            rows.append([*facts, f"{100 * span['seen_from']:.0f} %"])
    head = ["run", "largest logits at its end", "steps", "largest error of delta (median head: 1x)"]
    head += ["the same heads", "t of its mean (without bias)", "a mean is seen from"]
    where = "Heads as layer.head; t in RMS over all heads; a mean in percent of the RMS error."
    where += kept_from([*result["runs"].items()], "Read")
    return "\n".join([f"{origin(result)} {where}", "", table(head, rows)])


def logit_growth(result: dict[str, Any]) -> str:
    """A line a capture: its largest head, and the range of the others."""
    rows = []
    for (run, step, layer), heads in by_capture(result["heads"]):
        first, *others = sorted(heads, key=lambda one: -one["largest_logit"])
        row = [f"{run}, {step:,}", f"{layer}.{first['head']}", f"{first['largest_logit']:,.0f}"]
        row += [_noise([first[kind]["noise"]]) for kind in ("none", "compensated")]
        row += [f"{max(one['largest_logit'] for one in others):,.0f}" if others else "-"]
        for kind in ("none", "compensated"):
            row += [_noise([one[kind]["noise"] for one in others])]
        rows.append(row)
    sides = [
        math.sqrt(statistics.mean(one[kind]["side"] ** 2 for one in result["heads"]))
        for kind in ("none", "compensated")
    ]
    head = ["captured in, at step", "head", "its largest logit", "noise, plain", "`compensated`"]
    head += ["largest logit of the others", "noise of the others, plain", "`compensated`"]
    words = f"Side, RMS over all {len(result['heads'])} heads: plain {sides[0]:.2f}, "
    words += f"`compensated` {sides[1]:.2f} (1: none)."
    words += captures_kept(result["heads"])
    return "\n".join([f"{origin(result)} {words}", "", table(head, rows)])


HALVES = {
    "low_order_o": "low-order part alone",
    "consistent_sum": "rounded sum alone",
    "compensated": "`compensated`",
}
LOGITS = (25, 100, 1000, math.inf)
"""Upper ends of the classes of heads, by their largest logit."""


def halves(result: dict[str, Any]) -> str:
    """What is left of the plain noise, by size of the logits: median over heads, and the range."""
    of = [one for one in result["heads"] if all(one.get(k, {}).get("noise") for k in HALVES)]
    rows, low = [], 0.0
    for high in LOGITS:
        heads = [one for one in of if low <= one["largest_logit"] < high]
        row = [f"over {low:,.0f}" if high == math.inf else f"{low:,.0f} to {high:,.0f}"]
        row += [str(len(heads)), _noise([one["none"]["noise"] for one in heads])]
        for kind in HALVES:
            left = [one[kind]["noise"] / one["none"]["noise"] for one in heads]
            row.append(f"{statistics.median(left):.2f} ({_noise(left)})" if left else "-")
        rows.append(row)
        low = high
    head = ["largest logit", "heads", "noise, plain"]
    head += [f"left of it, {name}" for name in HALVES.values()]
    words = "Median over heads, and the range. Heads whose true derivative is not zero, of "
    words += f"{len({(one['run'], one['step'], one['layer']) for one in of})} captures."
    return "\n".join([f"{origin(result)} {words}", "", table(head, rows)])


SHARED = {
    "O that is one vector": "shared_o",
    "rounding error: times independent rows'": "shared_error",
    "of delta's error by a common one": "explained",
    "along O - v": "dead",
}


def shared_rounding(result: dict[str, Any]) -> str:
    """Whether rows share the rounding error of O, by size of the logits."""
    rows, low = [], 0.0
    for high in LOGITS:
        heads = [one for one in result["heads"] if low <= one["largest_logit"] < high]
        row = [f"over {low:,.0f}" if high == math.inf else f"{low:,.0f} to {high:,.0f}"]
        row.append(str(len(heads)))
        for key in SHARED.values():
            known = [one[key] for one in heads]
            spread = f" ({min(known):.2g} to {max(known):.2g})" if len(known) > 1 else ""
            row.append(f"{statistics.median(known):.2g}{spread}" if known else "-")
        rows.append(row)
        low = high
    places = {(one["run"], one["step"], one["layer"]) for one in result["heads"]}
    words = f"Median over heads, and the range, of {len(places)} captures."
    head = ["largest logit", "heads", *SHARED]
    return "\n".join([f"{origin(result)} {words}", "", table(head, rows)])


def _noise(values: list[float | None]) -> str:
    """One ratio or the range of several; None is one whose true derivative is zero."""
    found = sorted(math.inf if value is None else value for value in values)
    told = ["error only" if value == math.inf else f"{value:.2g}" for value in found]
    return " to ".join(dict.fromkeys([told[0], told[-1]])) if told else "-"


def exponent(result: dict[str, Any]) -> str:
    """Errors of delta by exponent and sum, a line a head."""
    names = [
        f"{e}, {s}" for s in ("unrounded", "rounded") for e in ("subtract first", "multiply-add")
    ]
    rows = [
        [
            f"{row['step']:,}, layer {row['layer']}, head {row['head']}",
            f"{row['largest_row_maximum']:,.0f}",
            *(f"{row[name]:.1e}" for name in names),
        ]
        for row in result["heads"]
    ]
    head = ["captured at step", "largest logit"]
    head += [
        f"sum of {s} P, {e}" for s in ("unrounded", "rounded") for e in ("exact", "multiply-add")
    ]
    return "\n".join([origin(result), "", table(head, rows)])


def pace(result: dict[str, Any]) -> str:
    """Steps of a run in a job of 24 minutes, on one GPU and on two, as runs made them."""
    rows = []
    for run in result["runs"]:
        for attempt in run.get("attempts", []):  # another attempt's directory has none
            # Records of an earlier version count a continued run from step 0.
            begun = max(attempt["from_step"], (run.get("origin") or {}).get("step", 0))
            steps = attempt["to_step"] - begun
            if attempt["exit_code"] != 0 or steps < 5000:
                continue
            rate = steps / attempt["seconds"]
            facts = [run["run"], str(attempt["gpus"]), f"{begun:,}"]
            facts += [short_commit(run["commit"]), f"{rate:.1f}"]
            rows.append([*facts, f"{rate * 24 * 60 // 100 * 100:,.0f}"])
    head = ["run", "GPUs", "from step", "commit", "steps/s", "in 24 minutes"]
    return f"With start, checkpoints and evaluation:\n\n{table(head, rows)}"


def tables() -> Tables:
    """Markers of those pages, as `render_tables.TABLES` has them."""
    command = "megatron-patch experiment stability --config configs/stability/{}.yaml"
    found: Tables = {
        f"stability-{name.replace('_', '-')}": (
            f"stability_{name}",
            verdicts(name),
            command.format(name),
        )
        for name in PROTOCOLS
    }
    of_protocol = {
        "stability-pace": ("baselines", pace),
        "stability-pace-rescue": ("rescue", pace),
        "stability-pace-bf16": ("baselines_bf16_residual", pace),
        "stability-rescue-cost": ("rescue", loss_tables.rescue_cost),
        "stability-rescue-late-cost": ("rescue_late", loss_tables.rescue_cost),
        "stability-loss": ("baselines", loss_tables.beside_float32),
        "stability-loss-bf16": ("baselines_bf16_residual", loss_tables.beside_float32_stream),
        "stability-loss-attribution": ("attribution", loss_tables.beside_compensated),
    }
    for marker, (name, view) in of_protocol.items():
        found[marker] = (f"stability_{name}", view, command.format(name))
    found["stability-cells"] = ("", cells, "")
    known = coverage_table.Protocols(experiment=_experiment, asked=_asked, controls=controls)
    found["stability-coverage"] = ("", coverage_table.rendered(known), "")
    found["early-warning-beside"] = (
        "early_warning_runs", loss_tables.lead, "early_warning.py --judge RUN ...",
    )  # fmt: skip
    return found | probe_tables.tables() | _of_heads() | _of_errors()


def _of_heads() -> Tables:
    """Heads of runs, one through the steps or those of a layer beside each other."""
    read = "head_timeline.py RUN ... --layer L --head H --steps ..."
    heads = "layer_heads.py RUN ... --layer L --steps ..."
    kernels = ("compensated-s2", "none-s2", "sdpa_cudnn-s2", "sdpa_flash-s2")
    found: Tables = {
        "stability-timeline": ("head_timeline", timeline(*kernels), read),
        "stability-layer-heads": ("layer_heads", layer_heads, heads),
        "stability-timeline-s1": (
            "head_timeline_s1", timeline("compensated-s1", "none-s1"), read,
        ),
        "stability-timeline-paper": ("head_timeline_paper", timeline(), read),
        "stability-rescue-timeline": ("rescue_head_timeline", timeline(), read),
        "stability-rescue-timeline-s1": ("rescue_head_timeline_s1", timeline(), read),
    }  # fmt: skip
    for seed, file, marker in (("s2", "head_timeline", ""), ("s1", "head_timeline_s1", "-s1")):
        parts = [f"consistent_sum-{seed}", f"low_order_o-{seed}"]
        ends = f"none-{seed}", f"compensated-{seed}"
        view = timeline(ends[0], *parts, ends[1], during=parts if marker else ())
        found[f"stability-timeline-halves{marker}"] = (file, view, read)
    runs = ["guard", "flash", "bf16", "third", "cudnn_s1", "cudnn_s2", "flash_s2", "paper_s2"]
    for run in (*runs, "fp32_s1", "dynamic", "decay"):
        found[f"stability-{run}-heads"] = (f"{run}_layer_heads", layer_heads, heads)
        found[f"stability-{run}-timeline"] = (f"{run}_head_timeline", timeline(), read)
    return found


def _of_errors() -> Tables:
    """What errors do in heads, of runs and of captured tensors."""
    drift = "gradient_drift.py ..."
    return {
        "exponent-rounding": ("exponent_rounding", exponent, "exponent_rounding.py"),
        "stability-continued-heads": (
            "continued_heads",
            continued_table.rendered,
            "continued_heads.py runs/stability_attribution_continued",
        ),
        "centered-heads": ("centered_heads", continued_table.centered, "centered_heads.py"),
        "saturated-heads": (
            "saturated_heads",
            continued_table.saturated,
            "saturated_heads.py RUN ... --steps ...",
        ),
        "common-part": ("common_part", continued_table.common_part, "common_part.py RUN ..."),
        "stability-head-errors": ("head_errors", head_errors, "head_errors.py RUN ..."),
        "growth-noise": ("growth_noise", growth_noise, "growth_noise.py RUN ..."),
        "logit-growth": ("logit_growth", logit_growth, "logit_growth.py"),
        "logit-growth-halves": ("logit_growth", halves, "logit_growth.py"),
        "shared-rounding": ("shared_rounding", shared_rounding, "shared_rounding.py CAPTURE ..."),
        "gradient-drift": ("gradient_drift", drift_table.rendered, drift),
        "gradient-drift-heads": ("gradient_drift_s1", drift_table.by_head, drift),
    }

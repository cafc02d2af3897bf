"""Tables of ``early_warning.py`` and ``telemetry_overhead.py``."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from table_text import Tables, kept_from, origin, table

from megatron_patch.runtime.environment import short_commit

ERROR = Path(__file__).resolve().parent.parent / "docs" / "results" / "early_warning_error.json"
HELD_OUT, BUT_ERROR = "held out", "held out, but for the error"


def early_warning_runs(result: dict[str, Any]) -> str:
    """`early_warning` of the whole rule, whose signs were not all chosen on the same runs."""
    return early_warning(result, chosen_on(ERROR))


def chosen_on(file: Path) -> set[str]:
    """Runs on which a threshold of that result was chosen; none if there is no such result."""
    if not file.exists():
        return set()
    return {row["run"] for row in json.loads(file.read_text())["choosing"]}


def early_warning(result: dict[str, Any], of_error: Collection[str] = ()) -> str:
    """Runs of both sets under the chosen threshold, and what other thresholds would have done.

    ``of_error``: runs that the threshold of the error was chosen on, another sign of the same rule.
    """

    name = result.get("threshold", "danger_growth")
    found = [("chosen on", f) for f in result["choosing"]]
    found += [(BUT_ERROR if f["run"] in of_error else HELD_OUT, f) for f in result["held_out"]]
    runs = table(
        ["set", "run", "steps", "watch", "danger", "loss +0.1", "lead", "loss > 4.5", "outcome"],
        [
            [
                kind,
                f["run"],
                f"{f['steps']:,}",
                _step(f["watch"]),
                _step(f["alarm"]),
                _step(f["loss_moved"]),
                _step(f["lead"]),
                _step(f["loss_high"]),
                f["outcome"],
            ]
            for kind, f in found
        ],
    )
    reasons = [f"- {f['run']}, step {f['alarm']:,}: {f['reason']}" for _, f in found if f["reason"]]
    if result["product"] and reasons:
        runs += "\n\nWhat the alarms said:\n\n" + "\n".join(reasons)
    # A run that continues another has no warm-up of its own: there its growth is 0.
    early = [(f["run"], w) for _, f in found if (w := f.get("warm_up")) and w["growth"]]
    if early and name != "danger_error":  # which looks there, too
        each = (f"{run} {w['growth']:.2f}x, at logits up to {w['logit']:.0f}" for run, w in early)
        runs += (
            "\n\nIn the warm-up, where the rule does not look, single heads grew this much against"
        )
        runs += f" the median head: {'; '.join(each)}."
    source = result["source"] + "." + kept_from([(f["run"], f) for _, f in found], "Judged")
    if old := [f["run"] for _, f in found if f.get("earlier_rule")]:
        source += f" Judged by an earlier version of the rule: {', '.join(old)}."
    chosen = result["chosen"]
    if not result["grid"]:
        words = (
            f"Runs: {source} Nothing was fitted on them: {name} {result['default']:g}, the default."
        )
        return f"{origin(result)} {words}\n\n{runs}"
    words = (
        f"Runs: {source} Chosen on the first set for a lead of "
        f"{result['wanted_lead']:,} steps: {name} "
        f"{'none' if chosen is None else f'{chosen:g}'} (default {result['default']:g})."
    )
    return f"{origin(result)} {words}\n\n{runs}\n\n{_grid(result, name)}"


def _grid(result: dict[str, Any], name: str) -> str:
    """What every threshold tried would have done to the runs that one was chosen on."""
    return table(
        [name, "lead of the exploding runs chosen on", "alarms without explosion"],
        [
            [
                f"{g[name]:g}",
                ", ".join("none" if x is None else f"{x:,}" for x in g["leads"]),
                str(g["false_alarms"]),
            ]
            for g in result["grid"]
        ],
    )


def overhead(result: dict[str, Any]) -> str:
    """Cost of an observation and of the default interval, by number of processes."""
    interval = result["interval"]
    rows = [
        [
            processes,
            f"{1e3 * f['step_seconds']:.1f} ms",
            f"{1e3 * f['observation_seconds']:.1f} ms{_error(f, 'observation', 1e3, '{:.1f} ms')}",
            f"{100 * f[f'share_every_{interval}_steps']:.3f} %",
            _between(f),
            f"{100 * f['paired_difference']:+.2f} % ± {_percent(f['paired_standard_error'])}",
            _median(f.get("paired_median"), f.get("paired_median_interval")),
            _median(*(f.get("by_steps", {}).get(name) for name in ("total", "total_interval"))),
            f"{100 * f['noise']:.2f} %",
        ]
        for processes, f in result["by_processes"].items()
    ]
    head = [
        "processes",
        "step without",
        "one observation",
        f"every {interval} steps",
        "between them",
        "paired difference, one standard error",
        "median, 95 %",
        "by steps, 95 %",
        "spread of equal stretches",
    ]
    return f"{origin(result)}\n\n{table(head, rows)}"


def observations(result: dict[str, Any]) -> str:
    """Cost of an observation in runs as they were made, a line an attempt."""
    rows = [
        [
            row["run"],
            str(row["world_size"]),
            f"{row['from_step']:,} to {row['to_step']:,}",
            f"{1e3 * row['step_seconds']:.1f} ms",
            str(row["observations"]),
            f"{1e3 * row['observation_seconds']:.1f} ms",
            f"{1e3 * row['quartiles'][0]:.0f} to {1e3 * row['quartiles'][1]:.0f} ms",
            f"{1e3 * row['between_seconds']:.1f} ms",
            f"{100 * row['share']:.2f} %",
            _percent(row["share_of_means"]) if "share_of_means" in row else "-",
        ]
        for row in result["attempts"]
    ]
    made = {(row["gpu"], row["torch"], short_commit(row["commit"])) for row in result["attempts"]}
    where = "; ".join(
        f"{gpu}, torch {torch}, commit {commit}" for gpu, torch, commit in sorted(made)
    )
    head = ["run", "GPUs", "steps", "step", "observations", "one costs, median", "quartiles"]
    head += ["between them", "share", "by means"]
    told = [(row["run"], {"commit": row.get("read_at")}) for row in result["attempts"]]
    read = kept_from([(run, at) for run, at in told if at["commit"]], "Read")
    return f"{origin(result)} Runs made on {where}.{read}\n\n{table(head, rows)}"


def _error(figures: dict[str, Any], name: str, unit: float, form: str) -> str:
    value = figures.get(f"{name}_standard_error")
    return "" if value is None else f" ± {form.format(unit * value)}"


def _between(figures: dict[str, Any]) -> str:
    """What a step that is not observed costs: in pairs, and on the host in the calls themselves."""
    if "idle_difference" not in figures:
        return "-"
    paired = f"{100 * figures['idle_difference']:+.2f} %{_error(figures, 'idle', 100, '{:.2f} %')}"
    return f"{paired}; calls {1e3 * figures['idle_call_seconds']:.2f} ms"


def _median(value: float | None, interval: list[float] | None) -> str:
    """Of the rounds, in percent; earlier results have none, short ones no interval."""
    if value is None or interval is None:
        return "-"
    low, high = (f"{100 * end:+.2f}" for end in interval)
    return f"{100 * value:+.2f} % ({low} to {high})"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.2f} %"


def _step(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


CURVES = "--choose CSV ... --judge CSV ... --source TEXT"


def tables() -> Tables:
    """Marker -> (result file, renderer, command), for render_tables."""
    return {
        "early-warning": ("early_warning", early_warning, f"early_warning.py {CURVES}"),
        "early-warning-runs": (
            "early_warning_runs",
            early_warning_runs,
            "early_warning.py --judge RUN ...",
        ),
        "early-warning-error": (
            "early_warning_error",
            early_warning,
            "early_warning.py --error-alone --judge RUN ...",
        ),
        "observation-cost": ("observation_cost", observations, "observation_cost.py RUN ..."),
        "telemetry-overhead": ("telemetry_overhead", overhead, "telemetry_overhead.py"),
        "telemetry-overhead-2": (
            "telemetry_overhead_2gpu",
            overhead,
            "telemetry_overhead.py --gpus 2",
        ),
        "telemetry-overhead-2-again": (
            "telemetry_overhead_2gpu_again",
            overhead,
            "telemetry_overhead.py --gpus 2 1 --rounds 3",
        ),
    }

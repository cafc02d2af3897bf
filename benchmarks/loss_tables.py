"""Tables that compare losses of runs at the same steps: rescued runs, and FP32 attention."""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from run_names import CONTINUED, LATE, STREAM, by_attempt, of_attempt
from table_text import table

ROOT = Path(__file__).resolve().parent.parent
YARDSTICK = "fp32_attention"
WINDOW = 50
"""Steps of a window; the last of a run may be shorter."""
SETTLED = 2000
"""Losses are compared from this step on, as a protocol's verdicts are."""
SAME_STEPS = 4
"""Windows of 50 steps, the last that both runs have, in which losses are compared."""
COLUMNS = ("until step", "mean", "scatter of windows", "mean of the last quarter")


def rescue_cost(result: dict[str, Any]) -> str:
    """How far a run whose numerics were exchanged ends above one that had them from the start."""
    protocol = result["name"].removeprefix("stability_")
    losses, whole = windows_of(protocol), windows_of("baselines")
    rows = []
    for run in result["runs"]:
        peer = whole.get(f"compensated-s{run['seed']}", {})
        begun = run.get("origin") or {"base": run["run"], "step": run.get("switched_at")}
        if begun["step"] is None or not run["steps"]:
            continue
        own, base = losses[run["run"]], losses[begun["base"]]
        both = sorted(set(own) & set(peer))[-SAME_STEPS:]
        before = [s for s in sorted(set(base) & set(peer)) if s <= begun["step"]][-SAME_STEPS:]
        if len(both) < SAME_STEPS or len(before) < SAME_STEPS:
            continue
        mean, of_peer = (statistics.mean(x[s] for s in both) for x in (own, peer))
        behind = statistics.mean(base[s] - peer[s] for s in before)
        facts = [run["run"], f"{begun['step']:,}", f"{behind:+.3f}", f"{both[-1]:,}"]
        rows.append([*facts, f"{mean:.3f}", f"{of_peer:.3f}", f"{mean - of_peer:+.3f}"])
    head = ["run", "from step", "behind before that", "to step"]
    head += ["loss", "`compensated` from step 0", "behind at the end"]
    return table(head, rows)


def windows_of(protocol: str, figure: str = "loss") -> dict[str, dict[int, float]]:
    """Mean loss, or other figure, of every window, by run and last step of the window.

    Attempts that ended before anything is compared (one ran out of memory at its start) are not in.
    """
    found: dict[str, dict[int, float]] = {}
    with (ROOT / "docs" / "results" / f"stability_{protocol}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["run"], {})[int(row["step"])] = float(row[figure])
    return {run: windows for run, windows in found.items() if max(windows) > SETTLED}


def beside_float32(result: dict[str, Any]) -> str:
    """Loss of every run less that of FP32 attention on the same seed, and between two seeds.

    Windows that both runs have and that end before either has exploded.
    """
    losses = windows_of("baselines")
    ends = {run["run"]: run["first_large_gradient"] or math.inf for run in result["runs"]}
    pairs = []
    for yardstick in sorted(run for run in losses if run.startswith(f"{YARDSTICK}-")):
        seed = yardstick.rpartition("-")[2]
        of_seed = sorted(run for run in losses if run.partition(".")[0].endswith(f"-{seed}"))
        pairs += [(run, yardstick) for run in of_seed if run != yardstick]
    pairs += itertools.combinations(sorted(r for r in losses if r.startswith("compensated-")), 2)
    rows = [
        _apart(losses[a], losses[b], of_attempt(a, losses), b, min(ends[a], ends[b]))
        for a, b in pairs
    ]
    return table(["run", "less", *COLUMNS], [row for row in rows if row])


def beside_float32_stream(result: dict[str, Any]) -> str:
    """Loss of every run with a BF16 residual stream less that of its namesake with FP32."""
    losses, others = windows_of("baselines_bf16_residual"), windows_of("baselines")
    usual = json.loads((ROOT / "docs" / "results" / "stability_baselines.json").read_text())
    ends: dict[str, float] = {}
    for run in (*result["runs"], *usual["runs"]):
        end = run["first_large_gradient"] or math.inf
        ends[run["run"]] = min(end, ends.get(run["run"], math.inf))
    rows = [
        _apart(losses[run], others[run], f"{run}, {STREAM}", run, ends[run])
        for run in sorted(losses.keys() & others.keys())
    ]
    return table(["run", "less", *COLUMNS], [row for row in rows if row])


def beside_compensated(result: dict[str, Any]) -> str:
    """Loss of every cell from step 0 less that of `compensated` on the same seed, and its norm.

    Norms are means of the last windows that both have.
    """
    losses, whole = windows_of("attribution"), windows_of("baselines")
    norms, usual = (windows_of(name, "grad_norm") for name in ("attribution", "baselines"))
    rows = []
    for run in result["runs"]:
        name, peer = run["run"], f"compensated-s{run['seed']}"
        own, base = losses.get(name, {}), whole.get(peer, {})
        row = _apart(own, base, name, peer, run["first_large_gradient"] or math.inf)
        if not row:
            continue
        last = sorted(own.keys() & base.keys())[-SAME_STEPS:]
        found = [statistics.mean(of[step] for step in last) for of in (norms[name], usual[peer])]
        rows.append([*row, *(f"{value:.3f}" for value in found)])
    return table(["run", "less", *COLUMNS, "gradient norm there", "of `compensated`"], rows)


GAPS = (0.03, 0.1)
"""Nats above `compensated` on the same batches, in two windows in a row: the loss has moved."""


ELSEWHERE = {
    STREAM: "baselines_bf16_residual",
    CONTINUED: "attribution_continued",
    LATE: "rescue_late",
}
"""Protocols whose losses are those of runs that results set apart."""


def lead(result: dict[str, Any]) -> str:
    """How long before its loss left that of `compensated` on the same batches a run was announced.

    Stricter than `early_warning.first_move`, which knows the run alone, as its user does.
    """
    losses = {name: windows_of(name) for name in ("baselines", "rescue", *ELSEWHERE.values())}
    rows = []
    for run in (*result["choosing"], *result["held_out"]):
        name, _, apart = run["run"].partition(", ")
        peer = losses["baselines"].get(f"compensated-{name.rpartition('-')[2]}", {})
        if apart in ELSEWHERE:
            own = losses[ELSEWHERE[apart]].get(name, {})
        else:
            own = losses["rescue"].get(name, {})
            own = losses["baselines"].get(by_attempt(run["run"], losses["baselines"]), own)
        left = [_leaves(own, peer, gap) for gap in GAPS]
        if run["alarm"] is None or left[0] is None or left[0] < run["alarm"]:
            continue
        cells = [x for at in left for x in _since(at, run["alarm"])]
        rows.append([run["run"], f"{run['alarm']:,}", *cells])
    head = [x for gap in GAPS for x in (f"{gap:g} above from", "steps after")]
    return table(["run", "`danger`", *head], rows)


def _leaves(own: dict[int, float], peer: dict[int, float], gap: float) -> int | None:
    """First of two windows in a row, after the warm-up, in which a loss is so much higher."""
    steps = sorted(s for s in own.keys() & peer.keys() if s > SETTLED and s % WINDOW == 0)
    above = [own[s] - peer[s] > gap for s in steps]
    return next((s for s, a, b in zip(steps, above, above[1:], strict=False) if a and b), None)


def _since(at: int | None, alarm: int) -> tuple[str, str]:
    return ("-", "-") if at is None else (f"{at:,}", f"{at - alarm:,}")


def _apart(
    one: dict[int, float], other: dict[int, float], name: str, less: str, last: float
) -> list[str]:
    """A row: two runs' names, and how far their losses are apart before the step ``last``."""
    both = sorted(one.keys() & other.keys())
    steps = [s for s in both if SETTLED < s < last and s % WINDOW == 0]
    if len(steps) < 2:
        return []
    apart = [one[step] - other[step] for step in steps]
    late = statistics.mean(apart[-math.ceil(len(apart) / 4) :])
    mean, scatter = statistics.mean(apart), statistics.stdev(apart)
    return [name, less, f"{steps[-1]:,}", f"{mean:+.4f}", f"{scatter:.4f}", f"{late:+.4f}"]

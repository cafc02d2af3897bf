"""Our early warning, the sums of dK and dV, and two published monitors on the same runs.

    python research/analysis/monitors.py --choose RUN ... --report RUN ... [--out DIR]

RUNs are run directories of a protocol with ``rivals`` (research/rivals.py), on other seeds after
``--report`` than after ``--choose``. Writes rivals.json and prints its table. No GPU, no torch.
The procedure was fixed before any such run was made:

Event. By the protocol's rule; as it is by default, the first window of 50 steps after step 2,000
with a mean gradient norm above 1. A run without one is *quiet*.

Alarm. The present rule: its first ``danger``. A monitor: the first observation at which one head
(or matrix) has a score above the threshold for the second time in a row, after the warm-up. In a
run with an event an alarm that does not come before it is *missed*; in a quiet one any is *false*.

Threshold. The highest score that any quiet run of ``--choose`` reaches twice in a row: the least at
which none of them alarms. Nobody published one. The present rule has its own.

Scores. The largest is the worst. ``fall`` and ``rise`` are changes over 500 steps. A run in which a
monitor left less than two observations (it failed) does not count in its rows.

Cost. Of one observation, from step_seconds: its step and the next less twice the median of the five
steps before it; median over observations, over `interval` median steps. That of the present rule
is the whole telemetry's, the sums of dK and dV included.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shared
from shared import finite, number, step, table

sys.path.append(str(Path(__file__).resolve().parents[1]))
from protocol import ExplosionConfig
from verdict import judge, read_rows

from megatron_patch.runtime import records

LOOK_BACK = 500
Scores = tuple[np.ndarray, np.ndarray]
"""Steps [n], and a score of every head at each [n, heads]; NaN where there is none."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What a run directory says."""

    name: str
    folder: Path
    settled: int
    """Steps of the warm-up."""
    event: int | None
    danger: int | None
    """First `danger` of the present rule."""
    steps: int

    @classmethod
    def read(cls, folder: Path) -> Watched:
        """Of a run with telemetry; SystemExit if it has none."""
        told = shared.telemetry(folder)
        found = judge(read_rows(folder / "metrics.csv"), _rule(folder))
        danger = next((s for s, v in told.verdicts() if v.level == "danger"), None)
        settled, event = told.rule.settle_steps, found.first_large_gradient
        return cls(shared.run_name(folder), folder, settled, event, danger, found.steps)


def _rule(folder: Path) -> ExplosionConfig:
    """What an event is by the experiment that a run is of; the default, if it is of none."""
    try:
        path = folder.resolve().parents[1] / "experiment.json"
        return ExplosionConfig(**json.loads(path.read_text())["explosion"])
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        return ExplosionConfig()


def of_file(run: Watched, monitor: str, column: str, *, whole: bool = False) -> Scores:
    """A column of a file in rivals/, of heads or of whole matrices; no steps if there is none."""
    found: dict[int, dict[tuple[int, int], float]] = {}
    path = run.folder / "rivals" / f"{monitor}.csv"
    with path.open(newline="") if path.exists() else io.StringIO() as file:
        for row in csv.DictReader(file):
            if (row["head"] == "-1") == whole and row[column]:
                key = int(row["layer"]), int(row["head"])
                found.setdefault(int(row["step"]), {})[key] = float(row[column])
    heads = sorted(set().union(*found.values()))
    table = [[line.get(head, np.nan) for head in heads] for _, line in sorted(found.items())]
    return np.array(sorted(found)), np.array(table).reshape(len(found), len(heads))


def signs(*matrices: str, whole: bool) -> Callable[[Watched], Scores]:
    """How far the signs of cosines are from equal numbers: 0 to 1, all the same."""

    def read(run: Watched) -> Scores:
        columns = [of_file(run, "alignment", f"{m}_positive", whole=whole) for m in matrices]
        return columns[0][0], np.abs(2 * np.concatenate([c for _, c in columns], 1) - 1)

    return read


def entropy(run: Watched) -> Scores:
    """A low entropy is the sign."""
    steps, values = of_file(run, "entropy", "entropy")
    return steps, -values


def sums(name: str) -> Callable[[Watched], Scores]:
    """Of the telemetry."""

    def read(run: Watched) -> Scores:
        told = shared.telemetry(run.folder)
        return told.steps, told.heads[name].reshape(len(told.steps), -1)

    return read


def changed(read: Callable[[Watched], Scores]) -> Callable[[Watched], Scores]:
    """By how much a score has grown in `LOOK_BACK` steps, or a little more after a resume."""

    def later(run: Watched) -> Scores:
        steps, values = read(run)
        before = np.searchsorted(steps, steps - LOOK_BACK, side="right") - 1
        return steps, np.where((before >= 0)[:, None], values - values[before], np.nan)

    return later


HEADS, WHOLE = ("q", "k"), ("q", "k", "v", "proj", "fc1", "fc2")
SCORES: dict[str, tuple[str, Callable[[Watched], Scores]]] = {
    "sum of dK over its rounding": ("rule", sums("dk_sum")),
    "sum of dV over its rounding": ("rule", sums("dv_sum")),
    "entropy": ("entropy", entropy),
    "entropy, fall": ("entropy", changed(entropy)),
    "signs of W_Q, W_K by head": ("alignment", signs(*HEADS, whole=False)),
    "signs of W_Q, W_K by head, rise": ("alignment", changed(signs(*HEADS, whole=False))),
    "signs of whole matrices": ("alignment", signs(*WHOLE, whole=True)),
    "signs of whole matrices, rise": ("alignment", changed(signs(*WHOLE, whole=True))),
}
"""By name: what pays for it, and the score."""


def twice(run: Watched, scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the largest score that one head has there and had at the observation before."""
    steps, values = scores
    both = np.nan_to_num(np.minimum(values[1:], values[:-1]), nan=-np.inf, posinf=np.inf)
    late = steps[1:] > run.settled
    return steps[1:][late], both[late].max(1, initial=-np.inf)


def cost(run: Watched, phase: int, interval: int) -> float | None:
    """Share of the time that observations at steps with this remainder take."""
    rows = records.read_rows(run.folder / "metrics.csv")
    took = {int(row["step"]): float(row["step_seconds"]) for row in rows if row["step_seconds"]}
    more = [
        took[s] + took[s + 1] - 2 * statistics.median(took[s - i] for i in range(1, 6))
        for s in took
        if s % interval == phase and all(s + i in took for i in range(-5, 2))
    ]
    # What is first is slow: kernels are compiled.
    rest = more[2:]
    return statistics.median(rest) / (interval * statistics.median(took.values())) if rest else None


def judged(runs: list[Watched], alarms: dict[str, int | None]) -> dict[str, Any]:
    """Leads of the runs with an event, and which of the quiet ones alarmed; of runs it saw."""
    runs = [run for run in runs if run.name in alarms]
    leads = {r.name: (None if (at := alarms[r.name]) is None else r.event - at)
             for r in runs if r.event is not None}  # fmt: skip
    leads = {name: lead if lead is not None and lead > 0 else None for name, lead in leads.items()}
    quiet = [run.name for run in runs if run.event is None]
    false = [name for name in quiet if alarms[name] is not None]
    return {"leads": leads, "quiet": quiet, "false": false}


def compare(choosing: list[Watched], reported: list[Watched]) -> dict[str, Any]:
    """Every detector with its threshold and what it said of both groups of runs."""
    every = (*choosing, *reported)
    own = {run.name: run.danger for run in every}
    groups = {"chosen_on": choosing, "reported": reported}
    found: dict[str, Any] = {
        "present rule": {"threshold": None, "paid_by": "rule"}
        | {group: judged(runs, own) for group, runs in groups.items()}
    }
    for name, (payer, read) in SCORES.items():
        series = {r.name: twice(r, s) for r in every if len((s := read(r))[0]) > 1}
        quiet = [series[r.name] for r in choosing if r.event is None and r.name in series]
        highest = [largest.max(initial=-np.inf) for _, largest in quiet]
        limit = float(max(highest, default=np.inf))  # nothing to choose it on: it never alarms
        alarms = {run: next((int(n) for n, v in zip(*both, strict=True) if v > limit), None)
                  for run, both in series.items()}  # fmt: skip
        found[name] = {"threshold": finite(limit), "paid_by": payer}
        found[name] |= {group: judged(runs, alarms) for group, runs in groups.items()}
    return found


def markdown(result: dict[str, Any]) -> str:
    """The table of the reported runs."""
    rows = []
    for name, one in result["detectors"].items():
        told, share = one["reported"], result["cost"].get(one["paid_by"])
        leads = [lead for lead in told["leads"].values() if lead is not None]
        spread = [step(f(leads)) if leads else "-" for f in (min, statistics.median_low, max)]
        warned = f"{len(leads)} of {len(told['leads'])}"
        false = f"{len(told['false'])} of {len(told['quiet'])}"
        paid = "-" if share is None else f"{100 * share:.2f} %"
        rows.append([name, number(one["threshold"]), warned, " / ".join(spread), false, paid])
    head = ["monitor", "threshold", "warned", "lead: least, median, most", "false alarms", "cost"]
    return table(head, rows)


def main() -> int:
    parser = shared.arguments(__doc__)
    for name in ("choose", "report"):
        parser.add_argument(f"--{name}", nargs="+", required=True, metavar="RUN", type=Path)
    parser.add_argument("--interval", type=int, default=50, help="the protocol's rivals")
    args = parser.parse_args()
    choosing, reported = ([*map(Watched.read, group)] for group in (args.choose, args.report))
    if all(run.event is not None for run in choosing):
        raise SystemExit("--choose: thresholds need a run without an event, as of compensated")
    every = args.interval
    phases = {"rule": 0, "entropy": every // 2, "alignment": 3 * every // 4}
    runs = [*choosing, *reported]
    shares = {name: [c for run in runs if (c := cost(run, phase, every)) is not None]
              for name, phase in phases.items()}  # fmt: skip
    result = {
        "interval": every,
        "cost": {name: statistics.median(found) for name, found in shares.items() if found},
        "detectors": compare(choosing, reported),
        "runs": {r.name: {"event": r.event, "steps": r.steps} for r in runs},
    }
    print(markdown(result))
    print(f"wrote {shared.write('rivals', {'side_by_side': shared.describe() | result}, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

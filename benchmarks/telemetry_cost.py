"""What an observation of the telemetry costs, from the step times of runs as they were made.

    python benchmarks/telemetry_cost.py RUN ... [--fresh] [--out DIR]

A RUN is a run directory whose every step is in metrics.csv (``logging.interval: 1``). An observed
step, a multiple of ``stability.interval``, and the one after it, which reads the record, are
compared with the median step around them; the same is done between observations, where nothing
should be found. Medians over an attempt: checkpoints and captures fall out, and so does an
observation that is slow now and then; the share is also given by means. A line an attempt, because
attempts may have had other numbers of GPUs. Writes the part ``runs`` of
docs/assets/telemetry_cost.json. The attempts that it has stay, with the commit they were read at,
unless ``--fresh`` is given: their records may be gone. No GPU, no torch.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import machine

from megatron_patch.stability import record

SETTLED = 100
"""Steps of an attempt that are left out: compilation, first allocations, clocks."""
AROUND = range(4, 20)
"""Distances of the steps that an observation is compared with."""
BETWEEN = 10
"""Distance of the steps where nothing is observed."""
FEWEST = 10  # observations
SHORTEST = AROUND.stop + 1
"""Interval from which the steps around an observation hold no other."""


def attempts(run: Path) -> list[dict[int, float]]:
    """Seconds by step of every attempt; its clock starts anew with it."""
    found: list[dict[int, float]] = []
    last = math.inf
    with (run / "metrics.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            elapsed = float(row["elapsed_seconds"])
            if elapsed < last:
                found.append({})
            found[-1][int(row["step"])] = float(row["step_seconds"])
            last = elapsed
    return found


def cost(seconds: dict[int, float], interval: int) -> dict[str, Any] | None:
    """Figures of one attempt; None if it has too few observations."""
    if not seconds:
        return None
    first, last = min(seconds) + SETTLED, max(seconds)
    observed, control, steps = [], [], []
    for step in range(first + interval - first % interval, last - AROUND.stop, interval):
        near = [seconds.get(step + sign * far) for far in AROUND for sign in (-1, 1)]
        usual = statistics.median(x for x in near if x is not None)
        observed.append(_extra(seconds, step, usual))
        control.append(_extra(seconds, step + BETWEEN, usual))
        steps.append(usual)
    if len(observed) < FEWEST:
        return None
    step_seconds = statistics.median(steps)
    extra, nothing = statistics.median(observed), statistics.median(control)
    return {
        "observations": len(observed),
        "from_step": min(seconds),
        "to_step": last,
        "step_seconds": step_seconds,
        "observation_seconds": extra,
        "between_seconds": nothing,
        "share": (extra - nothing) / interval / step_seconds,
    }


def _extra(seconds: dict[int, float], step: int, usual: float) -> float:
    return sum(seconds.get(s, usual) - usual for s in (step, step + 1))


def from_runs(runs: list[Path], *, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``known`` rows and those of every attempt that says enough; SystemExit for no run."""
    rows = list(known)
    for run in runs:
        try:
            interval = record.read(run).meta["interval"]
            there = json.loads((run / "environment.json").read_text())["attempts"]
            found = attempts(run)
        except (OSError, ValueError, KeyError) as error:
            told = f"{run} is no run directory with telemetry and metrics: {error}"
            raise SystemExit(told) from None
        if interval < SHORTEST:
            raise SystemExit(f"{run}: observed every {interval} steps; {SHORTEST} or more needed")
        if len(there) != len(found):
            raise SystemExit(f"{run}: {len(there)} attempts made, {len(found)} in its log")
        for attempt, seconds in zip(there, found, strict=True):
            figures = cost(seconds, interval)
            if figures is not None:
                facts = ("world_size", "gpu", "commit", "torch")
                made = {name: attempt.get(name) for name in facts}
                rows.append({"run": run.name, "interval": interval} | made | figures)
    if len(rows) == len(known):
        raise SystemExit(f"no attempt has {FEWEST} observations after its first {SETTLED} steps")
    return rows


def stored(folder: Path) -> list[dict[str, Any]]:
    """Attempts of the stored result; each names the commit it was read at."""
    path = folder / "telemetry_cost.json"
    old = (json.loads(path.read_text()) if path.exists() else {}).get("runs", {"attempts": []})
    return [{"read_at": old["commit"]} | row for row in old["attempts"]]


def main() -> int:
    parser = machine.parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--fresh", action="store_true", help="forget the stored attempts")
    args = parser.parse_args()
    rows = from_runs(args.runs, known=[] if args.fresh else stored(args.out))
    print(machine.write_result("telemetry_cost", {"attempts": rows}, args.out, part="runs"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

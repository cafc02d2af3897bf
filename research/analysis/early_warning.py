"""How early the warning rule fires in runs of one's own, and how often for nothing.

    python research/analysis/early_warning.py --judge RUN ... [--out DIR]

A RUN is a run directory with telemetry (``<run_dir>/stability``). Every run is judged by the
default rule with the warm-up that it had. Prints a line a run: the step of the first ``danger``,
the step at which the loss moved, and what came of it. With ``--out``, writes ``early_warning.json``
there. No GPU, no torch.

The loss *moves* where the median of `SMOOTH` records stands 0.1 nats above its lowest value after
the warm-up, or at the first record whose loss is not finite. Where the records end before the
median can move, the first whose loss is above 4.5 nats counts. A run that is warned and whose loss
does not move within its recorded steps is an alarm without an explosion; the outcome says so where
it was cut within `SHORT` steps.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import machine

from megatron_patch.stability import record
from megatron_patch.stability.warning import Point, Rule, Verdict

MOVE = 0.1  # nats
SMOOTH = 5  # records
HIGH = 4.5  # nats: the run is lost
SHORT = 1000  # steps: a run that ends sooner after its alarm shows nothing about it


def smoothed(values: Sequence[float]) -> list[float]:
    """Medians over the last `SMOOTH` values, one for every value from the `SMOOTH`-th on."""
    n = len(values)
    return [statistics.median(values[i - SMOOTH + 1 : i + 1]) for i in range(SMOOTH - 1, n)]


def first_move(points: list[Point], warm_up: int) -> int | None:
    """Step at which the smoothed loss has left its lowest value by MOVE nats, or is not finite."""
    # In the warm-up, too; and at once, because NaN has no place in a median.
    lost = next((p.step for p in points if not math.isfinite(p.loss)), math.inf)
    seen = [p for p in points if warm_up < p.step < lost]
    lowest = math.inf
    for i, loss in enumerate(smoothed([p.loss for p in seen])):
        if loss > lowest + MOVE:
            return seen[i + SMOOTH - 1].step
        lowest = min(lowest, loss)
    return None if lost == math.inf else int(lost)


def first_of(found: Iterable[tuple[int, Verdict]], level: str) -> tuple[int, str] | None:
    """(step, reason) of the first verdict of ``level``."""
    return next(((step, v.reason) for step, v in found if v.level == level), None)


def examine(run: Path) -> dict[str, Any]:
    """One run under the default rule, with its own warm-up; SystemExit if it has no telemetry."""
    if not (run / "stability" / "meta.json").is_file():
        raise SystemExit(f"{run}: no run directory with telemetry (stability/meta.json)")
    telemetry = record.read(run)
    warm_up = telemetry.rule.settle_steps
    rule = replace(Rule(), settle_steps=warm_up)
    points = telemetry.points(rule)
    # Not from its points alone: a run looks back on the one it continues, and begins anew where
    # its numerics change.
    found = telemetry.verdicts(rule)
    moved, high = first_move(points, warm_up), first_high(points, warm_up)
    first, watch = first_of(found, "danger"), first_of(found, "watch")
    alarm = None if first is None else first[0]
    gone = high if moved is None else moved
    return {
        "run": run.name,
        "steps": points[-1].step,
        "watch": None if watch is None else watch[0],
        "alarm": alarm,
        "reason": None if first is None else first[1],
        "loss_moved": moved,
        "loss_high": high,
        "lead": None if gone is None or alarm is None else gone - alarm,
        "outcome": outcome(points[-1].step, alarm=alarm, gone=gone),
    }


def first_high(points: list[Point], warm_up: int) -> int | None:
    """The first record whose loss is lost, in a run that has one before it whose loss is not."""
    late = [p for p in points if p.step > warm_up]
    begins = next((i for i, p in enumerate(late) if p.loss < HIGH), len(late))
    return next((p.step for p in late[begins:] if not p.loss < HIGH), None)


def outcome(end: int, *, alarm: int | None, gone: int | None) -> str:
    """What came of a run: ``gone`` is the step at which its loss moved, or was lost."""
    if gone is not None:
        return "missed" if alarm is None or alarm >= gone else "warned"
    if alarm is None:
        return "quiet"
    left = end - alarm
    return f"alarm, cut {left:,} steps later" if left < SHORT else "alarm, loss did not move"


def main() -> int:
    parser = machine.parser(__doc__, None)
    parser.add_argument("--judge", nargs="+", required=True, metavar="RUN", type=Path)
    args = parser.parse_args()
    rows = [examine(run) for run in args.judge]
    for row in rows:
        print(f"{row['run']:24} {row['outcome']:26} danger at {row['alarm']}, loss moved at "
              f"{row['loss_moved']}, lead {row['lead']}: {row['reason']}")  # fmt: skip
    if args.out:
        figures = {"rule": asdict(Rule()), "runs": rows}
        print(f"wrote {machine.write_result('early_warning', figures, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

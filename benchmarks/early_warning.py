"""How early the warning rule fires, and how often for nothing.

    python benchmarks/early_warning.py --choose CSV ... --judge CSV ... [--lead 800]
    python benchmarks/early_warning.py --judge RUN ... [--keep docs/results/early_warning_runs.json]

A RUN is a run directory with telemetry (``<run_dir>/stability``), or a CSV without a header whose
columns are step, mean and largest loss, mean and largest gradient norm of the steps since the row
before; ``RUN@1000`` says how long a CSV's learning-rate warm-up was (default 2000). The threshold
(danger_head_growth for run directories, danger_growth for CSVs, which know no heads) is chosen on
``--choose`` alone: the largest of a grid that warns every run whose loss moves at least ``--lead``
steps before, and no other. ``--judge`` are held out: nothing is fitted on them; without
``--choose`` the default rule is judged. Run directories and CSVs of something else are not mixed:
docs/results/early_warning_runs.json holds figures of this trainer's own runs, early_warning.json
those of recorded curves. No GPU, no torch. ``--keep`` takes the choice and the runs of an earlier
result over, whose records may be gone; a run that is judged now replaces its row there.
``--error-alone`` asks one sign of the rule by itself, the error of delta over its signal: what it
says with all others off, and (``--choose``) from which danger_error; early_warning_error.json.

The loss *moves* where the median of `SMOOTH` records stands 0.1 nats above its lowest value after
the warm-up, or at the first record whose loss is not finite. The median needs three records, so a
single one is there two records before. A run that is warned and whose loss does not move within its
recorded steps counts as an alarm without an explosion, whatever it would have done later; the
outcome says so where it was cut within `SHORT` steps. Where the records end before the median can
move, the first whose loss is lost is what counts.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from run_names import run_name

from megatron_patch.stability import record
from megatron_patch.stability.warning import SMOOTH, Point, Rule, Verdict, smoothed, verdicts

GRIDS = {
    "danger_growth": (1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0),
    "danger_head_growth": (1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0),
    "danger_error": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
}
MOVE = 0.1  # nats
HIGH = 4.5  # nats: the run is lost
SHORT = 1000  # steps: a run that ends sooner after its alarm shows nothing about it
WARM_UP = 2000
OTHERS = (
    "watch_growth",
    "danger_growth",
    "watch_head_growth",
    "danger_head_growth",
    "head_signal",
)
"""Thresholds of what is not the error."""


def load(name: str) -> tuple[str, list[Point], int]:
    """(label, records, warm-up steps) of a run directory or a CSV.

    Raises:
        SystemExit: it is neither.
    """
    path_text, _, warm_up = name.partition("@")
    path = Path(path_text)
    if path.is_dir():
        if not (path / "stability" / "meta.json").is_file():
            raise SystemExit(f"{path}: no run directory with telemetry (stability/meta.json)")
        telemetry = record.read(path)
        # Judged by today's rule, not by the one the run had; only its warm-up is its own.
        rule = replace(Rule(), settle_steps=telemetry.rule.settle_steps)
        return run_name(path), telemetry.points(rule), rule.settle_steps
    try:
        with path.open(newline="") as lines:
            rows = [[float(x) for x in row] for row in csv.reader(lines)]
        points = [
            Point(step=int(r[0]), loss=r[1], grad_norm=r[3], grad_norm_max=r[4]) for r in rows
        ]
    except (OSError, ValueError, IndexError) as error:
        raise SystemExit(
            f"{path}: neither a run directory nor a CSV of curves ({error})"
        ) from error
    return path.stem, points, int(warm_up or WARM_UP)


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


def judged(name: str, rule: Rule) -> list[tuple[int, Verdict]]:
    """(step, verdict) after every record, as a run with this rule gives them."""
    path = Path(name.partition("@")[0])
    if path.is_dir():
        # Not from its points alone: a run looks back on the one it continues, and begins anew
        # where its numerics change.
        return record.read(path).verdicts(rule)
    points = load(name)[1]
    return list(zip((p.step for p in points), verdicts(points, rule), strict=True))


def first_of(found: Iterable[tuple[int, Verdict]], level: str) -> tuple[int, str] | None:
    """(step, reason) of the first verdict of ``level``."""
    return next(((step, v.reason) for step, v in found if v.level == level), None)


def first_verdict(points: list[Point], rule: Rule, level: str) -> tuple[int, str] | None:
    """The same for records that one computation has made, with nothing before them."""
    return first_of(zip((p.step for p in points), verdicts(points, rule), strict=True), level)


def first_alarm(points: list[Point], rule: Rule, level: str = "danger") -> int | None:
    """Step of that."""
    found = first_verdict(points, rule, level)
    return None if found is None else found[0]


def warm_up_growth(name: str) -> dict[str, float] | None:
    """Head growth while the rule does not look yet, whatever the logits; None for CSVs.

    The largest, and the largest logit of a head that grew by `Rule.watch_head_growth` or more.
    """
    path = Path(name.partition("@")[0])
    if not path.is_dir():
        return None
    telemetry = record.read(path)
    early = replace(Rule(), settle_steps=0, head_logit=-math.inf)
    logits = telemetry.heads["max_logit"]
    found = [
        (p.growth.value, float(logits[i, p.growth.layer, p.growth.head]))
        for i, p in enumerate(telemetry.points(early))
        if p.step <= telemetry.rule.settle_steps and math.isfinite(p.growth.value)
    ]
    fast = [logit for growth, logit in found if growth >= early.watch_head_growth]
    return {
        "growth": max((growth for growth, _ in found), default=0.0),
        "logit": max(fast, default=0.0),
    }


def examine(name: str, rule: Rule) -> dict[str, Any]:
    """One run under one rule."""
    label, points, warm_up = load(name)
    rule = replace(rule, settle_steps=warm_up)
    found = judged(name, rule)
    moved = first_move(points, warm_up)
    first, watch = first_of(found, "danger"), first_of(found, "watch")
    alarm = None if first is None else first[0]
    high = first_high(points, warm_up)
    named = next((p.step for p in points if p.bias.value >= rule.head_signal), None)
    gone = high if moved is None else moved
    return {
        "run": label,
        "steps": points[-1].step,
        "alarm": alarm,
        "loss_moved": moved,
        "loss_high": high,
        "lead": None if gone is None or alarm is None else gone - alarm,
        "lead_to_high": None if high is None or alarm is None else high - alarm,
        "head_named": named,
        "head_telemetry": any(math.isfinite(p.bias.value) for p in points),
        "reason": None if first is None else first[1],
        "watch": None if watch is None else watch[0],
        "warm_up": warm_up_growth(name),
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


def rule_with(name: str, threshold: float) -> Rule:
    """The default rule with one threshold exchanged; danger_error with all other signs off."""
    if name == "danger_error":
        off = dict.fromkeys(OTHERS, math.inf)
        return replace(Rule(), danger_error=threshold, watch_logit=None, **off)
    watch = name.replace("danger", "watch")
    return replace(Rule(), **{name: threshold, watch: min(threshold, getattr(Rule(), watch))})


def choose(runs: list[str], lead: int, name: str) -> tuple[float | None, list[dict[str, Any]]]:
    """The threshold, and what every threshold of the grid does to the choosing runs."""
    best, table = None, []
    for threshold in GRIDS[name]:
        found = [examine(run, rule_with(name, threshold)) for run in runs]
        leads = [f["lead"] for f in found if f["loss_moved"] is not None]
        alarms = sum(f["outcome"].startswith("alarm") for f in found)
        good = alarms == 0 and bool(leads) and all(x is not None and x >= lead for x in leads)
        best = threshold if good else best
        table.append({name: threshold, "leads": leads, "false_alarms": alarms})
    return best, table


def kept(path: Path | None, name: str, new: set[str]) -> dict[str, Any]:
    """Choice and rows of an earlier result, judged by the same rule; rows name their commit."""
    empty: dict[str, Any] = {"chosen": None, "grid": [], "choosing": [], "held_out": []}
    if path is None:
        return empty
    old = machine.read_result(path, "--keep")
    if (old.get("threshold"), old.get("default")) != (name, getattr(Rule(), name)):
        raise SystemExit(f"--keep {path}: judged by another rule; judge all runs again")
    if both := sorted(new & {row["run"] for row in old["choosing"]}):
        raise SystemExit(f"--keep {path}: chosen on {', '.join(both)}; hold them out")
    # Records may be gone: what an earlier rule said of them stands, and the row says so.
    # Nor do records of 50 steps, which all are, differ by the keys that came last.
    # The last one takes away alarms of the norm beside which no head is at watch, and no other.
    last = ("smooth_steps", "confirm_steps", "norm_needs_head")
    judged = old.get("rule") or {}
    differs = {key: getattr(Rule(), key) for key in last} | judged != asdict(Rule())
    rows = {
        kind: [
            _mark(row, differs, "norm_needs_head" in judged)
            | {"commit": old["commit"]}
            | row
            | _told_again(row)
            for row in old[kind]
            if row["run"] not in new
        ]
        for kind in ("choosing", "held_out")
    }
    return {"chosen": old["chosen"], "grid": old["grid"], "wanted_lead": old["wanted_lead"], **rows}


def _mark(row: dict[str, Any], differs: bool, head_needed: bool) -> dict[str, bool]:
    """Whether a kept row is an earlier rule's: one that differed, or called a norm alone danger."""
    # Reasons come worst first. One that begins so was danger by the norm, whatever else it names.
    by_norm = row["alarm"] is not None and row["reason"].startswith("gradient norm")
    return {"earlier_rule": True} if differs or (by_norm and not head_needed) else {}


def _told_again(row: dict[str, Any]) -> dict[str, str]:
    """The outcome in today's words, of a row that shows it whole."""
    if row["loss_moved"] is None and row["loss_high"] is not None:
        return {}  # it may have begun with a loss that was lost
    return {"outcome": outcome(row["steps"], alarm=row["alarm"], gone=row["loss_moved"])}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--choose", nargs="+", default=[], metavar="RUN")
    parser.add_argument("--judge", nargs="+", default=[], metavar="RUN")
    parser.add_argument("--lead", type=int, default=800, help="steps of warning wanted")
    parser.add_argument("--source", help="what the runs are; needed for CSVs")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to add to")
    parser.add_argument("--error-alone", action="store_true", help="that sign of the rule only")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    if args.keep and args.choose:
        parser.error("--keep keeps the choice of that result; leave --choose out")
    both = {load(n)[0] for n in args.choose} & {load(n)[0] for n in args.judge}
    if both:
        parser.error(f"chosen on and judged by: {', '.join(sorted(both))}; hold them out")
    if not args.choose + args.judge:
        parser.error("name runs: --choose, --judge, or both")
    own = {Path(n.partition("@")[0]).is_dir() for n in (*args.choose, *args.judge)}
    if len(own) > 1:
        parser.error("run directories and CSVs of other programs are judged apart")
    product = own.pop()
    if not product and not args.source:
        parser.error("--source: say whose curves the CSVs are")
    if args.error_alone and not product:
        parser.error("--error-alone: curves of other programs know no heads")
    name, file = "danger_growth", "early_warning"
    if product:
        name, file = "danger_head_growth", "early_warning_runs"
    if args.error_alone:
        name, file = "danger_error", "early_warning_error"
    old = kept(args.keep, name, {load(n)[0] for n in args.judge})
    threshold, table = old["chosen"], old["grid"]
    if args.choose:
        threshold, table = choose(args.choose, args.lead, name)
    rule = Rule()
    if threshold is not None or args.error_alone:
        rule = rule_with(name, getattr(rule, name) if threshold is None else threshold)
    result = {
        "source": args.source or "run directories of this trainer",
        "product": product,
        "wanted_lead": old.get("wanted_lead", args.lead),
        "threshold": name,
        "chosen": threshold,
        "default": getattr(Rule(), name),
        "rule": asdict(Rule()),
        "grid": table,
        "choosing": old["choosing"] + [examine(name, rule) for name in args.choose],
        "held_out": old["held_out"] + [examine(name, rule) for name in args.judge],
    }
    path = machine.write_result(file, result, args.out)
    print(f"{name} {threshold} (default {getattr(Rule(), name)}); wrote {path}")
    for kind in ("choosing", "held_out"):
        for f in result[kind]:  # type: ignore[attr-defined]
            print(f"{kind:9} {f['run']:16} {f['outcome']:26} alarm {f['alarm']} "
                  f"loss moved {f['loss_moved']} lead {f['lead']}")  # fmt: skip
    return 0 if threshold is not None or not args.choose else 1


if __name__ == "__main__":
    sys.exit(main())

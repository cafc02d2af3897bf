"""Do heads that run away stop when one thing is changed? Reads the runs of attribution_continued.

    python benchmarks/continued_heads.py runs/stability_attribution_continued [--keep RESULT]

EXPERIMENT is the directory of an experiment whose cells continue a run ``base``, with one cell
``control`` in which nothing is changed. Writes docs/results/continued_heads.json; no GPU, no torch.
``--keep`` adds to the runs of an earlier result: every seed may be a job of its own.

The rule, fixed before any such run was made:

Heads. Per seed, from the base alone: the three heads whose largest logit is first above 1,000, in
that order (at one record the larger first); if fewer came so far, the largest at its end.

Judged at. The last record that a run and its control both have, and that is not later than the
first window with a gradient norm above 1 of the base or of the control: from there on the whole
model is going. Less than 500 steps after the start, or without a control: ``untold``.

Growth. A head's largest logit there (the median of its last three records, since single ones
scatter by a tenth or two) over that of the base at the step it is continued from, taken as at
least 1. A head counts if the control's growth is 2 or more: of one that hardly moves by itself (it
is saturated, or has not begun) nothing is told. If none counts: ``untold``.

Verdict. A head *stops* if its growth is at most 1.25, *slows* if it is below the square root of the
control's, and *goes on* otherwise. A run ``stops`` if all heads that count do, ``slows`` if all
stop or slow, and else ``goes on``; the control is judged like any (and can do nothing but go on,
or be untold). A logit that is not finite goes on.

What it cannot decide: whether a remedy would have kept the run from this state (one that prevents
it need not undo it, and the other way round); whether a head that stops for 800 steps stops for
good; whether a head that began to go only after the fork was taken by chance, with one run a cell
(a head at logits of some tens may drift by 1.25 when nothing is wrong with it). Growth is of
logits: a remedy that keeps them down while the weights grow shows in W_Q alone, which is no part
of the rule.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import head_timeline
import machine
import numpy as np

from megatron_patch.stability import record

HEADS = 3
RAN_AWAY = 1000.0
SMOOTH = 3
SHORTEST = 500
MOVES, STILL = 2.0, 1.25
AFTER = (250, 500, 750, 1000)
"""Steps after the start at which logits are told."""
CENTERED = ("k_centered", "v_centered")
UNSEEN = ("growth_noise", "error_to_signal")
"""What telemetry measures of `CENTERED` variants as if nothing were centered: no figure of the run.

The error of k_centered would be that of its O beside plain K's, so that what K - mean loses in
16 bits, by which logits and softmax differ, counts as an error of delta.
"""

Head = tuple[int, int]


def first_heads(base: record.Telemetry) -> list[tuple[Head, int | None]]:
    """The heads of a seed, and the step at which each was first above `RAN_AWAY`."""
    logits = np.nan_to_num(base.heads["max_logit"], nan=-np.inf, posinf=np.inf)
    large = logits > RAN_AWAY
    at = {(int(a), int(b)): int(large[:, a, b].argmax()) for a, b in np.argwhere(large.any(axis=0))}
    found = sorted(at, key=lambda head: (at[head], -logits[at[head]][head]))[:HEADS]
    by_size = (np.unravel_index(i, logits[-1].shape) for i in np.argsort(-logits[-1], axis=None))
    others = [(int(a), int(b)) for a, b in by_size if (int(a), int(b)) not in found]
    found += others[: HEADS - len(found)]
    return [(head, int(base.steps[at[head]]) if head in at else None) for head in found]


def judged_at(mine: np.ndarray, control: np.ndarray, *, start: int, last: int) -> int | None:
    """Step of the last record of both that is not after ``last``; None if that is too early."""
    both = np.intersect1d(mine, control)
    both = both[(both > start) & (both <= last)]
    return int(both[-1]) if len(both) and both[-1] >= start + SHORTEST else None


def growth(run: record.Telemetry, head: Head, *, before: float, step: int) -> float:
    """How often the logit at the fork a head's largest logits are at a step."""
    late = run.until(step).heads["max_logit"][-SMOOTH:, head[0], head[1]]
    return float(np.median(_finite(late))) / max(before, 1.0)


def head_verdict(mine: float, control: float) -> str:
    """By the rule above; ``""`` for a head that does not count."""
    if not control >= MOVES:
        return ""
    if mine <= STILL:
        return "stops"
    return "slows" if mine < math.sqrt(control) else "goes on"


def run_verdict(heads: list[str]) -> str:
    """Of a run from its heads'."""
    told = [verdict for verdict in heads if verdict]
    return next((v for v in ("goes on", "slows", "stops") if v in told), "untold")


class Seed:
    """The runs of one seed; ``facts`` of a run are those of the experiment's verdicts.json."""

    def __init__(self, parser: argparse.ArgumentParser, folder: Path, facts: dict[str, Any]):
        self.parser, self.folder, self.facts = parser, folder, facts
        cells = {run["cell"]: name for name, run in facts.items()}
        for cell in ("base", "control"):
            if cell not in cells:
                parser.error(f"{folder} has no cell {cell}: nothing says what the others change")
        self.base = head_timeline.read(parser, str(folder / "runs" / cells["base"]))
        self.control = cells["control"]
        events = [facts[cells[cell]]["first_large_gradient"] for cell in ("base", "control")]
        self.event = events[0]
        self.last = min(int(step) for step in (*events, self.base.steps[-1]) if step is not None)
        self.heads = first_heads(self.base)

    def examine(self, name: str) -> dict[str, Any] | None:
        """Figures of one continued run; None before its first record."""
        facts = self.facts[name]
        start = int(facts["origin"]["step"])
        mine = head_timeline.read(self.parser, str(self.folder / "runs" / name))
        if not len(mine.records):
            return None
        if facts["origin"]["event"] != self.event:
            self.parser.error(
                f"{name} continues a run with its event at {facts['origin']['event']:,}, and the "
                f"base that is here has it at {self.event or 'no step'}: they are of two machines"
            )
        step = self._judged_at(mine, start)
        heads = [self._head(head, above, mine, start, step) for head, above in self.heads]
        if facts["variant"] in CENTERED:
            heads = [one | dict.fromkeys(UNSEEN) for one in heads]
        return {
            "cell": facts["cell"],
            "seed": facts["seed"],
            "place": [*self.facts].index(name),
            "state": facts["state"],
            "from_step": start,
            "event": self.event,
            "judged_at": step,
            "until": int(mine.steps[-1]),
            "first_large_gradient": facts["first_large_gradient"],
            "heads": heads,
            "verdict": run_verdict([one["verdict"] for one in heads]),
        }

    def _judged_at(self, mine: record.Telemetry, start: int) -> int | None:
        origin = self.facts[self.control].get("origin")
        if origin is None or origin["step"] != start or not _here(self.folder, self.control):
            return None  # or it was started and ended before its first record
        return judged_at(mine.steps, self._control.steps, start=start, last=self.last)

    @functools.cached_property
    def _control(self) -> record.Telemetry:
        return head_timeline.read(self.parser, str(self.folder / "runs" / self.control))

    def _head(
        self, head: Head, above: int | None, mine: record.Telemetry, start: int, step: int | None
    ) -> dict[str, Any]:
        fork = _at(self.base, "max_logit", head, start)
        if fork is None:
            self.parser.error(f"the base has no record of step {start:,}, where others begin")
        told = {"0": fork} | {str(n): _at(mine, "max_logit", head, start + n) for n in AFTER}
        told["end"] = _at(mine, "max_logit", head, int(mine.steps[-1]))
        here = mine if step is None else mine.until(step)
        signal = record.error_to_signal(
            here.heads["used_error_rms"][:, head[0], head[1]],
            here.heads["kappa"][:, head[0], head[1]],
        )
        grown = control = None
        if step is not None:
            grown = growth(mine, head, before=fork, step=step)
            control = growth(self._control, head, before=fork, step=step)
        verdict = "" if grown is None or control is None else head_verdict(grown, control)
        return {
            "layer": head[0],
            "head": head[1],
            "above_1000_at": above,
            "logit": told,
            "growth": _json(grown),
            "control": _json(control),
            "growth_noise": _median(here.heads["growth_noise"][:, head[0], head[1]]),
            "error_to_signal": _median(signal),
            "common": [
                _at(self.base, "common_logit", head, start),
                _at(mine, "common_logit", head, int(mine.steps[-1])),
            ],
            "wq_norm": [
                _at(self.base, "wq_norm", head, start),
                _at(mine, "wq_norm", head, int(mine.steps[-1])),
            ],
            "verdict": verdict,
        }


def _finite(values: np.ndarray) -> np.ndarray:
    """A logit that is not finite is larger than any."""
    return np.where(np.isfinite(values), values, np.inf)


def _json(value: float | None) -> float | None:
    """JSON has no infinity; a growth that is none is the largest number there is."""
    return None if value is None else min(value, sys.float_info.max)


def _median(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _at(run: record.Telemetry, name: str, head: Head, step: int) -> float | None:
    """A figure of one record; None without it, where it is not finite, or not measured then."""
    found = np.flatnonzero(run.steps == step)
    there = len(found) and name in run.heads
    value = float(run.heads[name][int(found[0]), head[0], head[1]]) if there else math.nan
    return value if math.isfinite(value) else None


def _here(folder: Path, name: str) -> bool:
    """Whether a run's telemetry is here: results may tell of runs of other machines."""
    return (folder / "runs" / name / record.FOLDER / "meta.json").is_file()


def examine(parser: argparse.ArgumentParser, folder: Path) -> dict[str, Any]:
    """Every continued run of an experiment that has records, in the protocol's order."""
    path = folder / "results" / "verdicts.json"
    try:
        runs = {run["run"]: run for run in json.loads(path.read_text())["runs"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{folder} has no results: megatron-patch experiment results ({error})")
    counted = {name: run for name, run in runs.items() if not run.get("repeat_of")}
    found: dict[str, Any] = {}
    for number in dict.fromkeys(run["seed"] for run in counted.values()):
        facts = {name: run for name, run in counted.items() if run["seed"] == number}
        begun = [name for name, run in facts.items() if run.get("origin") and _here(folder, name)]
        if not begun:
            continue
        seed = Seed(parser, folder, facts)
        found |= {name: one for name in begun if (one := seed.examine(name)) is not None}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to add to")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    runs = machine.kept_runs(machine.read_result(args.keep, "--keep")) if args.keep else {}
    found = examine(parser, args.experiment)
    if not found:
        parser.error(f"{args.experiment} has no run that continues another one and has records")
    result = {"runs": runs | found}
    print(f"wrote {machine.write_result('continued_heads', result, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

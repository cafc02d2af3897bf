"""Do heads that run away stop when one thing is changed? Reads runs of attribution_continued.

    python research/analysis/continued.py runs/stability_attribution_continued

EXPERIMENT is the directory of an experiment whose cells continue a run ``base``, with one cell
``control`` in which nothing is changed. Writes a section of continued_heads.json, ``runs`` for
attribution_continued and the protocol's name for others, and prints its table; no GPU, no torch.
The rule was fixed before any such run was made:

Heads. Per seed, from the base alone: the three whose largest logit is first above 1,000, in that
order (at one record the larger first); if fewer came so far, the largest at its end.

Judged at. The last record that a run and its control both have, not later than the first window
with a gradient norm above 1 of the base or of the control. Less than 500 steps after the start, or
without a control: ``untold``.

Growth. A head's largest logit there (the median of its last three records) over that of the base
at the step it is continued from, taken as at least 1. A head counts if the control's growth is 2 or
more. A logit that is not finite is larger than any.

Verdict. A head *stops* if its growth is at most 1.25, *slows* if it is below the square root of the
control's, and *goes on* otherwise. A run ``stops`` if all heads that count do, ``slows`` if all
stop or slow, and else ``goes on``; if no head counts it is ``untold``.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import shared
from heads import RAN_AWAY, Place, first_where

from megatron_patch.stability import names, record

HEADS, SMOOTH, SHORTEST = 3, 3, 500
MOVES, STILL = 2.0, 1.25
AFTER = (250, 500, 750, 1000)
"""Steps after the start at which logits are told."""
CENTERED = ("k_centered", "v_centered")
UNSEEN = ("growth_noise", "error_to_signal")
"""What telemetry measures of `CENTERED` variants as if nothing were centered: no figure of them."""


def first_heads(base: record.Telemetry) -> list[tuple[Place, int | None]]:
    """The heads of a seed, and the step at which each was first above 1,000."""
    logits = np.nan_to_num(base.heads["max_logit"], nan=-np.inf, posinf=np.inf)
    at = first_where(logits > RAN_AWAY)
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


def growth(run: record.Telemetry, head: Place, *, before: float, step: int) -> float:
    """How often the logit at the start a head's largest logits are at a step."""
    late = run.until(step).heads["max_logit"][-SMOOTH:, head[0], head[1]]
    largest = float(np.median(np.where(np.isfinite(late), late, np.inf)))
    return min(largest / max(before, 1.0), sys.float_info.max)  # JSON has no infinity


def head_verdict(mine: float, control: float) -> str:
    """By the rule above; ``""`` for a head that does not count."""
    if not control >= MOVES:
        return ""
    if mine <= STILL:
        return "stops"
    return "slows" if mine < math.sqrt(control) else "goes on"


def run_verdict(heads: list[str]) -> str:
    """Of a run from its heads'."""
    return next((v for v in ("goes on", "slows", "stops") if v in heads), "untold")


def examine_seed(folder: Path, facts: dict[str, Any], begun: list[str]) -> dict[str, Any]:
    """Continued runs of one seed; ``facts`` are its rows of the experiment's verdicts.json."""
    cells = {run["cell"]: name for name, run in facts.items()}
    if missing := {"base", "control"} - cells.keys():
        raise SystemExit(f"{folder} has no cell {', '.join(missing)}")
    runs = {n: shared.telemetry(folder / "runs" / n) for n in {cells["base"], *begun}}
    base, control = runs[cells["base"]], runs.get(cells["control"])
    events = [facts[cells[cell]]["first_large_gradient"] for cell in ("base", "control")]
    last = min(int(step) for step in (*events, base.steps[-1]) if step is not None)
    chosen = first_heads(base)
    found = {}
    for name in begun:
        one, mine = facts[name], runs[name]
        start = int(one["origin"]["step"])
        if one["origin"]["event"] != events[0]:
            raise SystemExit(f"{name} continues another base: its event is not {events[0]}")
        same = control is not None and facts[cells["control"]]["origin"]["step"] == start
        at = judged_at(mine.steps, control.steps, start=start, last=last) if same else None
        told = [_head(head, above, (base, control, mine), start, at) for head, above in chosen]
        if one["variant"] in CENTERED:
            told = [head | dict.fromkeys(UNSEEN) for head in told]
        found[name] = {
            **{key: one[key] for key in ("cell", "seed", "state", "first_large_gradient")},
            "place": [*facts].index(name),
            "from_step": start,
            "event": events[0],
            "judged_at": at,
            "until": int(mine.steps[-1]),
            "heads": told,
            "verdict": run_verdict([head["verdict"] for head in told]),
        }
    return found


def _head(head: Place, above: int | None, runs: Any, start: int, at: int | None) -> dict[str, Any]:
    base, control, mine = runs
    fork = _figure(base, "max_logit", head, start)
    if fork is None:
        raise SystemExit(f"the base has no record of step {start:,}, where others begin")
    end = int(mine.steps[-1])
    logit = {"0": fork} | {str(n): _figure(mine, "max_logit", head, start + n) for n in AFTER}
    here = mine if at is None else mine.until(at)
    values = {name: here.heads[name][:, head[0], head[1]] for name in here.heads}
    signal = names.error_to_signal(values["used_error_rms"], values["kappa"])
    grown = beside = None
    if at is not None:
        grown = growth(mine, head, before=fork, step=at)
        beside = growth(control, head, before=fork, step=at)
    return {
        "layer": head[0],
        "head": head[1],
        "above_1000_at": above,
        "logit": logit | {"end": _figure(mine, "max_logit", head, end)},
        "growth": grown,
        "control": beside,
        "growth_noise": _median(values["growth_noise"]),
        "error_to_signal": _median(signal),
        **{
            key: [_figure(base, name, head, start), _figure(mine, name, head, end)]
            for key, name in (("common", "common_logit"), ("wq_norm", "wq_norm"))
        },
        "verdict": "" if grown is None or beside is None else head_verdict(grown, beside),
    }


def _figure(run: record.Telemetry, name: str, head: Place, step: int) -> float | None:
    """A figure of one record; None without it, where it is not finite, or not measured then."""
    found = np.flatnonzero(run.steps == step)
    there = len(found) and name in run.heads
    return shared.finite(run.heads[name][int(found[0]), head[0], head[1]]) if there else None


def _median(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def section(protocol: str) -> str:
    """Of the result file: other protocols have runs of the same names."""
    return protocol.removeprefix("stability_").replace("attribution_continued", "") or "runs"


def markdown(found: dict[str, Any]) -> str:
    """A line a run: growth of each head, that of the control's behind it, and verdicts."""
    number, rows = shared.number, []
    for name, run in found.items():
        heads = [f"{h['layer']}.{h['head']}: {number(h['growth'])} ({number(h['control'])})"
                 for h in run["heads"]]  # fmt: skip
        at = [shared.step(run[key]) for key in ("from_step", "judged_at", "until")]
        rows.append([name, *at, "; ".join(heads), run["verdict"]])
    head = ["run", "from step", "judged at", "until", "heads: growth (control)", "verdict"]
    return shared.table(head, rows)


def _recorded(run: Path) -> bool:
    """Whether a run's telemetry is here: results may tell of runs of other machines."""
    return (run / record.FOLDER / "meta.json").is_file()


def main() -> int:
    parser = shared.arguments(__doc__)
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT")
    args = parser.parse_args()
    path = args.experiment / "results" / "verdicts.json"
    try:
        result = json.loads(path.read_text())
        rows, protocol = result["runs"], str(result.get("name", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{args.experiment} has no results: {error}")
    counted = {run["run"]: run for run in rows if not run.get("repeat_of")}
    found: dict[str, Any] = {}
    for seed in dict.fromkeys(run["seed"] for run in counted.values()):
        facts = {name: run for name, run in counted.items() if run["seed"] == seed}
        begun = [name for name, run in facts.items() if run.get("origin")]
        if begun := [name for name in begun if _recorded(args.experiment / "runs" / name)]:
            found |= examine_seed(args.experiment, facts, begun)
    if not found:
        parser.error(f"{args.experiment} has no run that continues another one and has records")
    print(markdown(found))
    print(f"wrote {shared.add_runs('continued_heads', section(protocol), found, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

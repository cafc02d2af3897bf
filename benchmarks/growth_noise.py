"""How much of what moves a head's logits is error, through whole runs, from their telemetry.

    python benchmarks/growth_noise.py RUN ... [--keep docs/results/growth_noise.json]

A RUN is a run directory whose telemetry has ``growth_noise`` (docs/telemetry.md): per head, what
the errors of delta add to the derivative by a factor on the head's logits, over that derivative.
From 1 on the error decides. Looked at are the records before any head's logits pass the early
warning's ``watch_logit`` (the whole run if none's do), because saturated heads have no derivative
left; single records scatter, so a head has passed 1 when the median of its last `SMOOTH` records
has. Beside that, the heads whose logits pass ``watch_logit`` first: when, and when their ratio
had passed 1. Writes docs/results/growth_noise.json. No GPU, no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import head_timeline
import machine
import numpy as np
from run_names import run_name

from megatron_patch.stability import record
from megatron_patch.stability.warning import SMOOTH, Rule

DECIDES = 1.0
"""Ratio from which the error is larger than the derivative."""
FIRST = 3
"""Heads named of those that went."""
QUANTILES = {"median": 0.5, "p99": 0.99, "largest": 1.0}


def examine(telemetry: record.Telemetry) -> dict[str, Any] | None:
    """Figures of one run; None if it has not measured the ratio."""
    noise = telemetry.heads.get("growth_noise")
    if noise is None or np.isnan(noise).all():
        return None
    logits, steps = np.nan_to_num(telemetry.heads["max_logit"]), telemetry.steps
    limit = Rule().watch_logit
    assert limit is not None
    large = first_where(logits >= limit)
    end = min([*large.values(), len(steps)])
    before = noise[:end]
    passed = first_where(medians(noise) >= DECIDES)
    went = sorted(large, key=lambda head: (large[head], -logits[large[head]][head]))[:FIRST]
    return {
        "heads": noise[0].size,
        "until": int(steps[-1]),
        "before_step": int(steps[end]) if end < len(steps) else None,
        **{name: float(np.nanquantile(before, q)) for name, q in QUANTILES.items()},
        "passed": [
            place(head) | at(passed[head], steps, logits, head)
            for head in sorted(passed, key=lambda head: passed[head])
            if passed[head] < end
        ],
        "went": [
            place(head)
            | {"step": int(steps[large[head]])}
            | {"passed": at(passed[head], steps, logits, head) if head in passed else None}
            for head in went
        ],
    }


def medians(noise: np.ndarray) -> np.ndarray:
    """Median of the last `SMOOTH` records up to each; nothing is known before the SMOOTH-th.

    A record without a figure (a saturated head has no derivative) is one where the error decides.
    """
    filled = np.where(np.isnan(noise), np.inf, noise)
    found = np.full(noise.shape, -np.inf)
    for i in range(SMOOTH - 1, len(noise)):
        found[i] = np.median(filled[i - SMOOTH + 1 : i + 1], axis=0)
    return found


def first_where(hit: np.ndarray) -> dict[tuple[int, int], int]:
    """(layer, head) -> index of the first record where it is so."""
    there = np.argwhere(hit.any(axis=0))
    return {(int(a), int(b)): int(hit[:, a, b].argmax()) for a, b in there}


def place(head: tuple[int, int]) -> dict[str, Any]:
    return {"layer": head[0], "head": head[1]}


def at(i: int, steps: np.ndarray, logits: np.ndarray, head: tuple[int, int]) -> dict[str, Any]:
    """Step and largest logit of a record."""
    return {"step": int(steps[i]), "largest_logit": float(logits[i][head])}


def of_every_run(
    doc: str | None,
    name: str,
    examine: Callable[[record.Telemetry], dict[str, Any] | None],
    *,
    metric: str,
) -> int:
    """A script that writes figures of every run; ``examine`` knows none without ``metric``."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to add to")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    runs = machine.kept_runs(machine.read_result(args.keep, "--keep")) if args.keep else {}
    for run in args.runs:
        telemetry = head_timeline.read(parser, run)
        found = examine(telemetry) if len(telemetry.records) else None
        if found is None:
            parser.error(f"{run} has no record with {metric}: other software, or too early")
        runs[run_name(run)] = {"attention": telemetry.meta["attention"]} | found
    print(f"wrote {machine.write_result(name, {'runs': runs}, args.out)}")
    return 0


def main() -> int:
    return of_every_run(__doc__, "growth_noise", examine, metric="growth_noise")


if __name__ == "__main__":
    sys.exit(main())

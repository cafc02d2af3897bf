"""Which heads have the largest errors of delta, long before and beside those that run away.

    python benchmarks/head_errors.py RUN ... --steps 500 1000 2000 3000 4000

A RUN is a run directory with telemetry (``<run_dir>/stability``). Between each two of the steps,
per head, over the records of the run:

    error = mean of (delta_error_rms x delta_rms): what a plain 16-bit O gets wrong in delta,
            absolute, because that is what reaches dQ; told over the median head's
    t     = mean of delta_error_mean / its standard error: in RMS over heads, with n records,
            sqrt((n - 1) / (n - 3)) where heads err to both sides alike (Student's distribution),
            larger where they err to one side

beside the heads with the largest logits at the run's last record, of those that pass the early
warning's ``watch_logit`` there: they ran away; and the largest logit of the whole run. Writes
docs/results/head_errors.json. No GPU, no torch.
``--keep`` adds to the runs of an earlier result, whose records may be gone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import head_timeline
import machine
import numpy as np
from run_names import run_name

from megatron_patch.stability import record
from megatron_patch.stability.warning import Rule

WENT = 3
"""Heads named."""
FEWEST = 4  # records; with fewer t has no variance
SURE = 3.0
"""Standard errors from which a mean would be believed."""


def ran_away(telemetry: record.Telemetry) -> list[list[int]]:
    """[layer, head] of the `WENT` largest logits at the last record, of those that grew so far."""
    logits = np.nan_to_num(telemetry.heads["max_logit"][-1])
    limit = Rule().watch_logit
    assert limit is not None
    return [head for head in _largest(logits) if logits[tuple(head)] >= limit]


def between(telemetry: record.Telemetry, after: int, until: int) -> dict[str, Any] | None:
    """Errors of the records in (after, until]; None if there are too few of them."""
    rows = (telemetry.steps > after) & (telemetry.steps <= until)
    if rows.sum() < FEWEST:
        return None
    heads = {n: v[rows].astype(np.float64) for n, v in telemetry.heads.items()}
    error = (heads["delta_error_rms"] * heads["delta_rms"]).mean(axis=0)
    mean = heads["delta_error_mean"]
    spread = mean.std(axis=0, ddof=1) / np.sqrt(len(mean))
    t = mean.mean(axis=0) / spread
    largest = _largest(error)
    return {
        "after": after,
        "until": until,
        "records": int(rows.sum()),
        "largest": largest,
        "over_median": _over_median(error, largest),
        "delta_over_median": _over_median(heads["delta_rms"].mean(axis=0), largest),
        "t_rms": float(np.sqrt((t**2).mean())),
        "t_rms_unbiased": float(np.sqrt((len(mean) - 1) / (len(mean) - 3))),
        # As a share of the RMS error of the head: what its mean would have to be to be seen.
        "seen_from": float(np.median(SURE * spread / heads["delta_error_rms"].mean(axis=0))),
    }


def _over_median(values: np.ndarray, heads: list[list[int]]) -> list[float]:
    return [float(values[i, j] / np.median(values)) for i, j in heads]


def _largest(values: np.ndarray) -> list[list[int]]:
    order = np.argsort(-values, axis=None)[:WENT]
    return [[int(i) for i in np.unravel_index(k, values.shape)] for k in order]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--steps", type=int, nargs="+", required=True, help="two or more, rising")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to add to")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    if len(args.steps) < 2 or sorted(set(args.steps)) != args.steps:
        parser.error(f"--steps {args.steps}: two or more, each larger than the one before")
    runs: dict[str, Any] = {}
    if args.keep:
        old = machine.read_result(args.keep, "--keep")
        if old.get("steps") != args.steps:
            parser.error(f"{args.keep} is of --steps {old.get('steps')}")
        runs = machine.kept_runs(old)
    for name in args.runs:
        telemetry = head_timeline.read(parser, name)
        if not len(telemetry.records):
            parser.error(f"{name} has no records yet")
        spans = [between(telemetry, *pair) for pair in itertools.pairwise(args.steps)]
        runs[run_name(name)] = {
            "attention": telemetry.meta["attention"],
            "until": int(telemetry.steps[-1]),
            "heads": int(telemetry.meta["layers"] * telemetry.meta["heads"]),
            "ran_away": ran_away(telemetry),
            "largest_logit": float(np.nanmax(telemetry.heads["max_logit"])),
            "between": [span for span in spans if span is not None],
        }
    result = {"steps": args.steps, "runs": runs}
    print(f"wrote {machine.write_result('head_errors', result, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

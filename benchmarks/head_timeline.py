"""One attention head through several runs: logits, weights, entropy, beside loss and gradient norm.

    python benchmarks/head_timeline.py RUN ... --layer 1 --head 8 --steps 2000 4000 6000

A RUN is a run directory with telemetry (``<run_dir>/stability``); every run is read at the records
of the same steps. Writes docs/results/head_timeline.json. No GPU, no torch. ``--keep`` adds to the
runs of an earlier result, whose records may be gone.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import numpy as np
from run_names import run_name

from megatron_patch.stability import record

HEAD = (
    *("max_logit", "common_logit", "wq_norm", "wk_norm", "entropy", "kappa"),
    *("used_error_rms", "growth_noise"),
)
RUN = ("loss_mean", "grad_norm_mean")


def at(telemetry: record.Telemetry, step: int, layer: int, head: int) -> dict[str, Any] | None:
    """Figures of one record; None if the run has no record of that step."""
    found = np.flatnonzero(telemetry.steps == step)
    if not len(found):
        return None
    i = int(found[0])
    values = {name: float(telemetry.scalars[name][i]) for name in RUN}
    known = [name for name in HEAD if name in telemetry.heads]  # earlier versions measured fewer
    values |= {name: float(telemetry.heads[name][i, layer, head]) for name in known}
    # JSON knows no NaN.
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def read(parser: argparse.ArgumentParser, name: str) -> record.Telemetry:
    """The telemetry of a run that was named on the command line."""
    try:
        return record.read(name)
    except (OSError, ValueError) as error:
        parser.error(f"{name} is no run directory with telemetry: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--layer", type=int, required=True, help="counted from 0")
    parser.add_argument("--head", type=int, required=True, help="counted from 0")
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to add to")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    runs: dict[str, Any] = {}
    if args.keep:
        old = machine.read_result(args.keep, "--keep")
        if (old.get("layer"), old.get("head")) != (args.layer, args.head):
            parser.error(f"{args.keep} is about layer {old.get('layer')}, head {old.get('head')}")
        runs = machine.kept_runs(old)
    for name in args.runs:
        telemetry = read(parser, name)
        layers, heads = telemetry.meta["layers"], telemetry.meta["heads"]
        if not (0 <= args.layer < layers and 0 <= args.head < heads):
            parser.error(f"{name} has {layers} layers of {heads} heads, counted from 0")
        rows = {step: at(telemetry, step, args.layer, args.head) for step in args.steps}
        runs[run_name(name)] = {"attention": telemetry.meta["attention"], "at": rows}
    result = {"layer": args.layer, "head": args.head, "runs": runs}
    print(f"wrote {machine.write_result('head_timeline', result, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

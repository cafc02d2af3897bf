"""The largest logit of every head of one layer, at some steps of several runs.

    python benchmarks/layer_heads.py RUN ... --layer 1 --steps 2000 4000 5300

`head_timeline.py` follows one head; this tells which of its neighbours go with it. A RUN is a run
directory with telemetry (``<run_dir>/stability``). Writes docs/results/layer_heads.json. No GPU, no
torch. ``--keep`` adds to the runs of an earlier result, whose records may be gone.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import numpy as np
from head_timeline import read
from run_names import run_name

from megatron_patch.stability import record


def rows_at(
    parser: argparse.ArgumentParser,
    name: str,
    telemetry: record.Telemetry,
    *,
    steps: Sequence[int],
    figures: Callable[[int], Any],
) -> dict[int, Any]:
    """By step, ``figures`` of its record; a step without one is a wrong argument."""
    index = {int(step): i for i, step in enumerate(telemetry.steps)}
    missing = [str(step) for step in steps if step not in index]
    if missing:
        every, last = telemetry.meta["interval"], max(index, default=0)
        parser.error(
            f"{name} has no record of step {', '.join(missing)}; it has one every {every} "
            f"steps, the last at {last}"
        )
    return {step: figures(index[step]) for step in steps}


def logits_of(telemetry: record.Telemetry, layer: int, i: int) -> list[float | None]:
    """Of record ``i``: the largest logit, head by head; None where it is not finite."""
    values = telemetry.heads["max_logit"][i, layer].tolist()
    return [value if np.isfinite(value) else None for value in values]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--layer", type=int, required=True, help="counted from 0")
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to add to")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    runs: dict[str, Any] = {}
    if args.keep:
        old = machine.read_result(args.keep, "--keep")
        if old.get("layer") != args.layer:
            parser.error(f"{args.keep} is about layer {old.get('layer')}")
        runs = machine.kept_runs(old)
    for name in args.runs:
        telemetry = read(parser, name)
        if not 0 <= args.layer < telemetry.meta["layers"]:
            parser.error(f"{name} has {telemetry.meta['layers']} layers, counted from 0")
        figures = functools.partial(logits_of, telemetry, args.layer)
        rows = rows_at(parser, name, telemetry, steps=args.steps, figures=figures)
        runs[run_name(name)] = {"attention": telemetry.meta["attention"], "at": rows}
    result = {"layer": args.layer, "runs": runs}
    print(f"wrote {machine.write_result('layer_heads', result, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

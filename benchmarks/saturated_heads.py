"""How many heads have run away, and where, at some steps of several runs.

    python benchmarks/saturated_heads.py RUN ... --steps 7000 8000

A RUN is a run directory with telemetry (``<run_dir>/stability``). A head counts from logits of the
early warning's ``watch_logit`` on (1,000; what is not finite counts). Told of a record: how many,
by layer; of those heads the largest logit and W_Q, and medians of W_Q (spectral norm), of the
entropy of a row (nats; 0: it sees one key) and of the share of the logits that all keys have in
common (`record.common_share`; such a part makes logits and no attention); the gradient norms of
layers in that step, the largest and the median; loss and gradient norm since the record before.
Writes docs/results/saturated_heads.json. No GPU, no torch. ``--keep`` adds to the runs of an
earlier result, whose records may be gone, or that was read at other steps.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import numpy as np
from head_timeline import RUN, read
from layer_heads import rows_at
from run_names import run_name

from megatron_patch.stability import record
from megatron_patch.stability.warning import Rule

ABOVE = Rule().watch_logit


def examine(telemetry: record.Telemetry, i: int) -> dict[str, Any]:
    """Figures of record ``i``; None where there are none."""
    heads = {name: values[i] for name, values in telemetry.heads.items()}
    logits = np.nan_to_num(heads["max_logit"], nan=math.inf)
    gone = logits > ABOVE
    counts = {int(layer): int(n) for layer, n in enumerate(gone.sum(axis=1)) if n}
    found: dict[str, Any] = {"heads": int(gone.sum()), "by_layer": counts}
    found["largest_logit"] = _finite(logits[gone].max(initial=-math.inf))
    found["largest_wq_norm"] = _finite(heads["wq_norm"][gone].max(initial=-math.inf))
    for name in ("wq_norm", "entropy"):
        found[f"median_{name}"] = _median(heads[name][gone])
    if "common_logit" in heads:
        share = record.common_share(heads["common_logit"], np.where(gone, logits, math.nan))
        found["median_common_share"] = _median(share[gone])
    if (norms := telemetry.layers.get("grad_norm")) is not None and np.isfinite(norms[i]).any():
        layer = int(np.nanargmax(norms[i]))
        found |= {"largest_layer": layer, "largest_layer_grad_norm": _finite(norms[i][layer])}
        found["median_layer_grad_norm"] = _median(norms[i])
    return found | {name: _finite(telemetry.scalars[name][i]) for name in RUN}


def _median(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to add to")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    runs = machine.kept_runs(machine.read_result(args.keep, "--keep")) if args.keep else {}
    for name in args.runs:
        telemetry = read(parser, name)
        figures = functools.partial(examine, telemetry)
        rows = rows_at(parser, name, telemetry, steps=args.steps, figures=figures)
        runs[run_name(name)] = {"attention": telemetry.meta["attention"], "at": rows}
    result = {"above": ABOVE, "runs": runs}
    print(f"wrote {machine.write_result('saturated_heads', result, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

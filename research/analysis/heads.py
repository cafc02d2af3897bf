"""Attention heads through runs, from their telemetry: which run away, when, and what tells it.

    python research/analysis/heads.py at RUN ... --layer 1 --steps 2000 4000    heads.csv
    python research/analysis/heads.py errors RUN ... --steps 500 1000 2000      head_figures.json
    python research/analysis/heads.py noise RUN ...
    python research/analysis/heads.py common RUN ...
    python research/analysis/heads.py saturated RUN ... --steps 7000 8000

A RUN is a run directory with telemetry (``<run_dir>/stability``). No GPU, no torch. Heads are told
as layer and head, counted from 0. A head has *run away* when its largest logit is above 1,000, the
early warning's ``watch_logit``.

at          figures of every head of a layer (of one with ``--head``) at some steps
errors      between each two steps, per head: mean of delta_error_rms x delta_rms, what a plain
            16-bit O gets wrong in delta, absolute, over the median head's; t of the mean error, in
            RMS over heads: sqrt((n - 1) / (n - 3)) for n records of errors without a side
noise       growth_noise: what errors of delta add to the derivative by a factor on a head's
            logits, over that derivative; quantiles before the first head runs away, and heads
            whose median of five records passes 1, where the error decides
common      common_logit over the largest logit: the share that all keys have in common, by which
            the loss has no derivative; of heads that run away where their logits pass 100, and
            the first heads of the model whose median of five is above 0.4, 0.5 and 0.6
saturated   heads above 1,000 at some steps, by layer, with medians of their W_Q, entropy, share
"""

from __future__ import annotations

import csv
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import shared

from megatron_patch.stability import names, record
from megatron_patch.stability.warning import SMOOTH, Rule

Place = tuple[int, int]
RAN_AWAY = Rule().watch_logit or 1000.0
FIRST, NAMED = 3, 6
"""Heads told of those that ran away, and of those that pass a share."""
FEWEST, SURE = 4, 3.0
"""Records from which t has a variance; standard errors from which a mean would be believed."""
SHARES, LARGE, SPEAKS, SMALL, FROM = (0.4, 0.5, 0.6), 100.0, 20.0, 5.0, 1000
OF_HEADS = (
    *("max_logit", "common_logit", "wq_norm", "wk_norm", "entropy", "kappa"),
    *("used_error_rms", "growth_noise"),
)
OF_RUN = ("loss_mean", "grad_norm_mean")
COLUMNS = ("run", "step", "layer", "head", *OF_HEADS, *OF_RUN, "sources")


def rows_at(run: record.Telemetry, steps: Sequence[int], layer: int, heads: Sequence[int]) -> Any:
    """Rows of heads.csv without run and source; steps without a record have none."""
    for i in np.flatnonzero(np.isin(run.steps, steps)):
        for head in heads:
            found = {"step": int(run.steps[i]), "layer": layer, "head": head}
            # Earlier versions measured fewer.
            known = [name for name in OF_HEADS if name in run.heads]
            found |= {name: shared.finite(run.heads[name][i, layer, head]) for name in known}
            yield found | {name: shared.finite(run.scalars[name][i]) for name in OF_RUN}


def write_rows(new: list[dict[str, Any]], folder: Path) -> Path:
    """Add rows to heads.csv; a row of the same run, step and head is replaced."""
    path = folder / "heads.csv"
    old = path.read_text().splitlines() if path.exists() else []
    rows = {_key(row): row for row in (*csv.DictReader(old), *new)}
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))
    return path


def _key(row: dict[str, Any]) -> tuple[str, int, int, int]:
    return str(row["run"]), int(row["step"]), int(row["layer"]), int(row["head"])


def errors(run: record.Telemetry, steps: Sequence[int]) -> dict[str, Any]:
    """Errors of delta by stretch, beside the heads with the largest logits at the end."""
    last = np.nan_to_num(run.heads["max_logit"][-1])
    spans = [_between(run, *pair) for pair in itertools.pairwise(steps)]
    return {
        "until": int(run.steps[-1]),
        "heads": int(run.meta["layers"] * run.meta["heads"]),
        "ran_away": [head for head in _largest(last) if last[tuple(head)] >= RAN_AWAY],
        "largest_logit": float(np.nanmax(run.heads["max_logit"])),
        "between": [span for span in spans if span is not None],
    }


def _between(run: record.Telemetry, after: int, until: int) -> dict[str, Any] | None:
    """Of the records in (after, until]; None if there are too few of them."""
    rows = (run.steps > after) & (run.steps <= until)
    if rows.sum() < FEWEST:
        return None
    heads = {name: values[rows].astype(np.float64) for name, values in run.heads.items()}
    error = (heads["delta_error_rms"] * heads["delta_rms"]).mean(axis=0)
    mean, n = heads["delta_error_mean"], int(rows.sum())
    spread = mean.std(axis=0, ddof=1) / np.sqrt(n)
    largest = _largest(error)

    def over_median(values: np.ndarray) -> list[float]:
        return [float(values[i, j] / np.median(values)) for i, j in largest]

    return {
        "after": after,
        "until": until,
        "records": n,
        "largest": largest,
        "over_median": over_median(error),
        "delta_over_median": over_median(heads["delta_rms"].mean(axis=0)),
        "t_rms": float(np.sqrt(((mean.mean(axis=0) / spread) ** 2).mean())),
        "t_rms_unbiased": float(np.sqrt((n - 1) / (n - 3))),
        # As a share of the RMS error of the head: what its mean would have to be to be seen.
        "seen_from": float(np.median(SURE * spread / heads["delta_error_rms"].mean(axis=0))),
    }


def _largest(values: np.ndarray) -> list[list[int]]:
    order = np.argsort(-values, axis=None)[:FIRST]
    return [[int(i) for i in np.unravel_index(k, values.shape)] for k in order]


def noise(run: record.Telemetry) -> dict[str, Any]:
    """Where errors outweigh the derivative by a factor on the logits."""
    ratio, steps = _measured(run, "growth_noise"), run.steps
    logits = np.nan_to_num(run.heads["max_logit"])
    large = first_where(logits >= RAN_AWAY)
    end = min([*large.values(), len(steps)])
    passed = first_where(medians(ratio) >= 1.0)
    known = {"median": 0.5, "p99": 0.99, "largest": 1.0}
    return {
        "heads": ratio[0].size,
        "until": int(steps[-1]),
        "before_step": int(steps[end]) if end < len(steps) else None,
        **{name: float(np.nanquantile(ratio[:end], q)) for name, q in known.items()},
        "passed": [
            _place(head) | _at(passed[head], steps, logits, head)
            for head in sorted(passed, key=lambda head: passed[head])
            if passed[head] < end
        ],
        "went": [
            _place(head)
            | {"step": int(steps[large[head]])}
            | {"passed": _at(passed[head], steps, logits, head) if head in passed else None}
            for head in _in_order(large, logits)[:FIRST]
        ],
    }


def common(run: record.Telemetry) -> dict[str, Any]:
    """Whom the common part of the logits names, and when."""
    part, steps = _measured(run, "common_logit"), run.steps
    # A logit that is not finite is one that ran away, and has no share.
    logits = np.nan_to_num(run.heads["max_logit"], nan=np.inf)
    spoken = np.isfinite(logits) & np.isfinite(part) & (logits >= SMALL)
    share = np.where(spoken, names.common_share(part, logits), 0.0)
    gone = first_where(logits > RAN_AWAY)
    went = _in_order(gone, logits)[:FIRST]
    end = min([*gone.values(), len(steps)])

    def at_large(head: Place) -> dict[str, Any]:
        i = int((logits[:, head[0], head[1]] > LARGE).argmax())
        above = {"above_1000": int(steps[gone[head]]), "above_100": int(steps[i])}
        return _place(head) | above | {"share": float(share[i][head])}

    def named(limit: float) -> list[dict[str, Any]]:
        smooth = medians(share)
        passed = first_where((smooth > limit) & (steps >= FROM)[:, None, None])
        order = _in_order(passed, smooth)[:NAMED]
        return [_place(head) | _at(passed[head], steps, logits, head) for head in order]

    return {
        "heads": logits[0].size,
        "until": int(steps[-1]),
        "first_gone": int(steps[end]) if gone else None,
        "went": [at_large(head) for head in went],
        "others": _others(share[:end], logits[:end], steps, went),
        "named": {str(limit): named(limit) for limit in SHARES},
    }


def _others(
    share: np.ndarray, logits: np.ndarray, steps: np.ndarray, went: list[Place]
) -> dict[str, Any]:
    """The highest share of heads that did not run away: in the layers of those that did, or not."""
    spoken = np.where(logits >= SPEAKS, share, -np.inf)
    for head in went:
        spoken[:, head[0], head[1]] = -np.inf
    layers = sorted({head[0] for head in went})
    elsewhere = [layer for layer in range(share.shape[1]) if layer not in layers]
    found: dict[str, Any] = {}
    for name, where in (("same_layers", layers), ("other_layers", elsewhere)):
        part = spoken[:, where]
        found[name] = None
        if part.size and np.isfinite(part).any():
            i, layer, head = (int(n) for n in np.unravel_index(part.argmax(), part.shape))
            place = (where[layer], head)
            at = _at(i, steps, logits, place)
            found[name] = _place(place) | at | {"share": float(part.max())}
    return found


def saturated(run: record.Telemetry, i: int) -> dict[str, Any]:
    """The heads of record ``i`` that have run away; None for figures that there are not."""
    heads = {name: values[i] for name, values in run.heads.items()}
    logits = np.nan_to_num(heads["max_logit"], nan=math.inf)
    gone = logits > RAN_AWAY
    found: dict[str, Any] = {"heads": int(gone.sum())}
    found["by_layer"] = {int(layer): int(n) for layer, n in enumerate(gone.sum(axis=1)) if n}
    found["largest_logit"] = shared.finite(logits[gone].max(initial=-math.inf))
    found["largest_wq_norm"] = shared.finite(heads["wq_norm"][gone].max(initial=-math.inf))
    for name in ("wq_norm", "entropy"):
        found[f"median_{name}"] = _median(heads[name][gone])
    if "common_logit" in heads:
        share = names.common_share(heads["common_logit"], np.where(gone, logits, math.nan))
        found["median_common_share"] = _median(share[gone])
    if (norms := run.layers.get("grad_norm")) is not None and np.isfinite(norms[i]).any():
        layer = int(np.nanargmax(norms[i]))
        largest = shared.finite(norms[i][layer])
        found |= {"largest_layer": layer, "largest_layer_grad_norm": largest}
        found["median_layer_grad_norm"] = _median(norms[i])
    return found | {name: shared.finite(run.scalars[name][i]) for name in OF_RUN}


def _measured(run: record.Telemetry, name: str) -> np.ndarray:
    values = run.heads.get(name)
    if values is None or np.isnan(values).all():
        raise SystemExit(f"no record with {name}: other software, or too early")
    return values


def medians(values: np.ndarray) -> np.ndarray:
    """Median of the last `SMOOTH` records up to each; what is not known counts as infinite."""
    filled = np.where(np.isnan(values), np.inf, values)
    found = np.full(values.shape, -np.inf)
    for i in range(SMOOTH - 1, len(values)):
        found[i] = np.median(filled[i - SMOOTH + 1 : i + 1], axis=0)
    return found


def first_where(hit: np.ndarray) -> dict[Place, int]:
    """(layer, head) -> index of the first record where it is so."""
    there = np.argwhere(hit.any(axis=0))
    return {(int(a), int(b)): int(hit[:, a, b].argmax()) for a, b in there}


def _in_order(first: dict[Place, int], values: np.ndarray) -> list[Place]:
    """Earliest first; at one record the larger value first."""
    return sorted(first, key=lambda head: (first[head], -values[first[head]][head]))


def _place(head: Place) -> dict[str, Any]:
    return {"layer": head[0], "head": head[1]}


def _at(i: int, steps: np.ndarray, logits: np.ndarray, head: Place) -> dict[str, Any]:
    return {"step": int(steps[i]), "largest_logit": float(logits[i][head])}


def _median(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def main() -> int:
    parser = shared.arguments(__doc__)
    parser.add_argument("what", choices=("at", "errors", "noise", "common", "saturated"))
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--steps", type=int, nargs="+", default=[])
    parser.add_argument("--layer", type=int, help="counted from 0")
    parser.add_argument("--head", type=int, help="counted from 0; default: all of the layer")
    args = parser.parse_args()
    needs_steps = args.what in ("at", "errors", "saturated") and not args.steps
    if needs_steps or (args.what == "at" and args.layer is None):
        parser.error(f"{args.what} needs --steps{' and --layer' * (args.what == 'at')}")
    runs = {shared.run_name(name): shared.telemetry(name) for name in args.runs}
    attention = {name: {"attention": run.meta["attention"]} for name, run in runs.items()}
    if args.what == "at":
        source = f"layer_{args.layer}_of_" + "+".join(runs)
        every = range(next(iter(runs.values())).meta["heads"])
        heads = every if args.head is None else [args.head]
        rows = [
            {"run": name, "sources": source} | row
            for name, run in runs.items()
            for row in rows_at(run, args.steps, args.layer, heads)
        ]
        shared.write("heads", {source: shared.describe() | {"runs": attention}}, args.out)
        print(f"wrote {write_rows(rows, args.out)}")
        return 0
    facts: dict[str, Any] = {}
    if args.what == "errors":
        facts["steps"] = args.steps
        found = {name: errors(run, args.steps) for name, run in runs.items()}
    elif args.what == "saturated":
        facts["above"] = RAN_AWAY
        found = {}
        for name, run in runs.items():
            if missing := set(args.steps) - set(run.steps.tolist()):
                parser.error(f"{name} has no record of step {sorted(missing)}")
            index = np.searchsorted(run.steps, args.steps)
            at = zip(map(str, args.steps), index, strict=True)
            found[name] = {"at": {step: saturated(run, i) for step, i in at}}
    else:
        examine = noise if args.what == "noise" else common
        found = {name: examine(run) for name, run in runs.items()}
    section = {"noise": "growth_noise", "common": "common_part"}.get(args.what, args.what)
    found = {name: attention[name] | one for name, one in found.items()}
    print(f"wrote {shared.add_runs('head_figures', section, found, args.out, **facts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Does the part of the logits that all keys share name the heads that will go, and how early?

    python benchmarks/common_part.py RUN ... [--keep docs/results/common_part.json]

A RUN is a run directory with telemetry that has `common_logit` (docs/telemetry.md). A head's
*share* is that figure, a mean of sampled rows, over the largest logit of all rows, at most 1
(`record.common_share`); of a record whose largest logit is below `SMALL` there is none, and it
counts as 0. Shares below 0 (a common part that holds logits down) are not looked at. Told of a run:

- the heads that *go*, the first `FIRST` whose largest logit is above `RAN_AWAY`: at which record it
  first is above `LARGE`, and their share there;
- of all other heads of the same layers, and of other layers, the highest share of a record with a
  largest logit of at least `SPEAKS` before the first head goes, or of the run where none does;
- for each of `SHARES`, the first `NAMED` heads of the model whose share is above it (median of the
  last `SMOOTH` records), in that order, from step `FROM` on: in the first hundreds of steps the
  largest logit falls, and shares say little.

SHARES of 0.6, LARGE and SPEAKS are of a prediction (docs/predictions_remedies.md); the order in
which heads pass, the lower shares and SMALL were chosen after the first run that had them. A run
that continues another is read from its own first record on.
Writes docs/results/common_part.json; no GPU, no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import growth_noise
import numpy as np
from continued_heads import RAN_AWAY

from megatron_patch.stability import record

SHARES = (0.4, 0.5, 0.6)
LARGE, SPEAKS, SMALL = 100.0, 20.0, 5.0
FIRST, NAMED = 3, 6
FROM = 1000


def examine(telemetry: record.Telemetry) -> dict[str, Any] | None:
    """Figures of one run; None if it has not measured the common part."""
    common = telemetry.heads.get("common_logit")
    if common is None or np.isnan(common).all():
        return None
    # A logit that is not finite is one that ran away, and has no share.
    logits = np.nan_to_num(telemetry.heads["max_logit"], nan=np.inf)
    spoken = np.isfinite(logits) & np.isfinite(common) & (logits >= SMALL)
    share = np.where(spoken, record.common_share(common, logits), 0.0)
    steps = telemetry.steps
    gone = growth_noise.first_where(logits > RAN_AWAY)
    went = sorted(gone, key=lambda head: (gone[head], -logits[gone[head]][head]))[:FIRST]
    end = min([*gone.values(), len(steps)])
    return {
        "heads": logits[0].size,
        "until": int(steps[-1]),
        "first_gone": int(steps[end]) if gone else None,
        "went": [
            growth_noise.place(head)
            | {"above_1000": int(steps[gone[head]])}
            | _at_large(share, logits, steps, head)
            for head in went
        ],
        "others": _others(share[:end], logits[:end], steps, went),
        "named": {str(limit): _named(share, logits, steps, limit) for limit in SHARES},
    }


def _at_large(
    share: np.ndarray, logits: np.ndarray, steps: np.ndarray, head: tuple[int, int]
) -> dict[str, Any]:
    i = int((logits[:, head[0], head[1]] > LARGE).argmax())
    return {"above_100": int(steps[i]), "share": float(share[i][head])}


def _others(
    share: np.ndarray, logits: np.ndarray, steps: np.ndarray, went: list[tuple[int, int]]
) -> dict[str, Any]:
    """The highest share of heads that did not go: in the layers of those that did, elsewhere."""
    spoken = np.where(logits >= SPEAKS, share, -np.inf)
    for head in went:
        spoken[:, head[0], head[1]] = -np.inf
    layers = sorted({head[0] for head in went})
    elsewhere = [layer for layer in range(share.shape[1]) if layer not in layers]
    found = {}
    for name, where in (("same_layers", layers), ("other_layers", elsewhere)):
        part = spoken[:, where]
        if part.size == 0 or not np.isfinite(part).any():
            found[name] = None
            continue
        i, layer, head = (int(n) for n in np.unravel_index(part.argmax(), part.shape))
        place = growth_noise.place((where[layer], head))
        at = growth_noise.at(i, steps, logits, (where[layer], head))
        found[name] = place | at | {"share": float(part.max())}
    return found


def _named(
    share: np.ndarray, logits: np.ndarray, steps: np.ndarray, limit: float
) -> list[dict[str, Any]]:
    """The first heads whose smoothed share is above ``limit``, in order; the higher one first."""
    smooth = growth_noise.medians(share)
    passed = growth_noise.first_where((smooth > limit) & (steps >= FROM)[:, None, None])
    order = sorted(passed, key=lambda head: (passed[head], -smooth[passed[head]][head]))
    return [
        growth_noise.place(head) | growth_noise.at(passed[head], steps, logits, head)
        for head in order[:NAMED]
    ]


def main() -> int:
    return growth_noise.of_every_run(__doc__, "common_part", examine, metric="common_logit")


if __name__ == "__main__":
    sys.exit(main())

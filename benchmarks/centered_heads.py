"""What centering K or V would do to the errors of delta, on captured heads.

    python benchmarks/centered_heads.py [CAPTURE ...]

Two cells of the attribution experiments leave plain numerics as they are and shrink what they act
on (``megatron_patch.experiments.variants``): K minus its mean over tokens, the factor P K by which
an error of delta gets into dQ; V minus the mean of O, the O that is rounded. Neither changes the
softmax. Per head:

    share     |mean of K|^2 / mean of |K|^2: how much of the keys is one vector
    largest   logit, and logit of the centered K: what is left when a row's common part is taken off
    common    that part, scaled q . mean of K, in the mean over rows (``common_logit`` of telemetry)
    noise     of `logit_growth.py` (error of delta over true derivative by a factor on the logits)
              under plain numerics, with K centered, with V centered; each beside the exact
              derivative of its own inputs, which are rounded to 16 bits once more
    moved     RMS over rows of what that rounding of the centered K moves a row's logits by, a
              row's being the RMS under its P: the second thing that `k_centered` changes

Default: the heads of the captures in tests/experiments/captures. Writes
docs/results/centered_heads.json. CPU. ``--keep`` adds to the heads of an earlier result.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import captured
import logit_growth
import torch


def examine(one: captured.Head) -> dict[str, Any]:
    """Figures of one head."""
    mean = one.k.mean(0)
    by_k = replace(one, k=_rounded(one.k - mean))
    p = torch.softmax(one.scores() * one.scale, -1)
    by_v = replace(one, v=_rounded(one.v - (p @ one.v).mean(0)))
    exact = replace(one, k=one.k - mean).scores()
    moved = ((by_k.scores() - exact) * one.scale).masked_fill(exact.isinf(), 0.0)
    moved -= (p * moved).sum(-1, keepdim=True)  # what all keys of a row share moves no softmax
    rows = (p * moved.square()).sum(-1)[captured.SKIPPED :]
    return one.place | {
        "share": float(mean.square().sum() / one.k.square().sum(-1).mean()),
        "largest_logit": float(one.scores().max() * one.scale),
        "largest_centered": float(exact.max() * one.scale),
        "common": float((one.q @ mean)[captured.SKIPPED :].mean() * one.scale),
        "moved": float(rows.mean().sqrt()),
        "noise": logit_growth.noise(one),
        "noise_k_centered": logit_growth.noise(by_k),
        "noise_v_centered": logit_growth.noise(by_v),
    }


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """To 16 bits and back, as the variants hand it to the kernel."""
    return x.bfloat16().double()


def main() -> int:
    return captured.write("centered_heads", __doc__, examine)


if __name__ == "__main__":
    sys.exit(main())

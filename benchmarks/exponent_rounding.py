"""What the usual multiply-add in the softmax's exponent does to delta at large logits.

    python benchmarks/exponent_rounding.py [CAPTURE ...]

FlashAttention computes exp2(s * c - m * c) with c = scale * log2(e) as one multiply-add of s, c and
the rounded product m * c. At the maximum s = m that is not 1: the rounding error of m * c stays in
the exponent, up to half a unit in the last place of a number as large as the logits. P of captured
heads (default: those of tests/experiments/captures) is computed from float32 scores by that
multiply-add and by exp2((s - m) * c), which is exact at the maximum; P is rounded to BF16 for its
product with V, O is divided by the sum of the unrounded or of the rounded P and not rounded, and
delta is compared with float64. Everything else is float64, so what differs is the exponent and the
sum. Writes docs/results/exponent_rounding.json. CPU.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import captured
import torch


def exponents(s: torch.Tensor, c: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name -> exponents of P, float64 numbers that float32 can hold; s: masked float32 scores."""
    m = s.amax(-1, keepdim=True)
    fused = s.double() * c.double() - (m * c).double()  # one rounding, as a multiply-add
    return {"multiply-add": fused.float().double(), "subtract first": ((s - m) * c).double()}


def examine(one: captured.Head) -> dict[str, Any]:
    """Relative RMS errors of delta."""
    raw = one.scores()
    delta = ((torch.softmax(raw * one.scale, -1) @ one.v) * one.dout).sum(-1)[captured.SKIPPED :]
    c = torch.tensor(one.scale * math.log2(math.e), dtype=torch.float32)
    largest = float((raw.float().amax(-1) * one.scale).abs().max())
    found: dict[str, Any] = {"largest_row_maximum": largest}
    for name, exponent in exponents(raw.float(), c).items():
        p = torch.exp2(exponent)
        rounded = p.bfloat16().double()
        for kind, total in (("unrounded", p), ("rounded", rounded)):
            out = rounded @ one.v / total.sum(-1, keepdim=True)
            error = (out * one.dout).sum(-1)[captured.SKIPPED :] - delta
            found[f"{name}, {kind}"] = float(error.norm() / delta.norm())
    return one.place | found


def main() -> int:
    return captured.write("exponent_rounding", __doc__, examine)


if __name__ == "__main__":
    sys.exit(main())

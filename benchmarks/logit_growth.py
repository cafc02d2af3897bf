"""What errors of delta do to the growth of a head's logits, on captured heads.

    python benchmarks/logit_growth.py [CAPTURE ...]

A factor on all logits of a head has, for row r, the derivative

    true    g_r = sum_j dS_rj S_rj, the covariance of dP and S under P, with float64 dS
    error   of the same with the dS of an implementation (16-bit P and O, emulated) instead

The true one vanishes where a row is saturated, however large its logits; the error of delta does
not, because it is multiplied by the row's mean logit. Per head over its rows:

    noise   RMS of the error / RMS of the true one: above 1 the error decides whether logits grow;
            null where the true one is below what float64 can tell
    side    sum of the error / root of the sum of its squares: 1 in RMS over heads where errors
            push logits up as often as down, larger where they do either

for plain FlashAttention-2 numerics, for `compensated` and for its halves: the low-order part of O
alone, the sum of the rounded P alone. Default: the heads of the captures in
tests/experiments/captures. Writes docs/results/logit_growth.json. CPU. ``--keep`` adds to the heads
of an earlier result, whose captures may be gone.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import captured
import torch

from stable_attention.reference.emulators import COMPENSATED, FLASH2, Rounding, emulate

NOTHING = 1e-12
"""Share of the error below which a derivative is float64's own rounding."""
KINDS = {
    "none": FLASH2,
    "low_order_o": replace(FLASH2, residual=COMPENSATED.residual),
    "consistent_sum": replace(COMPENSATED, residual=None),
    "compensated": COMPENSATED,
}


def examine(one: captured.Head) -> dict[str, Any]:
    """Noise and side of every kind of numerics."""
    true = growth(one, true_ds(one))[captured.SKIPPED :]
    found: dict[str, Any] = {"largest_logit": float(one.scores().max() * one.scale)}
    for name, rounding in KINDS.items():
        error = growth(one, _ds(one, rounding))[captured.SKIPPED :] - true
        side = float(error.sum() / error.norm())
        found[name] = {"noise": _ratio(error, true), "side": side}
    return one.place | found


def noise(one: captured.Head, rounding: Rounding = FLASH2) -> float | None:
    """RMS of the error over RMS of the true derivative, under one kind of numerics."""
    true = growth(one, true_ds(one))[captured.SKIPPED :]
    return _ratio(growth(one, _ds(one, rounding))[captured.SKIPPED :] - true, true)


def _ratio(error: torch.Tensor, true: torch.Tensor) -> float | None:
    known = true.norm() > NOTHING * error.norm()
    return float(error.norm() / true.norm()) if known else None


def growth(one: captured.Head, ds: torch.Tensor) -> torch.Tensor:
    """Derivative with respect to a factor on all logits, row by row: [s]."""
    s = one.scores() * one.scale
    return (ds * s.masked_fill(s.isinf(), 0.0)).sum(-1)


def true_ds(one: captured.Head) -> torch.Tensor:
    """dS in float64: [s, s]."""
    p = torch.softmax(one.scores() * one.scale, -1)
    delta = ((p @ one.v) * one.dout).sum(-1, keepdim=True)
    return p * (one.dout @ one.v.T - delta)


def _ds(one: captured.Head, rounding: Rounding) -> torch.Tensor:
    """Emulated dS [s, s], float64."""
    q, k, v, dout = (x[None, None] for x in (one.q, one.k, one.v, one.dout))
    seen = ~one.scores().isinf()
    emulated = emulate(q, k, v, dout, rounding=rounding, scale=one.scale, mask=seen)
    return emulated.ds[0, 0].double()


def main() -> int:
    return captured.write("logit_growth", __doc__, examine)


if __name__ == "__main__":
    sys.exit(main())

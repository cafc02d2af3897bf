"""Two choices of the numerics on synthetic tensors; a CPU, a minute; sections of rounding.json.

    python research/analysis/rounding.py

which_sum   `compensated` with LSE from the float32 sum of P, or from the sum of its rounded values:
            errors of LSE and gradients in the nine regimes, by emulation
split_keys  RMS error of O with one running maximum over tiles of 64 keys, and with a maximum a tile
            (its largest weight is then exactly 1); float64 but for P and O, which are BF16
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import shared
import torch

from stable_attention.reference import gradients, oracle_attention
from stable_attention.reference.emulators import COMPENSATED, emulate
from stable_attention.reference.regimes import REGIMES, make_regime

HEADS, N, TILE = 16, 512, 64
SHAPES = ((64, 256), (96, 512), (192, 256), (256, 256), (256, 2048))
"""(d, keys)."""


def which_sum(regime: str) -> dict[str, dict[str, float]]:
    """Errors by the sum behind LSE."""
    q, k, v, dout = (x[None] for x in make_regime(regime, heads=HEADS, n=N))
    leaves = tuple(x.double().requires_grad_() for x in (q, k, v))
    truth = oracle_attention(*leaves, layout="bhsd", causal=True)
    exact = gradients((truth.out,), leaves, (dout.double(),))
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    found = {}
    for lse in ("float32", "rounded"):
        e = emulate(q, k, v, dout, rounding=replace(COMPENSATED, lse=lse, weights=lse), mask=mask)
        largest = float((e.lse.double() - truth.lse.detach()).abs().max())
        found[lse] = {"lse": float(f"{largest:.3g}")}
        for name, x, t in zip(("dq", "dk", "dv"), (e.dq, e.dk, e.dv), exact, strict=True):
            found[lse][name] = float(f"{float((x.double() - t).norm() / t.norm()):.4g}")
    return found


def output(qkv: list[torch.Tensor], *, one_maximum: bool, exact: bool = False) -> torch.Tensor:
    """O [h, s, d], tile of keys by tile; as BF16 unless ``exact``."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x if exact else x.bfloat16().double()

    q, k, v = qkv
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    m = torch.full(scores.shape[:-1], -torch.inf, dtype=torch.float64)
    acc, total = torch.zeros_like(q), torch.zeros_like(m)
    for first in range(0, k.shape[1], TILE):
        keys = slice(first, first + TILE)
        own = scores[..., keys].amax(-1)
        m_new = torch.maximum(m, own)
        shift = m_new if one_maximum else own
        p = torch.exp(scores[..., keys] - shift[..., None])
        here, before = torch.exp(shift - m_new), torch.exp(m - m_new)
        acc = acc * before[..., None] + (rounded(p) @ v[:, keys]) * here[..., None]
        total, m = total * before + p.sum(-1) * here, m_new
    return rounded(acc / total[..., None])


def split_keys(d: int, s: int) -> dict[str, float]:
    """RMS errors of O of both ways."""
    gen = torch.Generator().manual_seed(0)
    qkv = [torch.randn(HEADS, s, d, generator=gen).bfloat16().double() for _ in range(3)]
    truth = output(qkv, one_maximum=True, exact=True)
    found: dict[str, float] = {"d": d, "keys": s}
    for name, one_maximum in (("one_maximum", True), ("pieces", False)):
        error = output(qkv, one_maximum=one_maximum) - truth
        found[name] = float(f"{float(error.pow(2).mean().sqrt()):.4g}")
    return found


def main() -> int:
    args = shared.arguments(__doc__).parse_args()
    cells = {regime: which_sum(regime) for regime in REGIMES}
    rows = [split_keys(*shape) for shape in SHAPES]
    sections: dict[str, Any] = {
        "which_sum": shared.describe() | {"cells": cells, "heads": HEADS, "n": N},
        "split_keys": shared.describe() | {"heads": HEADS, "tile": TILE, "rows": rows},
    }
    print(f"wrote {shared.write('rounding', sections, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

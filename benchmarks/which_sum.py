# ruff: noqa: E402  (the packages lie beside this folder)
"""LSE from the float32 sum of P or from the sum of its rounded values: what does the backward say?

    PYTHONPATH=kernels python benchmarks/which_sum.py [--out docs/results]

Emulates "compensated" both ways (stable_attention.reference.emulators, any machine, about a minute
on a CPU) in the nine regimes and writes ``which_sum.json`` for docs/numerics.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "kernels")]

from machine import describe

from stable_attention.reference import gradients, oracle_attention
from stable_attention.reference.emulators import COMPENSATED, emulate
from stable_attention.reference.regimes import REGIMES, make_regime

HEADS, N = 16, 512


def relative(x: torch.Tensor, truth: torch.Tensor) -> float:
    """||x - truth|| / ||truth||, four digits."""
    return float(f"{float((x.double() - truth).norm() / truth.norm()):.4g}")


def measure(regime: str) -> dict[str, dict[str, float]]:
    """Errors of LSE, dQ, dK, dV and of the backward's row sums of P, by the sum behind LSE."""
    q, k, v, dout = (x[None] for x in make_regime(regime, heads=HEADS, n=N))
    leaves = tuple(x.double().requires_grad_() for x in (q, k, v))
    truth = oracle_attention(*leaves, layout="bhsd", causal=True)
    exact = gradients((truth.out,), leaves, (dout.double(),))
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    found = {}
    for lse in ("float32", "rounded"):
        e = emulate(q, k, v, dout, rounding=replace(COMPENSATED, lse=lse, weights=lse), mask=mask)
        found[lse] = {
            "lse": float(f"{float((e.lse.double() - truth.lse.detach()).abs().max()):.3g}"),
            **{
                n: relative(x, t)
                for n, x, t in zip(("dq", "dk", "dv"), (e.dq, e.dk, e.dv), exact, strict=True)
            },
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    args = parser.parse_args()
    cells = {regime: measure(regime) for regime in REGIMES}
    target = args.out / "which_sum.json"
    figures = {"cells": cells, "heads": HEADS, "n": N}
    target.write_text(json.dumps({**describe(), **figures}, indent=1, sort_keys=True) + "\n")
    for regime, cell in cells.items():
        print(regime, cell)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# ruff: noqa: E402  (the packages lie beside this folder)
"""Accuracy of context-parallel attention on 1, 2, 4 and 8 ranks against float64, on one GPU.

    PYTHONPATH=kernels python benchmarks/cp_accuracy.py [--out docs/results]

All ranks of a group run in one process (megatron_patch.context_parallel.emulate): schedule, kernels
and sums are those of real ranks, only the transfers are copies, and one GPU measures any size.
Beside it, the same kernels with partial results merged in BF16, as other rings do; one rank is the
ordinary kernel, which merges nothing. Writes ``cp_accuracy.json`` after every regime: errors of O,
dQ, dK, dV relative to the truth's RMS, and of delta = rowsum(dO * O) relative to the RMS of delta,
in the regimes of docs/numerics.md, causal.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "kernels"), str(ROOT)]

import torch
from machine import RESULTS, write_result

SIZES = (1, 2, 4, 8)
MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")
REGIMES = ("tie2s", "near8w", "one", "diffuse", "kbias", "gauss")
KERNEL = "kernel"
BF16_MERGES = "p2p, merged in BF16"


def figures(x: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """RMS, largest and mean error over the truth's RMS."""
    error, size = x.double() - truth, float(truth.pow(2).mean().sqrt())
    values = {
        "rms": error.pow(2).mean().sqrt(),
        "max": error.abs().max(),
        "mean": error.mean(),
    }
    return {name: float(f"{float(v) / size:.4g}") for name, v in values.items()}


def exact(tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """O, its gradients and delta in float64."""
    from stable_attention.reference import reference_attention

    *leaves, dout = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out = reference_attention(*leaves, layout="sbhd", causal=True)
    grads = torch.autograd.grad(out, leaves, dout)
    found = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return found | {"out": out.detach(), "delta": (dout * out.detach()).sum(-1)}


def whole(tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """O and its gradients by the ordinary kernel, as without context parallelism."""
    from stable_attention import stable_attention

    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = stable_attention(*leaves, layout="sbhd", causal=True)
    assert isinstance(out, torch.Tensor)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def measure(
    tensors: tuple[torch.Tensor, ...], truth: dict[str, torch.Tensor], size: int, mode: str
) -> dict[str, Any]:
    """Errors of one mode on ``size`` ranks; ``mode`` may be `BF16_MERGES` or `KERNEL`."""
    from megatron_patch.context_parallel.emulate import SixteenBitMerges, emulate

    options: dict[str, Any] = {"mode": mode}
    if mode == BF16_MERGES:
        kernels = importlib.import_module("stable_attention.chunks")
        options = {
            "mode": "p2p",
            "primitives": SixteenBitMerges(kernels),
            "stabilizer": "none",
            "wire": torch.bfloat16,
        }
    if mode == KERNEL:
        options = {"mode": "p2p"}
    result = emulate(*tensors, size=size, causal=True, **options)
    delta = (tensors[3].double() * result.delta_out.double()).sum(-1)
    results = {name: getattr(result, name) for name in ("out", "dq", "dk", "dv")}
    if mode == KERNEL:
        results = whole(tensors)
    found = {name: figures(x, truth[name]) for name, x in results.items()}
    return found | {"delta": figures(delta, truth["delta"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--regimes", nargs="+", default=REGIMES)
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, minutes a row")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        sys.path.append(str(ROOT / "tests"))
        importlib.import_module("interpreter_shim").install_on_import()
    from stable_attention.reference.regimes import make_regime

    cells: dict[str, Any] = {}
    for regime in args.regimes:
        made = make_regime(
            regime, heads=args.heads, n=args.tokens, d=args.head_dim, device=args.device
        )
        # [heads, n, d] -> [n, 1, heads, d]
        tensors = tuple(x.transpose(0, 1)[:, None].contiguous() for x in made)
        truth = exact(tensors)
        for size in args.sizes:
            for mode in (KERNEL, *MODES, BF16_MERGES):
                if (mode == "a2a+p2p" and size < 4) or (size == 1) != (mode == KERNEL):
                    continue
                errors = measure(tensors, truth, size, mode)
                cells[f"{regime}, {size}, {mode}"] = {
                    "regime": regime, "ranks": size, "mode": mode, **errors
                }  # fmt: skip
                print(regime, size, mode, errors["delta"], flush=True)
        problem = {"tokens": args.tokens, "heads": args.heads, "head_dim": args.head_dim}
        print(write_result("cp_accuracy", {"problem": problem, "cells": cells}, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())

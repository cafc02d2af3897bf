# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)
"""Errors of attention against float64 on a GPU: ours, the vendors', and over several ranks.

    PYTHONPATH=kernels python benchmarks/accuracy.py [--minutes 8] [--out DIR] [--resume DIR]
    PYTHONPATH=kernels python benchmarks/accuracy.py --context-parallel [--sizes 1 2 4 8]

Writes parts of docs/assets/accuracy.json. ``delta``: the error of delta = rowsum(dO * O) and of the
gradients, of our stabilizers and of the vendor kernels, in nine input regimes; written after every
cell, stopped by ``--minutes``, and continued where ``--out`` or ``--resume`` has a result of the
same kernels, GPU and versions. Exit code 1 if a gate on `compensated` does not hold.

``context_parallel``: errors of O, dQ, dK, dV over the truth's RMS and of delta over that of delta,
on 1, 2, 4 and 8 ranks, causal. All ranks of a group run in one process
(tests/context_parallel/emulate.py): schedule, kernels and sums are those of real ranks, the
transfers are copies. Beside it the same kernels with partial results merged in BF16, as other rings
do; one rank is the ordinary kernel, which merges nothing.

``--device cpu`` with small ``--lengths`` or ``--tokens`` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / p) for p in ("benchmarks", "tests", "kernels", ".")]
sys.path.append(str(ROOT / "tests" / "context_parallel"))

import attention  # chooses Triton's interpreter where there is no GPU
import torch
from machine import describe_kernels, earlier, fault, parser, write_result
from regimes import REGIMES, SINK_REGIMES, make_regime
from torch.nn.attention import SDPBackend

from stable_attention.probes import Backend, BackendResult, probe_results

SKIP_ROWS = 64
HEADS = {512: 48, 2048: 48, 8192: 24, 32768: 12}
# A regime is a name of `REGIMES` at head dim 64, or NAME/HEAD_DIM.
DEFAULT = (*REGIMES, "one/128", "tie2s/128")
RANK_REGIMES = ("tie2s", "near8w", "one", "diffuse", "kbias", "gauss")
MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")
KERNEL = "kernel"
BF16_MERGES = "p2p, merged in BF16"
# Gates of the default stabilizer, relative to RMS(delta).
MAX_RMS, MAX_MEAN, MAX_GAUSS_RATIO, MAX_ONE_RATIO = 1e-4, 1e-5, 0.7, 2.0


def ours(stabilizer: str, o_lo: str = "bf16") -> Backend:
    """``stable_attention`` with a stabilizer."""
    from stable_attention import stable_attention

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> BackendResult:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        how: dict[str, Any] = {"stabilizer": stabilizer, "o_lo": o_lo}
        how |= {"allow_broken": stabilizer == "paper_bf16", "deterministic": True}
        how |= {"return_lse": True, "return_o_lo": True}
        out, lse, low = stable_attention(q, k, v, layout="bhsd", causal=True, **how)
        dq, dk, _ = torch.autograd.grad(out, (q, k, v), dout)
        return BackendResult(out=out, lse=lse, low=low, dq=dq, dk=dk)

    return run


def with_float32_output() -> Backend:
    """The best delta there is: our dQ and dK products on a float32 O (reference implementation)."""
    from stable_attention.reference.emulators import Rounding, emulate

    rounding = Rounding(normalizer="rounded", weights="rounded", o_lo="float32")

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> BackendResult:
        n = q.shape[2]
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        parts = []
        for h in range(q.shape[1]):
            one = (x[:, h : h + 1] for x in (q, k, v, dout))
            parts.append(emulate(*one, rounding=rounding, mask=mask))
        whole = {
            name: torch.cat([getattr(p, name) for p in parts], 1)
            for name in ("out", "lse", "low", "dq", "dk")
        }
        # Not stored in 16 bits: probes add ``low`` to ``out`` in float32.
        return BackendResult(**whole)

    return run


def vendor(call: Callable[[attention.Shape], attention.Call]) -> Backend:
    """A peer of attention.py, which takes [b, s, h, d]."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> BackendResult:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        b, h, n, d = q.shape
        attend = call(attention.Shape("accuracy", b, n, h, h, d, d, causal=True))
        out = attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        dq, dk, _ = torch.autograd.grad(out, (q, k, v), dout)
        return BackendResult(out=out, dq=dq, dk=dk)

    return run


# Compiled once a shape: made anew it would be compiled for every regime.
flex = functools.cache(attention.flex)


def sdpa(backend: SDPBackend) -> Backend:
    return vendor(functools.partial(attention.sdpa, backend))


def backends(device: str) -> dict[str, Callable[[], Backend]]:
    """Name -> maker, in the order of the tables; a maker that cannot run here raises."""
    table: dict[str, Callable[[], Backend]] = {
        "compensated": lambda: ours("compensated"),
        "compensated, int8": lambda: ours("compensated", "int8"),
        "none": lambda: ours("none"),
        "dynamic_max": lambda: ours("dynamic_max"),
        "paper_bf16": lambda: ours("paper_bf16"),
        "float32 O": with_float32_output,
        "compensated, fp32": lambda: ours("compensated", "fp32"),
    }
    if device == "cpu":
        return table | {"SDPA-math": lambda: sdpa(SDPBackend.MATH)}
    return table | {
        "SDPA-flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA-cuDNN": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "FlexAttention": lambda: vendor(flex),
    }


def name_and_dim(regime: str) -> tuple[str, int]:
    """("one", 128) of "one/128"; ValueError for regimes that there are not."""
    name, _, d = regime.partition("/")
    if name not in REGIMES or not (d or "64").isdigit():
        raise ValueError(f"regime {regime!r}: not NAME or NAME/HEAD_DIM; names: {list(REGIMES)}")
    return name, int(d or 64)


def gates(cells: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The requirements on ``compensated`` applied to {regime: {n: {backend: figures}}}."""
    found = []
    for regime, by_length in cells.items():
        kind = name_and_dim(regime)[0]
        for n, by_backend in by_length.items():
            mine = by_backend.get("compensated", {})
            if "rms" not in mine:
                continue
            if kind in SINK_REGIMES:
                found.append(_gate(regime, n, "rms", mine["rms"], MAX_RMS))
                found.append(_gate(regime, n, "|mean|", abs(mine["mean"]), MAX_MEAN))
            vendors = [
                by_backend[name]["rms"]
                for name in ("SDPA-flash", "SDPA-cuDNN")
                if "rms" in by_backend.get(name, {})
            ]
            if kind == "gauss" and vendors:
                limit = MAX_GAUSS_RATIO * min(vendors)
                found.append(_gate(regime, n, "rms", mine["rms"], limit))
            # Whole score matrices of the reference fit to 8k; beyond, the kernel with a float32 O.
            yardstick = by_backend.get("float32 O") or by_backend.get("compensated, fp32", {})
            best = yardstick.get("dq_error")
            if kind == "one" and best:
                found.append(_gate(regime, n, "dQ error", mine["dq_error"], MAX_ONE_RATIO * best))
    return found


def _gate(regime: str, n: str, what: str, value: float, limit: float) -> dict[str, Any]:
    found = {"regime": regime, "n": int(n), "what": what, "value": value, "limit": limit}
    return found | {"ok": value <= limit}


def clean(figures: dict[str, Any]) -> dict[str, Any]:
    """Drop what was not measured (NaN) and round to what the measurement carries."""
    return {
        name: float(f"{x:.6g}") if isinstance(x, float) else x
        for name, x in figures.items()
        if not (isinstance(x, float) and not math.isfinite(x))
    }


def measure(
    names: list[str], regime: str, n: int, *, device: str, heads: int, seed: int
) -> dict[str, dict[str, Any]]:
    """One regime at one length, all backends; an exception becomes an ``error`` entry."""
    kind, d = name_and_dim(regime)
    made = make_regime(kind, heads=heads, n=n, d=d, seed=seed, device=device)
    tensors = [x[None] for x in made]
    results, cells = {}, {}
    for name in names:
        if name == "float32 O" and n > 8192:
            continue  # keeps whole score matrices
        if name == "FlexAttention" and d != 64:
            continue  # compiles for every shape anew
        try:
            results[name] = backends(device)[name]()(*tensors)
        except Exception as error:
            cells[name] = {"error": fault(error)}
    reports = probe_results(
        *tensors, results=results, layout="bhsd", causal=True, skip_rows=min(SKIP_ROWS, n // 2)
    )
    return cells | {name: clean(report.as_dict()) for name, report in reports.items()}


class Run:
    """The part ``delta`` under way; saved after every cell."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.head = args, describe_kernels()
        self.regimes = args.regimes.split(",")
        self.names = list(backends(args.device))
        self.cells: dict[str, dict[str, dict[str, Any]]] = {r: {} for r in self.regimes}
        old = earlier("accuracy", "delta", self.head, (args.out, args.resume))
        if old and old["seed"] == args.seed:
            self.cells |= {r: x for r, x in old["cells"].items() if r in self.cells}

    def todo(self) -> list[tuple[int, str]]:
        """(length, regime) without a result, in order."""
        lengths = [int(n) for n in self.args.lengths.split(",")]
        return [(n, r) for n in lengths for r in self.regimes if str(n) not in self.cells[r]]

    def save(self) -> list[dict[str, Any]]:
        checks = gates(self.cells)
        figures = {"cells": self.cells, "gates": checks, "complete": not self.todo()}
        figures |= {"seed": self.args.seed}
        write_result("accuracy", figures, self.args.out, part="delta", head=self.head)
        return checks

    def measure(self, n: int, regime: str) -> None:
        args = self.args
        heads = args.heads or HEADS.get(n, 12)
        found = measure(self.names, regime, n, device=args.device, heads=heads, seed=args.seed)
        self.cells[regime][str(n)] = found
        for name, cell in found.items():
            wanted = ("mean", "t", "rms", "coherence", "dq_error")
            shown = [f"{x} {cell[x]:.3g}" for x in wanted if x in cell]
            print(n, regime, f"{name}:", cell.get("error") or ", ".join(shown), flush=True)
        self.save()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def delta(args: argparse.Namespace) -> int:
    """Measure what is missing, until the time is over."""
    stop = time.monotonic() + 60 * args.minutes
    run = Run(args)
    todo = run.todo()
    for i, (n, regime) in enumerate(todo):
        if time.monotonic() > stop:
            print(f"out of time, {len(todo) - i} cells left")
            break
        run.measure(n, regime)
        print(f"{i + 1}/{len(todo)}, {(stop - time.monotonic()) / 60:.1f} min left", flush=True)
    checks = run.save()
    failed = [g for g in checks if not g["ok"]]
    print(f"{len(checks) - len(failed)} of {len(checks)} gates met")
    for gate in failed:
        print("not met:", gate)
    return 1 if failed else 0


# Several ranks


def figures(x: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """RMS, largest and mean error over the truth's RMS."""
    error, size = x.double() - truth, float(truth.pow(2).mean().sqrt())
    values = {"rms": error.pow(2).mean().sqrt(), "max": error.abs().max(), "mean": error.mean()}
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


def errors_of_mode(
    tensors: tuple[torch.Tensor, ...], truth: dict[str, torch.Tensor], size: int, mode: str
) -> dict[str, Any]:
    """Errors of one mode on ``size`` ranks; ``mode`` may be `BF16_MERGES` or `KERNEL`."""
    from emulate import SixteenBitMerges, emulate

    options: dict[str, Any] = {"mode": "p2p" if mode == KERNEL else mode}
    if mode == BF16_MERGES:
        kernels = importlib.import_module("stable_attention.chunks")
        options = {
            "mode": "p2p",
            "primitives": SixteenBitMerges(kernels),
            "stabilizer": "none",
            "wire": torch.bfloat16,
        }
    result = emulate(*tensors, size=size, causal=True, **options)
    delta = (tensors[3].double() * result.delta_out.double()).sum(-1)
    results = {name: getattr(result, name) for name in ("out", "dq", "dk", "dv")}
    if mode == KERNEL:
        results = whole(tensors)
    found = {name: figures(x, truth[name]) for name, x in results.items()}
    return found | {"delta": figures(delta, truth["delta"])}


def context_parallel(args: argparse.Namespace) -> int:
    """The part ``context_parallel``, written after every regime."""
    cells: dict[str, Any] = {}
    for regime in args.regimes.split(","):
        kind, d = name_and_dim(regime)
        made = make_regime(kind, heads=args.heads or 8, n=args.tokens, d=d, device=args.device)
        # [heads, n, d] -> [n, 1, heads, d]
        tensors = tuple(x.transpose(0, 1)[:, None].contiguous() for x in made)
        truth = exact(tensors)
        for size in args.sizes:
            for mode in (KERNEL, *MODES, BF16_MERGES):
                if (mode == "a2a+p2p" and size < 4) or (size == 1) != (mode == KERNEL):
                    continue
                errors = errors_of_mode(tensors, truth, size, mode)
                cell = {"regime": regime, "ranks": size, "mode": mode, **errors}
                cells[f"{regime}, {size}, {mode}"] = cell
                print(regime, size, mode, errors["delta"], flush=True)
        problem = {"tokens": args.tokens, "heads": args.heads or 8}
        found = {"problem": problem, "cells": cells}
        print(write_result("accuracy", found, args.out, part="context_parallel"))
    return 0


def main() -> int:
    found = parser(__doc__)
    found.add_argument("--resume", type=Path, default=None, help="folder of an earlier result")
    found.add_argument("--device", default="cuda")
    found.add_argument("--lengths", default="512,2048,8192,32768")
    found.add_argument("--regimes", help="NAME[/HEAD_DIM],...")
    found.add_argument(
        "--heads", type=int, default=0, help="0: 48 at 512 ... 12 at 32k; 8 of ranks"
    )
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--minutes", type=float, default=8.0)
    found.add_argument("--context-parallel", action="store_true", help="over several ranks instead")
    found.add_argument("--tokens", type=int, default=8192, help="of --context-parallel")
    found.add_argument("--sizes", type=int, nargs="+", default=(1, 2, 4, 8), help="ranks")
    args = found.parse_args()
    args.regimes = args.regimes or ",".join(RANK_REGIMES if args.context_parallel else DEFAULT)
    try:
        for regime in args.regimes.split(","):
            name_and_dim(regime)
    except ValueError as error:
        found.error(str(error))
    return context_parallel(args) if args.context_parallel else delta(args)


if __name__ == "__main__":
    sys.exit(main())

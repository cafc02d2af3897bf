# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)
"""Delta error of our stabilizers and of the vendor kernels in nine input regimes, on a GPU.

    PYTHONPATH=kernels python benchmarks/delta_regimes.py --out docs/results

writes ``delta_regimes.json`` with machine, versions and commit; docs/numerics.md shows its tables
(benchmarks/render_tables.py). A file is rewritten after every cell, so an interrupted run keeps
what it has; ``--minutes`` stops it in time. ``--device cpu`` with small ``--lengths`` tries the
script without a GPU (our kernels in Triton's interpreter, SDPA's reference path).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]
if "--device=cpu" in sys.argv or "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter_shim

    interpreter_shim.install_on_import()

import torch
import torch.nn.functional as F
from machine import describe
from torch.nn.attention import SDPBackend, sdpa_kernel

from stable_attention.probes import Backend, BackendResult, probe_results
from stable_attention.reference.regimes import REGIMES, SINK_REGIMES, make_regime

SKIP_ROWS = 64
HEADS = {512: 48, 2048: 48, 8192: 24, 32768: 12}
# Gates of the default stabilizer, relative to RMS(delta).
MAX_RMS, MAX_MEAN, MAX_GAUSS_RATIO, MAX_ONE_RATIO = 1e-4, 1e-5, 0.7, 2.0


def ours(stabilizer: str, residual: str = "bf16") -> Backend:
    """``stable_attention`` with a stabilizer."""
    from stable_attention import stable_attention

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> BackendResult:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse, low = stable_attention(
            q,
            k,
            v,
            layout="bhsd",
            causal=True,
            stabilizer=stabilizer,
            residual=residual,
            deterministic=True,
            allow_broken=stabilizer == "paper_bf16",
            return_lse=True,
            return_residual=True,
        )
        dq, dk, _ = torch.autograd.grad(out, (q, k, v), dout)
        return BackendResult(out=out, lse=lse, low=low, dq=dq, dk=dk)

    return run


def with_float32_output() -> Backend:
    """The best delta there is: our dQ and dK products on a float32 O (reference implementation)."""
    from stable_attention.reference.emulators import Rounding, emulate

    rounding = Rounding(normalizer="rounded", residual="float32")

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


def sdpa(backend: SDPBackend) -> Backend:
    """PyTorch's scaled_dot_product_attention on one backend."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> BackendResult:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            dq, dk, _ = torch.autograd.grad(out, (q, k, v), dout)
        return BackendResult(out=out, dq=dq, dk=dk)

    return run


def flex() -> Backend:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> BackendResult:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        n = q.shape[2]
        block_mask = create_block_mask(causal, None, None, n, n, device=q.device)
        out = compiled(q, k, v, block_mask=block_mask)
        dq, dk, _ = torch.autograd.grad(out, (q, k, v), dout)
        return BackendResult(out=out, dq=dq, dk=dk)

    return run


def backends(device: str) -> dict[str, Callable[[], Backend]]:
    """Name -> maker, in the order of the tables; a maker that cannot run here raises."""
    table: dict[str, Callable[[], Backend]] = {
        "compensated": lambda: ours("compensated"),
        "compensated, int8": lambda: ours("compensated", "int8"),
        "none": lambda: ours("none"),
        "dynamic_max": lambda: ours("dynamic_max"),
        "paper_bf16": lambda: ours("paper_bf16"),
        "float32 O": with_float32_output,
    }
    if device == "cpu":
        return table | {"SDPA-math": lambda: sdpa(SDPBackend.MATH)}
    return table | {
        "SDPA-flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA-cuDNN": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "FlexAttention": flex,
    }


def gates(cells: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The requirements on ``compensated`` applied to {regime: {n: {backend: figures}}}."""
    found = []
    for regime, by_length in cells.items():
        for n, by_backend in by_length.items():
            mine = by_backend.get("compensated", {})
            if "rms" not in mine:
                continue
            if regime in SINK_REGIMES:
                found.append(_gate(regime, n, "rms", mine["rms"], MAX_RMS))
                found.append(_gate(regime, n, "|mean|", abs(mine["mean"]), MAX_MEAN))
            vendors = [
                by_backend[name]["rms"]
                for name in ("SDPA-flash", "SDPA-cuDNN")
                if "rms" in by_backend.get(name, {})
            ]
            if regime == "gauss" and vendors:
                limit = MAX_GAUSS_RATIO * min(vendors)
                found.append(_gate(regime, n, "rms", mine["rms"], limit))
            best = by_backend.get("float32 O", {}).get("dq_error")
            if regime == "one" and best:
                found.append(_gate(regime, n, "dQ error", mine["dq_error"], MAX_ONE_RATIO * best))
    return found


def _gate(regime: str, n: str, what: str, value: float, limit: float) -> dict[str, Any]:
    return {
        "regime": regime,
        "n": int(n),
        "what": what,
        "value": value,
        "limit": limit,
        "ok": value <= limit,
    }


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
    tensors = [x[None] for x in make_regime(regime, heads=heads, n=n, seed=seed, device=device)]
    results, cells = {}, {}
    for name in names:
        if name == "float32 O" and n > 8192:
            continue  # keeps whole score matrices
        try:
            results[name] = backends(device)[name]()(*tensors)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            cells[name] = {"error": f"{type(error).__name__}: {first[:200]}"}
    reports = probe_results(
        *tensors,
        results=results,
        layout="bhsd",
        causal=True,
        skip_rows=min(SKIP_ROWS, n // 2),
    )
    return cells | {name: clean(report.as_dict()) for name, report in reports.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", default="512,2048,8192,32768")
    parser.add_argument("--regimes", default=",".join(REGIMES))
    parser.add_argument("--backends", default="")
    parser.add_argument("--heads", type=int, default=0, help="0: 48 at 512 ... 12 at 32k")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8.0)
    args = parser.parse_args()
    stop = time.monotonic() + 60 * args.minutes
    names = args.backends.split(",") if args.backends else list(backends(args.device))
    cells: dict[str, dict[str, dict[str, Any]]] = {r: {} for r in args.regimes.split(",")}
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "delta_regimes.json"
    head = describe()

    def save(complete: bool) -> list[dict[str, Any]]:
        checks = gates(cells)
        figures = {"cells": cells, "gates": checks, "complete": complete, "seed": args.seed}
        target.write_text(json.dumps({**head, **figures}, indent=1, sort_keys=True) + "\n")
        return checks

    for n in map(int, args.lengths.split(",")):
        heads = args.heads or HEADS.get(n, 12)
        for regime in cells:
            if time.monotonic() > stop:
                save(False)
                print("out of time; partial results in", target)
                return 1
            found = measure(names, regime, n, device=args.device, heads=heads, seed=args.seed)
            cells[regime][str(n)] = found
            for name, cell in found.items():
                shown = [
                    f"{x} {cell[x]:.3g}"
                    for x in ("mean", "t", "rms", "coherence", "dq_error")
                    if x in cell
                ]
                print(n, regime, f"{name}:", cell.get("error") or ", ".join(shown), flush=True)
            save(False)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    checks = save(True)
    failed = [g for g in checks if not g["ok"]]
    print(f"{len(checks) - len(failed)} of {len(checks)} gates met; results in {target}")
    for gate in failed:
        print("not met:", gate)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)
"""Delta error of our stabilizers and of the vendor kernels in nine input regimes, on a GPU.

    PYTHONPATH=kernels python benchmarks/delta_regimes.py --out docs/results

writes ``delta_regimes.json`` with machine, versions and commit; docs/numerics.md shows its tables
(benchmarks/render_tables.py). A file is rewritten after every cell, so an interrupted run keeps
what it has; ``--minutes`` stops it in time, and a run that finds a file of the same kernels, GPU
and versions in ``--out`` or ``--resume`` measures what is missing there. ``--device cpu`` with
small ``--lengths`` tries the script without a GPU (our kernels in Triton's interpreter, SDPA's
reference path).
"""

from __future__ import annotations

import argparse
import functools
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
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "--device=cpu" in sys.argv or "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter_shim

    interpreter_shim.install_on_import()

import torch
import torch.nn.functional as F
from machine import describe_kernels, same_origin
from torch.nn.attention import SDPBackend, sdpa_kernel

from stable_attention.probes import Backend, BackendResult, probe_results
from stable_attention.reference.regimes import REGIMES, SINK_REGIMES, make_regime

SKIP_ROWS = 64
HEADS = {512: 48, 2048: 48, 8192: 24, 32768: 12}
# A regime is a name of `REGIMES` at head dim 64, or NAME/HEAD_DIM.
DEFAULT = (*REGIMES, "one/128", "tie2s/128")
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

    rounding = Rounding(normalizer="rounded", weights="rounded", residual="float32")

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


def _visible(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


@functools.cache
def flex() -> Backend:
    """FlexAttention, compiled once a length: made anew it would be recompiled for every regime."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> BackendResult:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        n = q.shape[2]
        block_mask = create_block_mask(_visible, None, None, n, n, device=q.device)
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
        "compensated, fp32": lambda: ours("compensated", "fp32"),
    }
    if device == "cpu":
        return table | {"SDPA-math": lambda: sdpa(SDPBackend.MATH)}
    return table | {
        "SDPA-flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA-cuDNN": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "FlexAttention": flex,
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


class Run:
    """The cells under way; saved after every one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.head = args, describe_kernels()
        self.lengths = [int(n) for n in args.lengths.split(",")]
        self.regimes = args.regimes.split(",")
        self.names = args.backends.split(",") if args.backends else list(backends(args.device))
        self.cells: dict[str, dict[str, dict[str, Any]]] = {r: {} for r in self.regimes}
        args.out.mkdir(parents=True, exist_ok=True)
        self.target = args.out / "delta_regimes.json"
        for folder in (args.out, args.resume):
            if folder and not any(self.cells.values()):
                self._take_over(folder / self.target.name)

    def _take_over(self, path: Path) -> None:
        if not path.exists():
            return
        old = json.loads(path.read_text())
        why = same_origin(old, self.head)
        if why or old["seed"] != self.args.seed:
            print(f"not resuming from {path}: {why or 'another seed'}", flush=True)
            return
        for regime, by_length in old["cells"].items():
            if regime in self.cells:
                self.cells[regime] = dict(by_length)
        print(f"resuming from {path}: {sum(map(len, self.cells.values()))} cells", flush=True)

    def todo(self) -> list[tuple[int, str]]:
        """(length, regime) without a result, in order."""
        return [(n, r) for n in self.lengths for r in self.regimes if str(n) not in self.cells[r]]

    def save(self) -> list[dict[str, Any]]:
        checks = gates(self.cells)
        figures = {"cells": self.cells, "gates": checks, "complete": not self.todo()}
        figures |= {"seed": self.args.seed}
        text = json.dumps({**self.head, **figures}, indent=1, sort_keys=True)
        self.target.write_text(text + "\n")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--resume", type=Path, default=None, help="folder of an earlier result")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", default="512,2048,8192,32768")
    parser.add_argument("--regimes", default=",".join(DEFAULT), help="NAME[/HEAD_DIM],...")
    parser.add_argument("--backends", default="")
    parser.add_argument("--heads", type=int, default=0, help="0: 48 at 512 ... 12 at 32k")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8.0)
    args = parser.parse_args()
    try:
        for regime in args.regimes.split(","):
            name_and_dim(regime)
    except ValueError as error:
        parser.error(str(error))
    stop = time.monotonic() + 60 * args.minutes
    run = Run(args)
    todo = run.todo()
    for i, (n, regime) in enumerate(todo):
        if time.monotonic() > stop:
            print(f"out of time, {len(todo) - i} cells left; partial results in {run.target}")
            break
        run.measure(n, regime)
        print(f"{i + 1}/{len(todo)}, {(stop - time.monotonic()) / 60:.1f} min left", flush=True)
    checks = run.save()
    failed = [g for g in checks if not g["ok"]]
    print(f"{len(checks) - len(failed)} of {len(checks)} gates met; results in {run.target}")
    for gate in failed:
        print("not met:", gate)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

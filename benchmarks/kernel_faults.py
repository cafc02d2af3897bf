# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)
"""Faults known from other attention implementations: what the installed peers do today, and ours.

    PYTHONPATH=kernels python benchmarks/kernel_faults.py [--out DIR] [--device cpu]

writes ``kernel_faults.json``; docs/kernels.md shows both. Each fault is a problem on which a
public report saw NaN or wrong gradients; every backend runs it in this process and is compared with
float64. A backend that does not serve the problem says why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / p) for p in ("benchmarks", "tests")]
DEVICE = "cpu" if "--device=cpu" in sys.argv or "cpu" in sys.argv else "cuda"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter_shim

    interpreter_shim.install_on_import()

import torch
import torch.nn.functional as F
from machine import describe_kernels
from torch.nn.attention import SDPBackend, sdpa_kernel

from stable_attention import stable_attention

NAMES = ("out", "dq", "dk", "dv")
BACKENDS = {
    "SDPA-cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA-flash": SDPBackend.FLASH_ATTENTION,
    "SDPA-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA-math": SDPBackend.MATH,
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A problem [1, h, s, d]: every logit near ``logit``; ``mask`` hands peers the causal mask."""

    report: str
    what: str
    sq: int
    sk: int
    logit: float
    causal: bool = False
    mask: bool = False
    outlier: float = 0.0
    """Added to one channel of K instead (a "massive activation")."""
    d: int = 64

    def tensors(self) -> list[torch.Tensor]:
        gen = torch.Generator().manual_seed(0)

        def draw(n: int, scale: float) -> torch.Tensor:
            return torch.randn(1, 2, n, self.d, generator=gen) * scale

        q, k = draw(self.sq, 0.1), draw(self.sk, 0.1)
        v, dout = draw(self.sk, 1.0), draw(self.sq, 1.0)
        if self.logit:
            q[..., 0], k[..., 0] = 1.0, self.logit * math.sqrt(self.d)
        if self.outlier:
            k[..., 0] += self.outlier
            q[..., 0] = 1.0
        return [x.to(DEVICE, torch.bfloat16) for x in (q, k, v, dout)]


FAULTS = (
    Fault(
        report="pytorch #196678",
        what="704 keys (704 % 128 = 64), causal mask as a tensor, LSE near -120",
        sq=704, sk=704, logit=-120.0, causal=True, mask=True,
    ),
    Fault(
        report="pytorch #196678",
        what="the same with 192 keys",
        sq=192, sk=192, logit=-120.0, causal=True, mask=True,
    ),
    Fault(
        report="pytorch #196678, control",
        what="640 keys (a multiple of 128)",
        sq=640, sk=640, logit=-120.0, causal=True, mask=True,
    ),
    Fault(
        report="cudnn-frontend #1072",
        what="one query, 128 keys, LSE near -122",
        sq=1, sk=128, logit=-122.0,
    ),
    Fault(
        report="cudnn-frontend #160",
        what="two tokens, one channel of K at 70",
        sq=2, sk=2, logit=0.0, causal=True, outlier=70.0,
    ),
)  # fmt: skip


def run_peer(fault: Fault, backend: SDPBackend) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *leaves, dout = given
        mask = None
        if fault.mask:
            mask = torch.ones(fault.sq, fault.sk, dtype=torch.bool, device=DEVICE).tril()
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                *leaves, attn_mask=mask, is_causal=fault.causal and mask is None
            )
        return out, *torch.autograd.grad(out, leaves, dout)

    return run


def run_ours(fault: Fault) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *leaves, dout = given
        out = stable_attention(*leaves, layout="bhsd", causal=fault.causal, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return out, *torch.autograd.grad(out, leaves, dout)

    return run


def truth(fault: Fault, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Out and gradients in float64."""
    *leaves, dout = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    scores = leaves[0] @ leaves[1].mT * fault.d**-0.5
    if fault.causal:
        hidden = torch.ones(fault.sq, fault.sk, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    out = torch.softmax(scores, -1) @ leaves[2]
    return out, *torch.autograd.grad(out, leaves, dout)


def judge(
    run: Callable[..., tuple[torch.Tensor, ...]],
    tensors: list[torch.Tensor],
    true: tuple[torch.Tensor, ...],
) -> dict[str, Any]:
    """Non-finite elements and relative errors of one backend, or why it did not run."""
    *leaves, dout = tensors
    try:
        found = run(*(x.detach().clone().requires_grad_() for x in leaves), dout)
        bad = {n: int((~torch.isfinite(x)).sum()) for n, x in zip(NAMES, found, strict=True)}
    except RuntimeError as error:
        return {"error": (str(error).splitlines() or [""])[0][:160]}
    errors = {}
    for name, x, want in zip(NAMES, found, true, strict=True):
        if not bad[name]:
            gap = float((x.detach().double() - want.detach()).norm())
            # dQ and dK of one visible key are 0 in exact arithmetic: no ratio.
            errors[name] = float(f"{gap / max(float(want.detach().norm()), 1e-30):.3g}")
    return {"not_finite": {n: c for n, c in bad.items() if c}, "errors": errors}


def measure(fault: Fault) -> dict[str, Any]:
    tensors = fault.tensors()
    true = truth(fault, tensors)
    table = {name: run_peer(fault, kind) for name, kind in BACKENDS.items()}
    cells = {"ours": judge(run_ours(fault), tensors, true)}
    cells |= {name: judge(run, tensors, true) for name, run in table.items()}
    return {"report": fault.report, "what": fault.what, "backends": cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", type=int, default=None, help="index of one fault")
    args = parser.parse_args()
    wanted = FAULTS if args.only is None else FAULTS[args.only :][:1]
    rows = [measure(fault) for fault in wanted]
    for row in rows:
        print(row["report"], row["what"], json.dumps(row["backends"]), sep="\n    ", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "kernel_faults.json"
    target.write_text(json.dumps(describe_kernels() | {"faults": rows}, indent=1) + "\n")
    mine = [row["backends"]["ours"] for row in rows]
    ok = all("error" not in cell and not cell["not_finite"] for cell in mine)
    print("ours finite everywhere:", ok, "; results in", target)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

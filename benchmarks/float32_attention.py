"""Attention in float32: split products beside PyTorch's kernel, in one process, on one shape.

    python benchmarks/float32_attention.py [--shape B S H D]

Forward and backward of causal self-attention from BF16 tensors, as the cell `fp32_attention` of the
experiments has it: `split` (stable_attention.reference.split_products), `torch` (PyTorch's
memory-efficient kernel on float32 copies, rounded to BF16 at the end), and `compensated` for scale.
Time: medians over CUDA events, the three in turn, each behind work that keeps the GPU busy until
the host has launched all of it. Errors against float64: RMS over RMS of the result, of the float32
O and gradients before their rounding (of `compensated` after it), on the first sequence. Writes
docs/results/float32_attention.json. One GPU; on the CPU (under Triton's interpreter) errors only,
with PyTorch's unfused float32 attention.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import torch
import torch.nn.functional as F
from attention import QUEUE_CYCLES
from torch.nn.attention import SDPBackend, sdpa_kernel

from stable_attention import stable_attention
from stable_attention.reference import split_products

NAMES = ("out", "dq", "dk", "dv")
WARM, ROUNDS = 5, 30


def torch_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """O in float32 of bhsd tensors."""
    kind = SDPBackend.EFFICIENT_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel([kind]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def backends() -> dict[str, Callable[..., torch.Tensor]]:
    """BF16 bhsd tensors -> BF16 O, differentiable."""
    return {
        "split": lambda *x: split_products.split_product_attention(*x, layout="bhsd", causal=True),
        "torch": lambda *x: torch_float32(*(t.float() for t in x)).to(x[0].dtype),
        "compensated": lambda *x: stable_attention(*x, layout="bhsd", causal=True),
    }


def unrounded(name: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """O, dQ, dK, dV of one backend, in float32 where it has them."""
    q, k, v, dout = given
    if name == "split":
        how: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "causal": True}
        _, out, lse = split_products.run_forward(q, k, v, **how)
        grads = split_products.run_backward((q, k, v, out, lse), dout, dtype=torch.float32, **how)
        return [out, *grads]
    dtype = torch.float32 if name == "torch" else q.dtype
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = torch_float32(*leaves) if name == "torch" else backends()[name](*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]


def errors(given: list[torch.Tensor]) -> dict[str, dict[str, float]]:
    """Relative RMS errors by backend and tensor."""
    q, k, v = (x.double().requires_grad_() for x in given[:3])
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    out = torch.softmax(scores, -1) @ v
    true = [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3].double())]
    return {
        backend: {
            name: float((mine.double() - right).norm() / right.norm())
            for name, mine, right in zip(NAMES, unrounded(backend, given), true, strict=True)
        }
        for backend in backends()
    }


def times(given: list[torch.Tensor]) -> dict[str, dict[str, float]]:
    """Milliseconds of forward, and of forward and backward, by backend; each round runs all."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    taken: dict[str, dict[str, list[float]]] = {
        name: {"forward_ms": [], "both_ms": []} for name in backends()
    }
    for turn in range(WARM + ROUNDS):
        for name, run in backends().items():
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda._sleep(QUEUE_CYCLES)
            marks[0].record()
            out = run(*leaves)
            marks[1].record()
            torch.autograd.grad(out, leaves, given[3])
            marks[2].record()
            torch.cuda.synchronize()
            if turn >= WARM:
                taken[name]["forward_ms"].append(marks[0].elapsed_time(marks[1]))
                taken[name]["both_ms"].append(marks[0].elapsed_time(marks[2]))
    return {
        name: {what: statistics.median(values) for what, values in of.items()}
        for name, of in taken.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=4, metavar=("B", "S", "H", "D"),
                        default=[64, 1024, 12, 64])  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    b, s, h, d = args.shape
    if min(args.shape) < 1 or d not in split_products.HEAD_DIMS:
        allowed = ", ".join(map(str, split_products.HEAD_DIMS))
        parser.error(f"--shape {b} {s} {h} {d}: all at least 1, and D one of {allowed}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gen = torch.Generator(device).manual_seed(0)
    given = [
        torch.randn(b, s, h, d, generator=gen, device=device).bfloat16().transpose(1, 2)
        for _ in range(4)
    ]
    result: dict[str, Any] = {"shape": args.shape, "errors": errors([x[:1] for x in given])}
    if device == "cuda":
        result["times"] = times(given)
    for name, found in result["errors"].items():
        told = ", ".join(f"{what} {value:.1e}" for what, value in found.items())
        took = result.get("times", {}).get(name)
        print(f"{name}: {told}" + (f"; {took['both_ms']:.2f} ms" if took else ""))
    print(f"wrote {machine.write_result('float32_attention', result, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

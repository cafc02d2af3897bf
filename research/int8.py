# ruff: noqa: E402  (paths come first)
"""INT8 attention on a GPU: errors in nine regimes and on captured heads, time and memory.

    PYTHONPATH=kernels:tests:. python research/int8.py [--parts PART ...] [--captures PATH ...]

Writes int8.json: the parts ``errors`` and ``speed`` of the tables in docs/low_bit.md, and
``captures``, every head of causal captures that runs left, by default those of
tests/stability/captures; all beside BF16. Whether the kernels are right is tested by
tests/kernels/gpu/test_int8.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CAPTURES = ROOT / "tests/stability/captures"
sys.path[:0] = [str(ROOT / part) for part in ("benchmarks", "tests", "kernels", ".")]

import torch
import torch.nn.functional as F
from machine import RESULTS, describe_kernels, write_result
from regimes import REGIMES, make_regime
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from megatron_patch.stability.capture import CaptureFile
from stable_attention import stable_attention
from stable_attention.int8.launch import int8_attention
from stable_attention.int8.settings import DEFAULT, PAPER

Attention = Callable[..., torch.Tensor]
HEADS, LENGTH, D = 8, 2048, 64
BF16, CUDNN = ("compensated", "none"), "SDPA-cuDNN"
SHAPES = ((4, 4096, 16, 128), (4, 4096, 16, 64), (16, 1024, 12, 64))
"""Batch, length, heads, head dim; causal."""
SETTINGS = {
    "as published": PAPER,
    "published, rounded normalizer": dataclasses.replace(PAPER, normalizer="rounded"),
    "ours without projection": dataclasses.replace(DEFAULT, projection=False),
    "ours, tile scales": dataclasses.replace(DEFAULT, scales="tile"),
    "ours": DEFAULT,
}


def off(x: torch.Tensor, true: torch.Tensor) -> float:
    """Norm of the difference over that of the truth."""
    return ((x.double() - true).norm() / true.norm()).item()


def truth(tensors: tuple[torch.Tensor, ...], scale: float) -> Any:
    """delta, dQ, dK, dV in float64 from q, k, v and dO [h, n, d], causal."""
    q, k, v, dout = (x.double() for x in tensors)
    hidden = torch.ones(q.shape[1], q.shape[1], device=q.device).triu(1).bool()
    p = (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    delta = (dout * (p @ v)).sum(-1)
    ds = p * (dout @ v.mT - delta[..., None])
    return delta, ds @ k * scale, ds.mT @ q * scale, p.mT @ dout


def errors_of(
    tensors: tuple[torch.Tensor, ...], names: tuple[str, ...], scale: float
) -> Iterator[dict[str, Any]]:
    """A row for each kind of numerics: of delta the RMS and mean error over its RMS."""
    delta, *true = truth(tensors, scale)
    *inputs, dout = tensors
    rms = delta.pow(2).mean().sqrt()
    for name in names:
        leaves = [x[None].detach().requires_grad_() for x in inputs]
        whole: Any = 0.0
        if name in SETTINGS:
            how = {"layout": "bhsd", "causal": True, "scale": scale}
            out = int8_attention(*leaves, SETTINGS[name], **how)
        elif name == CUDNN:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=scale)
        else:
            how = {"stabilizer": name, "return_o_lo": True, "scale": scale}
            out, low = stable_attention(*leaves, layout="bhsd", causal=True, **how)
            whole = low[0].double() if low.numel() else 0.0
        grads = torch.autograd.grad(out, leaves, dout[None])
        error = (dout.double() * (out.detach()[0].double() + whole)).sum(-1) - delta
        found = {"delta_rms": error.pow(2).mean().sqrt() / rms, "delta_mean": error.mean() / rms}
        row = {"backend": name} | {key: x.item() for key, x in found.items()}
        for key, x, y in zip(("dq", "dk", "dv"), grads, true, strict=True):
            row[key] = off(x[0], y)
        yield row


def error_rows(regime: str) -> list[dict[str, Any]]:
    tensors = make_regime(regime, heads=HEADS, n=LENGTH, d=D, device="cuda")
    same = {"regime": regime, "n": LENGTH, "d": D}
    return [same | row for row in errors_of(tensors, (*BF16, *SETTINGS), D**-0.5)]


def capture_rows(path: Path) -> list[dict[str, Any]]:
    """Every head of the first sequence of one file."""
    one = CaptureFile.load(path)
    assert one.causal and one.window is None and one.sinks is None, path
    rows = []
    for i, head in enumerate(one.heads):
        kv = one.head_to_kv[i]
        whole = (one.q[:, 0, i], one.k[:, 0, kv], one.v[:, 0, kv], one.dout[:, 0, i])
        tensors = tuple(x[None].contiguous().cuda() for x in whole)
        q, k = (x[0].double() for x in tensors[:2])
        logits = (q @ k.T * one.scale).masked_fill(torch.ones_like(q @ k.T).triu(1) > 0, -torch.inf)
        same = {"run": one.run_name, "attention": f"{one.backend}/{one.stabilizer}"}
        same |= {"step": one.step, "layer": one.layer, "head": head}
        same |= {"largest_logit": logits.max().item()}
        rows += [same | row for row in errors_of(tensors, (*BF16, CUDNN, *SETTINGS), one.scale)]
    return rows


def sdpa(kind: SDPBackend) -> Attention:
    def run(*qkv: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([kind]):
            turned = (x.transpose(1, 2) for x in qkv)
            return F.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)

    return run


RIVALS: dict[str, Attention] = {
    "sage_int8": lambda *qkv: int8_attention(*qkv, causal=True),
    "stable_flash compensated": lambda *qkv: stable_attention(*qkv, causal=True),
    "stable_flash none": lambda *qkv: stable_attention(*qkv, causal=True, stabilizer="none"),
    CUDNN: sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA-flash": sdpa(SDPBackend.FLASH_ATTENTION),
}


def kept(attention: Attention, leaves: list[torch.Tensor]) -> float:
    """Bytes kept for the backward, each storage once, over the elements of O."""
    storages: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(*leaves)
    return sum(storages.values()) / out.numel()


def speed_rows(shape: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """A row for each attention: medians in milliseconds, and `kept`."""
    b, s, h, d = shape
    rows = []
    for name, attention in RIVALS.items():
        leaves = [torch.randn(b, s, h, d, device="cuda").bfloat16() for _ in range(4)]
        dout = leaves.pop()
        leaves = [x.requires_grad_() for x in leaves]
        row: dict[str, Any] = {"b": b, "s": s, "h": h, "d": d, "causal": True, "backend": name}
        row["kept"] = kept(attention, leaves)
        out = attention(*leaves)
        passes: dict[str, Callable[[], object]] = {
            "forward_ms": lambda: attention(*leaves),  # noqa: B023
            "backward_ms": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),  # noqa: B023
        }
        row |= {key: do_bench(f, 10, 50, return_mode="median") for key, f in passes.items()}
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=("errors", "captures", "speed"))
    parser.add_argument("--captures", type=Path, nargs="+", default=[CAPTURES])
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="where this is no checkout")
    args = parser.parse_args()
    began, failed = time.monotonic(), 0
    found = (sorted(x.rglob("*.pt")) if x.is_dir() else [x] for x in args.captures)
    files = tuple(path for some in found for path in some)
    parts: tuple[tuple[str, Callable[[Any], list[dict[str, Any]]], tuple[Any, ...]], ...] = (
        ("errors", error_rows, tuple(REGIMES)),
        ("captures", capture_rows, files),
        ("speed", speed_rows, SHAPES),
    )
    for part, measure, of in (x for x in parts if not args.parts or x[0] in args.parts):
        rows: list[dict[str, Any]] = []
        for one in of:
            if time.monotonic() - began > args.seconds:
                print(f"{part}: no time for {one}")
                failed = 1
                break
            try:
                rows += measure(one)
                print(part, one, f"{time.monotonic() - began:.0f} s", rows[-1], flush=True)
            except Exception:
                traceback.print_exc()
                failed = 1
        head = describe_kernels() | ({"commit": args.commit} if args.commit else {})
        write_result("int8", {"rows": rows}, args.out, part=part, head=head)
    return failed


if __name__ == "__main__":
    sys.exit(main())

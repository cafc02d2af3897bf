"""Gradients beside those of FP32 attention: the promise of the backward in two parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attention_cases import DEVICE

from stable_attention import stable_attention

sdpa = torch.nn.functional.scaled_dot_product_attention
Tensors = Sequence[torch.Tensor]


def gradients(tensors: Tensors, **options: Any) -> list[torch.Tensor]:
    """Of q, k, v and, where there is one, of the sinks; the last tensor is dO."""
    *inputs, dout = tensors
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    sinks = {"sinks": leaves[3]} if len(leaves) > 3 else {}
    out = stable_attention(*leaves[:3], **sinks, **{"backward": "own_x2"} | options)
    if not isinstance(out, torch.Tensor):
        return list(torch.autograd.grad(out, leaves, [dout, torch.ones_like(out[1])]))
    return list(torch.autograd.grad(out, leaves, dout))


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def over_bound(tensors: Tensors, scale: float | None = None, **options: Any) -> list[float]:
    """Errors of causal dQ, dK, dV over 1.5 of FP32 attention's and that of rounding once."""
    *inputs, dout = tensors

    def stock(dtype: torch.dtype) -> Tensors:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = sdpa(*leaves, is_causal=True, scale=scale)
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    exact = stock(torch.float64)
    found = gradients(tensors, layout="bhsd", causal=True, scale=scale, **options)
    return [
        distance(x, y) / (1.5 * distance(z.to(x.dtype), y) + distance(y.to(x.dtype), y))
        for x, y, z in zip(found, exact, stock(torch.float32), strict=True)
    ]


def drawn(shape: Sequence[int], seed: int = 0, count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for _ in range(count)]

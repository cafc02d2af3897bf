"""Splitting the output of the QKV projection without a copy in the backward pass.

Megatron-Core splits it with `torch.split` where Transformer Engine is missing, whose backward pass
concatenates dQ, dK and dV: as many bytes read and written as the three have. Where attention left
them side by side in one buffer (`stable_attention` does for queries, keys and values that are the
split tensors themselves: as many key heads as query heads, no rotary embedding and no norm between)
that buffer is the gradient already.
"""

from __future__ import annotations

from typing import Any

import torch

from stable_attention.pieces import joined


def install() -> bool:
    """Use `split` in Megatron-Core's attention where it has none but PyTorch's; whether it does."""
    from megatron.core.transformer import attention

    if attention.SplitAlongDim is None:
        attention.SplitAlongDim = split
    return attention.SplitAlongDim is split


def split(x: torch.Tensor, dim: int, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """`torch.split`: views of x, which in-place operations then refuse.

    Args:
        x: any tensor.
        dim: the dimension split.
        sizes: extents along ``dim``; they add up to x's.
    """
    return _Split.apply(x, dim, sizes)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        return torch.split(x, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *parts: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        whole = joined(parts, ctx.dim)
        return torch.cat(parts, ctx.dim) if whole is None else whole, None, None

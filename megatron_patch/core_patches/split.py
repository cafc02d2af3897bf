"""Splitting the output of the QKV projection without a copy in the backward pass.

Megatron-Core splits it with `torch.split` where Transformer Engine is missing, whose backward pass
concatenates dQ, dK and dV: as many bytes read and written as the three have. Where attention left
them side by side in one buffer (`stable_attention` does for queries, keys and values that are the
split tensors themselves: as many key heads as query heads, no rotary embedding and no norm between)
that buffer is the gradient already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_patch.core_patches.replace import Change, Replacement
from stable_attention.pieces import joined


def _split_along_dim() -> Iterator[Change]:
    """Core's own place for it, empty where Transformer Engine is missing."""
    from megatron.core.transformer import attention

    if attention.SplitAlongDim is None:
        yield attention, "SplitAlongDim", split


qkv_split = Replacement(_split_along_dim)


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

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


def joined(parts: tuple[torch.Tensor, ...], dim: int) -> torch.Tensor | None:
    """What ``parts`` are consecutive pieces of along ``dim``, without a copy; None otherwise."""
    if any(type(part) is not torch.Tensor for part in parts):
        return None  # traced: it has no memory of its own
    first, shape = parts[0], list(parts[0].shape)
    offset, memory = first.storage_offset(), first.untyped_storage().data_ptr()
    shape[dim] = 0
    for part in parts:
        extent = part.shape[dim]
        rest = [*part.shape]
        rest[dim] = shape[dim]
        if (
            rest != shape
            or part.dtype != first.dtype
            or part.stride() != first.stride()
            or part.untyped_storage().data_ptr() != memory
            or part.storage_offset() != offset
        ):
            return None
        shape[dim] += extent
        offset += extent * part.stride(dim)
    whole = first.as_strided(shape, first.stride(), first.storage_offset())
    return whole if whole.is_contiguous() else None

"""Tensors that lie behind one another in one buffer, as a projection leaves queries, keys, values.

Gradients that are such pieces make up the gradient of the buffer without being copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that behave as PyTorch's own."""


def joined(parts: Sequence[torch.Tensor], dim: int = -1) -> torch.Tensor | None:
    """The contiguous tensor whose consecutive pieces along ``dim`` are ``parts``, without a copy.

    None where there is no such tensor, and for tensors that are traced or batched: whether those
    share memory need not be so when it counts.
    """
    if any(type(part) is not torch.Tensor or not torch._C._has_storage(part) for part in parts):
        return None
    first, shape = parts[0], list(parts[0].shape)
    steps, offset, memory = first.stride(), first.storage_offset(), first.untyped_storage()
    shape[dim] = 0
    for part in parts:
        rest = [*part.shape]
        extent, rest[dim] = rest[dim], shape[dim]
        if (
            rest != shape
            or part.dtype != first.dtype
            or part.stride() != steps
            or part.storage_offset() != offset
            or part.untyped_storage().data_ptr() != memory.data_ptr()
        ):
            return None
        shape[dim] += extent
        offset += extent * steps[dim]
    whole = first.as_strided(shape, steps, first.storage_offset())
    return whole if whole.is_contiguous() else None

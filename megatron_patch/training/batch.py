"""Micro-batches on their way to the model: to the device, and cut along the sequence under CP.

Legend: b micro-batch, s sequence, cp context-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_patch.parallel.setup import Layout

Batch = dict[str, torch.Tensor]


def zigzag(x: torch.Tensor, *, rank: int, size: int) -> torch.Tensor:
    """Megatron's balanced share of the sequence: of 2 cp chunks, rank r owns r and 2 cp - 1 - r.

    Args:
        x: [b, s], s divisible by 2 cp.
        rank, size: context-parallel coordinates.

    Returns:
        [b, s / cp]
    """
    if size == 1:
        return x
    chunks = x.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)


def place(batch: Batch, layout: Layout) -> Batch:
    """The part of a micro-batch this rank computes on, on its device."""
    return {
        name: zigzag(tensor, rank=layout.cp_rank, size=layout.cp_size).to(
            layout.device, non_blocking=True
        )
        for name, tensor in batch.items()
    }

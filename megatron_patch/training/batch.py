"""Micro-batches on their way to the model: cut along the sequence under CP, then to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_patch.context_parallel.layout import shard

if TYPE_CHECKING:
    from megatron_patch.parallel.setup import Layout

Batch = dict[str, torch.Tensor]


def place(batch: Batch, layout: Layout) -> Batch:
    """The part of a micro-batch this rank computes on, on its device.

    Args:
        batch: tensors [micro-batch, sequence].
        layout: coordinates; under context parallelism each rank keeps its zigzag share.
    """
    return {
        name: shard(tensor, rank=layout.cp_rank, size=layout.cp_size, dim=1).to(
            layout.device, non_blocking=True
        )
        for name, tensor in batch.items()
    }

"""Micro-batches on their way to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_patch.parallel.setup import Layout

Batch = dict[str, torch.Tensor]


def place(batch: Batch, layout: Layout) -> Batch:
    """A micro-batch on this rank's device.

    Args:
        batch: tensors [micro-batch, sequence of this context-parallel rank], from the loader.
        layout: coordinates.
    """
    return {name: x.to(layout.device, non_blocking=True) for name, x in batch.items()}

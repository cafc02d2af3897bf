"""Learnable sinks of Megatron-Core's own attention modules, counted in norm and clipping.

A tensor-parallel rank holds the sinks of its heads. Megatron-Core 0.19.2 and Transformer Engine do
not mark them as parts, so the gradient norm takes those of the first rank for copies of all others
and leaves the rest out. `CoreAttention` marks its own.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes


def mark_sinks(model: torch.nn.Module) -> None:
    """Mark every sink parameter [heads of this rank] as one part of its tensor-parallel group's."""
    for name, parameter in model.named_parameters():
        marked = getattr(parameter, "tensor_model_parallel", False)
        if name.endswith(".softmax_offset") and not marked:
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

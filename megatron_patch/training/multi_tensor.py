"""Norm and scaling of many gradients where neither Transformer Engine nor Apex is installed.

Megatron-Core's own stand-ins bring the norm of every single gradient to the host, one after the
other, while the GPU waits, and scale the gradients through a copy of each.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> bool:
    """Replace core's stand-ins, and nothing else; whether there was something to replace."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads as core

    replaced = False
    for name, stand_in, ours in (
        ("l2_norm_impl", utils.local_multi_tensor_l2_norm, _l2_norm),
        ("multi_tensor_scale_impl", utils.local_multi_tensor_scale, _scale),
    ):
        if getattr(core, name) is stand_in:
            setattr(core, name, ours)
            replaced = True
    return replaced


def _l2_norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    per_tensor: bool,
    *unused: Any,
) -> tuple[torch.Tensor, None]:
    """(norm of all tensors as one vector [1], None), on their device."""
    assert not per_tensor, "Megatron-Core asks for the total norm alone"
    (tensors,) = tensor_lists
    return torch.nn.utils.get_total_norm(tensors).reshape(1), None


def _scale(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    factor: float,
) -> None:
    source, target = tensor_lists
    assert source is target, "Megatron-Core clips gradients in place"
    torch._foreach_mul_(target, factor)

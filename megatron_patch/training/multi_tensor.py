"""Norm, scaling and copies of many tensors at once, where Megatron-Core takes one after the other.

Without Transformer Engine and Apex, core's stand-ins bring the norm of every single gradient to the
host while the GPU waits, and scale the gradients through a copy of each. With or without them it
copies updated weights one parameter at a time.
"""

from __future__ import annotations

import functools
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


def copy_weights_at_once(optimizer: Any) -> int:
    """Let sharded optimizers copy all updated weights in one go; how many of them now do.

    Those with quantized weights, FSDP buffers or their own main weights keep core's way.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    changed = 0
    for part in optimizer.chained_optimizers:
        if type(part) is not DistributedOptimizer or part.is_stub_optimizer:
            continue
        ddp, own = part.ddp_config, part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        if ddp.use_megatron_fsdp or ddp.fp8_param_gather or ddp.fp4_param_gather or own:
            continue
        part._copy_main_params_to_model_params = functools.partial(_copy_weights, part)
        changed += 1
    return changed


@torch.no_grad()
def _copy_weights(part: Any) -> None:
    """This rank's shards of the FP32 weights, rounded into the model's buffers."""
    new: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    for shards, parameters in (
        (part.shard_fp32_from_float16_groups, part.model_float16_groups),
        (part.shard_fp32_groups, part.model_fp32_groups),
    ):
        for group, models in zip(shards, parameters, strict=True):
            for shard, model in zip(group, models, strict=True):
                where = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
                buffer, _, bucket = part.model_param_gbuf_map[model]
                flat = part.buffers[buffer].buckets[bucket].param_data.view(-1)
                new.append(shard)
                places.append(flat[where.start : where.end])
    if new:
        torch._foreach_copy_(places, new)


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

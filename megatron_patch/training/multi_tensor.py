"""Norm, scaling and copies of many tensors at once, where Megatron-Core takes one after the other.

Without Transformer Engine and Apex, core's stand-ins bring the norm of every single gradient to the
host while the GPU waits, and scale the gradients through a copy of each. With or without them it
copies updated weights one parameter at a time, and looks up where to in every step. All this is
done between the moment the norm is known and the update, or just after it, when the GPU has nothing
else to do: host time there is time lost.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def install() -> bool:
    """Replace core's stand-ins, and nothing else; whether there was something to replace."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads as core
    from megatron.core.optimizer import optimizer as callers

    replaced = False
    for name, stand_in, ours in (
        ("l2_norm_impl", utils.local_multi_tensor_l2_norm, _l2_norm),
        ("multi_tensor_scale_impl", utils.local_multi_tensor_scale, _scale),
    ):
        if getattr(core, name) is stand_in:
            setattr(core, name, ours)
            replaced = True
    if replaced:
        # With this one core leaves the norm on the device.
        core.multi_tensor_scale_tensor_impl = _scale_by_tensor
        clip = functools.partial(_clip, core.clip_grad_by_total_norm_fp32)
        callers.clip_grad_by_total_norm_fp32 = clip
    return replaced


class ClippedByUpdate:
    """Handed to core in the place of a norm: the update itself will clip by it (`gate`)."""


def clips() -> bool:
    """Whether `install` has put `_clip` in the place of core's clipping."""
    from megatron.core.optimizer import optimizer as callers

    found = callers.clip_grad_by_total_norm_fp32
    return isinstance(found, functools.partial) and found.func is _clip


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
        part._copy_main_params_to_model_params = _CopyWeights(part)
        changed += 1
    return changed


class _CopyWeights:
    """This rank's shards of the FP32 weights, rounded into the model's buffers.

    Where each belongs is looked up again when core has put another tensor in the place of one.
    """

    def __init__(self, part: Any) -> None:
        self._part = part
        self._of: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []

    @torch.no_grad()
    def __call__(self) -> None:
        part = self._part
        groups = (*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)
        new = [shard for group in groups for shard in group]
        held = [bucket.param_data for buffer in part.buffers for bucket in buffer.buckets]
        of = [*new, *held]
        # By identity; both lists are alive, so that no address has been used again.
        if len(of) != len(self._of) or any(a is not b for a, b in zip(of, self._of, strict=True)):
            self._of, self._places = of, self._look_up()
        if new:
            torch._foreach_copy_(self._places, new)

    def _look_up(self) -> list[torch.Tensor]:
        part, places = self._part, []
        for model in (m for g in (*part.model_float16_groups, *part.model_fp32_groups) for m in g):
            where = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            buffer, _, bucket = part.model_param_gbuf_map[model]
            flat = part.buffers[buffer].buckets[bucket].param_data.view(-1)
            places.append(flat[where.start : where.end])
        return places


def _clip(
    core: Any, parameters: Any, max_norm: float, total_norm: Any, *rest: Any, **options: Any
) -> None:
    """Core's clipping, where there is something to clip: it gathers all gradients first."""
    if isinstance(total_norm, ClippedByUpdate):
        return
    if isinstance(total_norm, float) and max_norm / (total_norm + 1.0e-6) >= 1.0:
        return
    core(parameters, max_norm, total_norm, *rest, **options)


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


def _scale_by_tensor(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    factor: torch.Tensor,
) -> None:
    source, target = tensor_lists
    assert source is target, "Megatron-Core clips gradients in place"
    torch._foreach_mul_(target, factor.reshape(()))

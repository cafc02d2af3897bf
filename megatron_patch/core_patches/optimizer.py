"""Megatron-Core's optimizer: the norm, copies of many tensors at once, the kernel that runs.

Without Transformer Engine and Apex, core's stand-ins bring the norm of every single gradient to the
host while the GPU waits, and scale the gradients through a copy of each. With or without them it
copies updated weights one parameter at a time, and looks up where to in every step. All this is
done between the moment the norm is known and the update, or just after it, when the GPU has nothing
else to do: host time there is time lost.

Core takes its Adam from what is installed, and runs PyTorch's unfused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from megatron_patch.core_patches.replace import Change, Replacement, patched
from megatron_patch.schema.problem import ConfigError, Problem

IMPLEMENTATIONS = {
    "te": "Transformer Engine FusedAdam",
    "apex": "Apex FusedAdam",
    "torch": "PyTorch AdamW",
}


def _norm_and_clipping(*, any_kernel: bool = False) -> Iterator[Change]:
    """Core's stand-ins; with ``any_kernel`` those of Transformer Engine and Apex too."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads as core
    from megatron.core.optimizer import optimizer as callers

    replacing = False
    for name, stand_in, ours in (
        ("l2_norm_impl", utils.local_multi_tensor_l2_norm, _l2_norm),
        ("multi_tensor_scale_impl", utils.local_multi_tensor_scale, _scale),
    ):
        now = getattr(core, name)
        if now is stand_in or (any_kernel and now is not ours):
            replacing = True
            yield core, name, ours
    if replacing:
        # With this one core leaves the norm on the device.
        yield core, "multi_tensor_scale_tensor_impl", _scale
        clip = functools.partial(_clip, core.clip_grad_by_total_norm_fp32)
        yield callers, "clip_grad_by_total_norm_fp32", clip


norm_and_clipping = Replacement(_norm_and_clipping)


class ClippedByUpdate:
    """Handed to core in the place of a norm: the update itself will clip by it (`gate`)."""


def clips() -> bool:
    """Whether `_clip` stands in the place of core's clipping."""
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
        self._known: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []

    @torch.no_grad()
    def __call__(self) -> None:
        part = self._part
        groups = (*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)
        new = [shard for group in groups for shard in group]
        buckets = [bucket.param_data for buffer in part.buffers for bucket in buffer.buckets]
        now = [*new, *buckets]
        # By identity; both lists are alive, so that no address has been used again.
        known = self._known
        if len(now) != len(known) or any(a is not b for a, b in zip(now, known, strict=True)):
            self._known, self._places = now, self._look_up()
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
    factor: float | torch.Tensor,
) -> None:
    """Multiply by a number, or by a tensor of one element."""
    source, target = tensor_lists
    assert source is target, "Megatron-Core clips gradients in place"
    number = factor.reshape(()) if isinstance(factor, torch.Tensor) else factor
    torch._foreach_mul_(target, number)


def installed_implementation() -> str:
    """What Megatron-Core would take by itself: ``te``, else ``apex``, else ``torch``."""
    import megatron.core.optimizer as core

    if core.USING_PYTORCH_OPTIMIZER:
        return "torch"
    return "te" if core.Adam.__module__.startswith("transformer_engine") else "apex"


@contextlib.contextmanager
def adam(implementation: str) -> Iterator[str]:
    """Make Megatron-Core build its optimizer from the wanted kernel; yields its short name.

    Raises ConfigError: the kernel is not installed.
    """
    import megatron.core.optimizer as core

    found = installed_implementation()
    if implementation in ("auto", found):
        yield found
        return
    if implementation == "torch":
        kernel: Any = torch.optim.AdamW
    elif implementation == "apex" and importlib.util.find_spec("amp_C") is not None:
        from apex.optimizers import FusedAdam

        kernel = FusedAdam
    else:
        text = (
            f"{implementation}: {IMPLEMENTATIONS[implementation]} is not installed here; auto "
            f"takes {IMPLEMENTATIONS[found]}"
        )
        raise ConfigError([Problem("optimizer.implementation", text)])
    plain = implementation == "torch"
    with patched((core, "Adam", kernel), (core, "USING_PYTORCH_OPTIMIZER", plain)):
        yield implementation


def use_fused_kernel(optimizer: Any) -> None:
    """Switch PyTorch's AdamW to its one-kernel update; call again after a checkpoint was loaded.

    Megatron-Core offers no option for it, and a checkpoint carries the flags of its writer. The
    fused kernel wants its step counters on the device.
    """
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            group["fused"], group["foreach"] = True, False
            for parameter in group["params"]:
                step = inner.state.get(parameter, {}).get("step")
                if step is not None:
                    inner.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32).to(
                        parameter.device
                    )


def prepare_muon(chunks: list[Any]) -> None:
    """Let core's Muon leave tables of positions to AdamW, as it does those of words.

    Raises ConfigError: the package that core takes it from is not installed.
    """
    if importlib.util.find_spec("emerging_optimizers") is None:
        text = (
            "muon: the package emerging-optimizers is not installed here: pip install "
            "megatron-patch-stable[muon], or use adamw"
        )
        raise ConfigError([Problem("optimizer.name", text)])
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("position_embeddings.weight"):
                parameter.is_embedding_or_output_parameter = True


def split_shared_groups(chunks: list[Any], optimizer: Any) -> None:
    """Let Muon take W_Q, W_K and W_V apart where tensor-parallel ranks share a query group, too.

    Core does so where a rank has whole groups, and else takes the rows of all three for one matrix:
    another update than that of one rank.
    """
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    shared = {
        id(getattr(parameter, "main_param", parameter))
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if name.endswith("linear_qkv.weight") and not getattr(parameter, "is_qkv", False)
    }
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if shared and isinstance(inner, TensorParallelMuon):
            group = inner.pg_collection.tp
            inner.orthogonalize = functools.partial(  # type: ignore[method-assign]
                _of_whole_groups, inner.orthogonalize, shared, group
            )


def _of_whole_groups(
    core: Any, shared: set[int], tp: Any, parameter: Any, grad: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Core's ``orthogonalize``, of ``shared`` weights as one rank does it. Collective over ``tp``
    where the parameter is one of them."""
    if id(parameter) not in shared:
        return core(parameter, grad, **options)
    rows = [torch.empty_like(grad) for _ in range(tp.size())]
    torch.distributed.all_gather(rows, grad.contiguous(), group=tp)
    whole = core(SimpleNamespace(is_qkv=True), torch.cat(rows), **options)
    return whole.chunk(tp.size())[tp.rank()]


@contextlib.contextmanager
def dealing_out_experts() -> Iterator[None]:
    """Let the layer-wise optimizer deal experts out where only they have copies on other ranks.

    With one data-parallel rank core deals nothing out. But tensor-parallel ranks may hold whole
    experts: each would count them in the norm, and write them into the same place of a checkpoint.
    """
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as Core

    core = Core.shard_params

    def shard_params(self: Any, optimizers: Any, layouts: Any = None) -> None:
        ranks = self.expt_dp.size()
        if self.dp_cp.size() > 1 or ranks == 1:
            core(self, optimizers, layouts)
            return
        self._shard_params_ping_pong(optimizers, 1, ranks)
        self.dp_cp_params_list = None  # nothing to gather

    with patched((Core, "shard_params", shard_params)):
        yield


def gather_on_gloo(optimizer: Any) -> None:
    """Gather updated weights by broadcasts where the group is gloo's: its gather wants equal
    sizes, and the layer-wise optimizer has whole matrices."""
    if torch.distributed.get_backend(optimizer.dp_cp) == "gloo":
        optimizer.allgather_params = functools.partial(_broadcast, optimizer)


@torch.no_grad()
def _broadcast(optimizer: Any) -> None:
    """Core's ``broadcast_params``, which leaves experts out where they alone are dealt out."""
    for owned, group in (
        (optimizer.dp_cp_params_list, optimizer.dp_cp),
        (optimizer.expt_dp_params_list, optimizer.expt_dp),
    ):
        for rank, parameters in enumerate(owned or ()):
            source = torch.distributed.get_global_rank(group, rank)
            for parameter in parameters:
                torch.distributed.broadcast(parameter, source, group)

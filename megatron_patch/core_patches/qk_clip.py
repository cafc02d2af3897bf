"""QK-Clip of Megatron-Core for every model and optimizer: `clip_qk` stands for core's.

Core's reads ``self_attention`` of every layer, which layers without attention lack (hybrids), and
reshapes ``main_param`` as a whole weight, of which the distributed optimizer has a flat shard. Of
fused projections it takes a tensor-parallel rank's rows for those of all ranks, and it leaves their
biases as they are: logits that come from these stay, and every step scales the weights once more.
It returns the largest logit of one tensor and pipeline rank; this one that of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_patch.core_patches.replace import patched
from megatron_patch.parallel.buffers import own_values

_CLIPPED = {
    "linear_qkv": "_clip_linear_qkv",
    "linear_q_proj": "_clip_q_proj_weight",
    "linear_q_up_proj": "_clip_q_proj_weight",
    "linear_kv_up_proj": "_clip_kv_proj_weight",
}
"""Projections that attention's own ``clip_qk`` scales, and its method that scales such a weight."""


@torch.no_grad()
def clip_qk(model: Sequence[Any], log_max_only: bool = False) -> float:
    """Scale W_Q and W_K of heads whose largest logit is above ``config.qk_clip_threshold``.

    Call after the optimizer's step, on all ranks. Collective; waits for the device.

    Args:
        model: chunks in Megatron's DistributedDataParallel.
        log_max_only: measure and scale nothing.

    Returns the largest logit since the last call, over all ranks; 0 where nobody measured one.

    Raises ValueError: the optimizer keeps no FP32 weights that can be scaled.
    """
    found = [(chunk, attention) for chunk in model for attention in _measured(chunk)]
    from megatron.core import parallel_state  # not before the CPU mode: the loop imports this

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    device = next(model[0].parameters()).device
    largest = torch.zeros(1, dtype=torch.float32, device=device)
    for _, attention in found:
        logits = attention.core_attention.current_max_attn_logits
        torch.distributed.all_reduce(logits, op=torch.distributed.ReduceOp.MAX, group=group)
        largest = torch.maximum(largest, logits.max().float())
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    for chunk, attention in found:
        if log_max_only:
            attention.core_attention.current_max_attn_logits = None
        elif hasattr(attention, "linear_qkv"):
            _share_groups(attention)
            with patched((attention, "_clip_linear_qkv", partial(_scale_rows, attention))):
                _clip(chunk, attention)
        else:
            _clip(chunk, attention)
    return float(largest)


def _measured(chunk: Any) -> list[Any]:
    """Self-attention modules of a chunk, wherever they are, that have logits."""
    return [
        module
        for module in chunk.modules()
        if hasattr(module, "clip_qk")
        and getattr(module.core_attention, "current_max_attn_logits", None) is not None
    ]


def _share_groups(attention: Any) -> None:
    """Where ranks share a query group, give each its largest logit, as core counts heads there: all
    of the group. Collective."""
    tp, groups = attention.pg_collection.tp, attention.config.num_query_groups
    if tp.size() <= groups:
        return
    core = attention.core_attention
    logits = core.current_max_attn_logits
    every = [torch.empty_like(logits) for _ in range(tp.size())]
    torch.distributed.all_gather(every, logits, group=tp)
    largest = torch.stack(every).view(groups, -1).amax(1)[tp.rank() * groups // tp.size()]
    core.current_max_attn_logits = largest.repeat(attention.num_attention_heads_per_partition)


def _scale_rows(attention: Any, weight: torch.Tensor) -> torch.Tensor:
    """Scale this tensor-parallel rank's rows of a fused projection, in place.

    A group's rows are those of its queries, of its key and of its value; ranks that share a group
    have a part of them each.
    """
    config, eta = attention.config, attention.qk_clip_balancing_eta.view(-1, 1)
    width, alpha = attention.hidden_size_per_attention_head, config.qk_clip_alpha
    queries = config.num_attention_heads // config.num_query_groups * width
    parts = eta.pow(alpha).expand(-1, queries), eta.pow(1 - alpha).expand(-1, width)
    factors = torch.cat([*parts, torch.ones_like(eta).expand(-1, width)], dim=1)
    tp = attention.pg_collection.tp
    sharing = max(1, tp.size() // config.num_query_groups)
    return weight.mul_(factors.view(sharing, -1)[tp.rank() % sharing].unsqueeze(1))


def _scale_bias(attention: Any, bias: torch.Tensor) -> torch.Tensor:
    """The same of its bias, in place."""
    return _scale_rows(attention, bias.unsqueeze(1)).squeeze(1)


def _clip(chunk: Any, attention: Any) -> None:
    """Core's clip of weights, and the same of biases and of shards that the optimizer updates."""
    logits = attention.core_attention.current_max_attn_logits
    threshold = attention.config.qk_clip_threshold
    above = logits > threshold
    # Core takes the square root of their quotient, which a head without a positive logit has not.
    logits.clamp_(min=threshold)
    sharded: list[tuple[Any, Callable[..., Any], Any]] = []
    for name, method in _CLIPPED.items():
        weight: Any = getattr(getattr(attention, name, None), "weight", None)
        if weight is not None and getattr(weight, "main_param_sharded", False):
            sharded.append((weight, getattr(attention, method), weight.main_param))
            del weight.main_param  # core would take it for the whole weight
    try:
        attention.clip_qk()
    finally:
        for weight, _, main in sharded:
            weight.main_param = main
    bias = getattr(getattr(attention, "linear_qkv", None), "bias", None)
    if bias is not None and not bias.numel():  # Transformer Engine's way to have none
        bias = None
    if (not sharded and bias is None) or not bool(above.any()):
        return
    if bias is not None:
        scale_bias = partial(_scale_bias, attention)
        scale_bias(bias.data)
        main = getattr(bias, "main_param", None)
        if getattr(bias, "main_param_sharded", False):
            sharded.append((bias, scale_bias, main))
        elif main is not None:
            scale_bias(main.data)
    for weight, scale, main in sharded:
        place = _place(chunk, weight)
        if place is None:  # other ranks update all of it
            continue
        if main is None:
            raise ValueError(
                "qk_clip: the optimizer keeps no FP32 weights (use_precision_aware_optimizer); "
                "turn that off, or qk_clip"
            )
        # What the scaling does to ones are its factors.
        factors = scale(torch.ones_like(weight, dtype=torch.float32)).flatten()
        main.view(-1).mul_(factors[slice(*place)])


def _place(chunk: Any, weight: torch.nn.Parameter) -> tuple[int, int] | None:
    """First and last value of the flat weight that this rank's optimizer updates; None: it updates
    none of it."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        for parameter, low, high in own_values(buffer):
            if parameter is weight:
                begin = buffer.param_index_map[parameter][0]
                return low - begin, high - begin
    return None

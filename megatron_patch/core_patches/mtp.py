"""Multi-token-prediction loss that depends on neither layout nor micro-batches.

Shape legend: b micro-batch, s tokens of this context-parallel rank, h hidden size, k depths.

The loss of depth d is a mean over its tokens, of which the last d positions of a sequence are none.
All gradients are divided by the tokens of the main loss in the global batch, so a depth's sum is
weighted by (tokens of the main loss) / (tokens of depth d). Megatron-Core 0.19.2 takes both numbers
from what one rank holds of one micro-batch: with masks the gradient is that of a mean of unequal
means, and a micro-batch without tokens of the main loss loses its extra losses altogether. So does
the mean that it records. The training loop knows the numbers of the global batch: `tokens_of_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction as core

_tokens: torch.Tensor | None = None


@contextmanager
def tokens_of_step(counts: torch.Tensor | None) -> Iterator[None]:
    """Inside, losses of extra depths are weighted for a global batch; None: call by call.

    ``counts``: [1 + k], tokens of the main loss, then of every depth, in the mean micro-batch of a
    data- and context-parallel rank; more than 0.
    """
    global _tokens
    before, _tokens = _tokens, counts
    try:
        yield
    finally:
        _tokens = before


def process_mtp_loss(
    *, cp_group: torch.distributed.ProcessGroup | None = None, **arguments: Any
) -> torch.Tensor:
    """Megatron-Core's function of this name, its tokens counted over the global batch.

    Outside `tokens_of_step` they are counted over the whole sequences of the call.

    Returns [s, b, h], the hidden states of the main model with the extra losses attached for the
    backward pass.
    """
    if _tokens is None and (cp_group is None or cp_group.size() == 1):
        return core.process_mtp_loss(cp_group=cp_group, **arguments)
    return _weighted(cp_group=cp_group, **arguments)


def _weighted(
    *,
    hidden_states: torch.Tensor,  # [(1 + k) s, b, h]: the main model's, then every depth's
    labels: torch.Tensor,  # [b, s]
    loss_mask: torch.Tensor | None,  # [b, s]
    output_layer: Callable[..., Any],
    output_weight: torch.Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    config: Any,
    cp_group: torch.distributed.ProcessGroup | None,
    packed_seq_params: Any = None,
    scale_logits_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **unused: Any,  # tp_group and input_ids: for acceptance rates and runs without labels
) -> torch.Tensor:
    depths = config.mtp_num_layers
    assert labels is not None and config.calculate_per_token_loss and not config.mtp_detach_heads

    def ahead(x: torch.Tensor) -> torch.Tensor:
        return core.roll_tensor(x, cp_group=cp_group, packed_seq_params=packed_seq_params)[0]

    masks = [torch.ones_like(labels) if loss_mask is None else loss_mask]
    for _ in range(depths):
        masks.append(ahead(masks[-1]))
    tokens = _tokens
    if tokens is None:
        assert cp_group is not None, "core's function serves a call alone"
        tokens = _tokens_of_call(masks, cp_group)
    main, *others = hidden_states.chunk(1 + depths, dim=0)
    for depth, states in enumerate(others, start=1):
        logits, _ = output_layer(
            states, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        labels = ahead(labels)
        loss = masks[depth] * compute_language_model_loss(labels, logits)
        if is_training:  # averaged over ranks and micro-batches when it is read
            _record(loss.detach().sum() / tokens[depth], depth - 1, depths)
        scale = config.mtp_loss_scaling_factor / depths
        main = core.MTPLossAutoScaler.apply(main, scale * loss * (tokens[0] / tokens[depth]))
    return main


def _tokens_of_call(
    masks: list[torch.Tensor], cp_group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """[1 + k], tokens of the mean rank of ``cp_group``. Collective over it."""
    tokens = torch.stack([mask.sum(dtype=torch.float32) for mask in masks])
    torch.distributed.all_reduce(tokens, group=cp_group)
    tokens[1:].clamp_(min=1)
    return tokens / cp_group.size()


def _record(loss: torch.Tensor, index: int, depths: int) -> None:
    from megatron.core import parallel_state

    nothing = torch.zeros_like(loss)  # acceptance rates: nobody reads them here
    core.MTPLossLoggingHelper.save_metrics_to_tracker(
        loss,
        nothing,
        nothing,
        index,
        depths,
        avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )

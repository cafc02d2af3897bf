"""Multi-token-prediction loss that does not depend on how many ranks a sequence is split over.

Shape legend: b micro-batch, s tokens of this context-parallel rank, h hidden size, k depths.

The loss of depth d counts as many tokens as the main loss: its sum is weighted by (tokens of the
main loss) / (tokens of depth d), of which the last d positions of a sequence have none. Megatron-
Core 0.19.2 takes both numbers from the tokens one rank holds. Under context parallelism one rank
holds all of the lost positions, and masks leave ranks with different numbers, so that its gradients
differ from those of an unsplit sequence; so does the mean that it records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction as core


def process_mtp_loss(
    *, cp_group: torch.distributed.ProcessGroup | None = None, **arguments: Any
) -> torch.Tensor:
    """Megatron-Core's function of this name, its token counts taken over the whole sequence.

    Returns:
        [s, b, h], the hidden states of the main model with the extra losses attached for the
        backward pass.
    """
    if cp_group is None or cp_group.size() == 1:
        return core.process_mtp_loss(cp_group=cp_group, **arguments)
    return _over_context(cp_group=cp_group, **arguments)


def _over_context(
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
    cp_group: torch.distributed.ProcessGroup,
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
    tokens = torch.stack([mask.sum(dtype=torch.float32) for mask in masks])
    torch.distributed.all_reduce(tokens, group=cp_group)
    tokens[1:].clamp_(min=1)
    main, *others = hidden_states.chunk(1 + depths, dim=0)
    for depth, states in enumerate(others, start=1):
        logits, _ = output_layer(
            states, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        labels = ahead(labels)
        loss = masks[depth] * compute_language_model_loss(labels, logits)
        if is_training:
            # Averaged over data- and context-parallel ranks when it is read: times the latter.
            mean = loss.detach().sum() * cp_group.size() / tokens[depth]
            _record(mean, depth - 1, depths)
        scale = config.mtp_loss_scaling_factor / depths
        main = core.MTPLossAutoScaler.apply(main, scale * loss * (tokens[0] / tokens[depth]))
    return main


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

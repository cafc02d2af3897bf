"""Losses beside the main one, as Megatron-Core tracks them: MoE balancing, multi-token prediction.

Core accumulates them over micro-batches in process-wide trackers. They are cleared before every
step and read at logging intervals only, so a record holds exactly one step.

Every gradient is divided once, by the tokens of the global batch that carry the main loss. These
losses are means over other numbers of tokens, and `weighed` makes up for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_patch.context_parallel.layout import shard
from megatron_patch.data.reader import Batch
from megatron_patch.schema.effective import masks_ends
from megatron_patch.schema.model import moe_layers
from megatron_patch.training.session import Session

_BALANCING = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}


def clear(session: Session) -> None:
    """Forget what earlier steps left in the trackers."""
    if session.run.model.moe is not None:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().clear()
    if session.run.model.mtp is not None:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.clean_metrics_in_tracker()


@contextlib.contextmanager
def weighed(session: Session, batches: list[Batch | None]) -> Iterator[None]:
    """Inside, the losses count as their coefficients say, whatever ``data.eod_mask_loss`` masks.

    Collective where tokens are masked and the model has such losses.
    """
    run, layout = session.run, session.layout
    depths = 0 if run.model.mtp is None else run.model.mtp.num_layers
    balances = run.model.moe is not None and run.model.moe.load_balancing in _BALANCING
    if not depths and not (balances and masks_ends(run)):
        yield
        return
    from megatron_patch.core_patches.mtp import tokens_of_step

    counts = _tokens(session, batches, depths)
    if balances:
        # A mean over micro-batches; core sums it over all their tokens.
        share = counts[:1] / (session.sequences * run.model.seq_length)
        session.config.moe_grad_scale_func = share.clone
    passes = layout.dp_size * layout.cp_size * session.micro_batches
    with tokens_of_step(counts.clamp(min=1) / passes if depths else None):
        yield


def _tokens(session: Session, batches: list[Batch | None], depths: int) -> torch.Tensor:
    """[1 + depths], tokens of the global batch with the main loss, then with that of every depth.

    Depth d predicts d tokens further on: the first d masks of a sequence belong to no position.
    """
    run, layout = session.run, session.layout
    length = run.model.seq_length
    counts = torch.tensor([length - depth for depth in range(1 + depths)], dtype=torch.float64)
    if not masks_ends(run):
        return (session.sequences * counts).float().to(layout.device)
    counts.zero_()
    if layout.reports_loss:
        here = shard(torch.arange(length), rank=layout.cp_rank, size=layout.cp_size, dim=0)
        # Rows of documents are one after the other.
        masks = [b["loss_mask"].double().view(-1, len(here)).sum(0) for b in batches if b]
        by_position = torch.stack(masks).sum(0)
        counts += torch.stack([by_position[here >= depth].sum() for depth in range(1 + depths)])
    counts = counts.to(layout.device)
    torch.distributed.all_reduce(counts)  # Collective: stages that report no loss add zeros
    return counts.float()


def moe_loss(session: Session) -> float | None:
    """Balancing loss of the last step, mean over MoE layers and micro-batches. Collective."""
    model = session.run.model
    if model.moe is None or model.moe.load_balancing not in _BALANCING:
        return None
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    name = _BALANCING[model.moe.load_balancing]
    totals: dict[str, torch.Tensor] = {}
    get_moe_metrics_tracker().report(
        loss_scale=1 / session.micro_batches,
        iteration=0,  # core's own writers are not used
        force_initialize=True,
        track_names=[name],
        num_layers=model.num_layers,
        moe_layer_freq=None,  # the mean of all: core takes every depth for an MoE layer
        mtp_num_layers=model.attention_layers - model.num_layers,
        total_loss_dict=totals,
    )
    pattern = moe_layers(model) or [0]
    depths = model.attention_layers - model.num_layers  # built as the last layer is
    experts = sum(pattern) + pattern[-1] * depths
    return float(totals[name]) * model.attention_layers / experts if experts else None


def mtp_loss(session: Session) -> float | None:
    """Multi-token-prediction loss of the last step, mean over depths. Collective."""
    if session.run.model.mtp is None:
        return None
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.reduce_metrics_in_tracker()
    layout = session.layout
    values = MTPLossLoggingHelper.tracker.get("loss_values")
    # The losses live on the last stage; one rank of it lends them to everybody.
    mine = torch.zeros(1, dtype=torch.float64, device=layout.device)
    if values is not None and layout.reports_loss and layout.dp_rank == layout.cp_rank == 0:
        mine += values.double().mean() / session.micro_batches
    torch.distributed.all_reduce(mine)
    MTPLossLoggingHelper.clean_metrics_in_tracker()
    return float(mine)

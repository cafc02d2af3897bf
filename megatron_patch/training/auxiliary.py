"""Losses beside the main one, as Megatron-Core tracks them: MoE balancing, multi-token prediction.

Core accumulates them over micro-batches in process-wide trackers. They are cleared before every
step and read at logging intervals only, so a record holds exactly one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_patch.training.session import Session

_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
}


def clear(session: Session) -> None:
    """Forget what earlier steps left in the trackers."""
    if session.run.model.moe is not None:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().clear()
    if session.run.model.mtp is not None:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.clean_metrics_in_tracker()


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
        moe_layer_freq=model.moe.layer_freq,
        mtp_num_layers=None if model.mtp is None else model.mtp.num_layers,
        total_loss_dict=totals,
    )
    return float(totals[name])


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

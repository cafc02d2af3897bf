"""Where a rank stands among those whose records are added up, whatever program started them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Coordinates of this rank. Records are reduced over the default process group."""

    device: torch.device
    rank: int = 0
    """In the default process group; rank 0 writes the files."""
    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    """Of data parallelism without context parallelism; rank 0 of it writes captures."""
    cp: Any = None
    """Process group that sequences are split over; None: they are whole."""
    reports_loss: bool = True
    """Whether the loss that this rank gives counts: one rank of each batch."""

    @classmethod
    def find(cls, device: torch.device) -> Groups:
        """From Megatron-Core's parallel state, where that is initialized; else data parallel."""
        from megatron.core import parallel_state as state

        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if not state.model_parallel_is_initialized():
            return cls(device=device, rank=rank, dp_rank=rank)
        cp = state.get_context_parallel_group()
        last = state.is_pipeline_last_stage(ignore_virtual=True)
        tp_rank = state.get_tensor_model_parallel_rank()
        return cls(
            device=device,
            rank=rank,
            tp_rank=tp_rank,
            tp_size=state.get_tensor_model_parallel_world_size(),
            dp_rank=state.get_data_parallel_rank(),
            cp=cp if cp.size() > 1 else None,
            reports_loss=last and tp_rank == 0,
        )


def add_up(x: torch.Tensor) -> torch.Tensor:
    """Sum over the default process group, in place; nothing without one. Collective."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x)
    return x


def largest_of_all(x: torch.Tensor) -> torch.Tensor:
    """As `add_up`, the maximum. Collective."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.MAX)
    return x

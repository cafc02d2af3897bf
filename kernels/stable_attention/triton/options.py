"""What every launcher passes to its kernel besides the tensors it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from stable_attention.configs import tile_width
from stable_attention.problem import UNLIMITED, Problem

LOG2E = 1.4426950408889634

# Lengths and positions change from step to step; specialising on them would recompile.
NO_SPECIALIZE = (
    "sq", "sk", "tq", "tk", "heads", "tiles", "left", "right", "pos_q", "pos_k",
    "batch_offset", "head_offset", "threshold", "stride_lb", "stride_lh",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """Optional tensors and scalars of a call."""

    sinks: torch.Tensor | None = None
    """[h] sink logits, natural-log units."""
    seed: torch.Tensor | None = None
    """int64 scalar on the device."""
    cu_q: torch.Tensor | None = None
    """int32 [b + 1] token offsets of packed sequences."""
    cu_k: torch.Tensor | None = None
    start_q: torch.Tensor | None = None
    """int32 [b] where sequences start in memory, if not at ``cu_q``."""
    start_k: torch.Tensor | None = None
    chunked: bool = False
    """Positions are global (chunks of a longer sequence), not bottom-right aligned."""
    pos_q: int = 0
    """Global position of query row 0 (and of key 0 in ``pos_k``)."""
    pos_k: int = 0
    pos_q_tensor: torch.Tensor | None = None
    """int32 [b] global positions, one a packed sequence; replaces ``pos_q``."""
    pos_k_tensor: torch.Tensor | None = None
    batch_offset: int = 0
    head_offset: int = 0
    beta: float = 2.0
    eps: float = 1e-3

    def pointers(self) -> tuple[torch.Tensor | None, ...]:
        """cu, start and position tensors in kernel order."""
        return (
            self.cu_q,
            self.cu_k,
            self.cu_q if self.start_q is None else self.start_q,
            self.cu_k if self.start_k is None else self.start_k,
            self.pos_q_tensor,
            self.pos_k_tensor,
        )

    def scalars(self) -> tuple[object, ...]:
        """All that is not a tensor, for `launches.launch`."""
        return (
            self.chunked,
            self.pos_q,
            self.pos_k,
            self.batch_offset,
            self.head_offset,
            self.beta,
            self.eps,
        )


def padded(d: int) -> int:
    """Head dim as the extent of an undivided tile, for kernels without products over it."""
    return max(16, triton.next_power_of_2(d))


def common_arguments(problem: Problem, extras: Extras) -> dict[str, object]:
    """Keyword arguments that the forward and the backward kernels share."""
    capped = problem.softcap > 0
    return {
        "sq": problem.sq,
        "sk": problem.sk,
        "tq": problem.tq,
        "tk": problem.tk,
        "heads": problem.heads,
        "left": problem.window_left,
        "right": problem.window_right,
        "pos_q": extras.pos_q,
        "pos_k": extras.pos_k,
        "batch_offset": extras.batch_offset,
        "head_offset": extras.head_offset,
        "threshold": min(int(problem.dropout_p * 2**32), 2**32 - 1),
        "unit": (problem.softcap if capped else problem.scale) * LOG2E,
        "capped_scale": problem.scale / problem.softcap if capped else 0.0,
        "GROUP": problem.group,
        "D": problem.d,
        "DV": problem.dv,
        "BD": tile_width(problem.d),
        "BDV": tile_width(problem.dv),
        "VARLEN": problem.varlen,
        "HAS_LEFT": problem.window_left != UNLIMITED,
        "HAS_RIGHT": problem.window_right != UNLIMITED,
        "CAPPED": capped,
        "DROPOUT": problem.dropout_p > 0,
        "CHUNKED": extras.chunked,
        "POS_PTR": extras.pos_q_tensor is not None,
    }

"""What every launcher passes to its kernel besides the tensors it reads and writes."""

from __future__ import annotations

import triton

from stable_attention.configs import tile_width
from stable_attention.problem import UNLIMITED, Extras, Problem

LOG2E = 1.4426950408889634

# Lengths and positions change from step to step; specialising on them would recompile.
NO_SPECIALIZE = (
    "sq", "sk", "tq", "tk", "heads", "tiles", "left", "right", "pos_q", "pos_k",
    "batch_offset", "head_offset", "threshold", "stride_lb", "stride_lh",
)  # fmt: skip


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
        "pos_q": problem.pos_q,
        "pos_k": problem.pos_k,
        "batch_offset": problem.batch_offset,
        "head_offset": problem.head_offset,
        "threshold": min(int(problem.dropout_p * 2**32), 2**32 - 1),
        "unit": (problem.softcap if capped else problem.scale) * LOG2E,
        "capped_scale": problem.scale / problem.softcap if capped else 0.0,
        "GROUP": problem.group,
        "D": problem.d,
        "DV": problem.dv,
        "BD": tile_width(problem.d),
        "BDV": tile_width(problem.dv),
        # Of dense tensors where a sequence may be left out: see `carrier`.
        "VARLEN": problem.varlen or extras.cu_q is not None,
        "HAS_LEFT": problem.window_left != UNLIMITED,
        "HAS_RIGHT": problem.window_right != UNLIMITED,
        "CAPPED": capped,
        "DROPOUT": problem.dropout_p > 0,
        "CHUNKED": problem.chunked,
        "POS_PTR": extras.pos_q is not None,
    }

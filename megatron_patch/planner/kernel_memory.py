"""What an attention backend keeps for its backward pass, and works on in it.

Shape legend: as in `sizes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.backends.row import FLOAT
from megatron_patch.attention.capabilities import OURS
from megatron_patch.stability.guard import TARGET

if TYPE_CHECKING:
    from megatron_patch.planner.sizes import RankShapes
    from megatron_patch.schema.run import RunConfig


def kernel_bytes(run: RunConfig, n: RankShapes) -> int:
    """Bytes the attention backend keeps for the backward beside q, k and v, O included.

    With ``stability.guard: switch`` the larger of before and after the switch: it comes in the
    middle of a run, which must not end there for lack of memory.
    """
    attention = run.attention
    residual = "bf16" if attention.residual == "default" else attention.residual
    keys = _keys(run, n)
    now = BACKENDS[attention.backend].saved_bytes(n, keys, attention.stabilizer, residual)
    if run.stability.guard != "switch":
        return now
    backend, options = TARGET
    kept = residual if attention.backend == backend else "bf16"
    return max(now, BACKENDS[backend].saved_bytes(n, keys, options["stabilizer"], kept))


def score_bytes(run: RunConfig, n: RankShapes) -> int:
    """What a backend works on in its backward pass, beside what it saved and returns.

    A backward of another library is handed a tensor in place of O.

    Score matrices of the unfused ones; dQ in float32, and two numbers a row, of ours on sm_90,
    which is planned for whatever the GPU.
    """
    row = BACKENDS[run.attention.backend]
    sums = FLOAT * n.T * n.q * (n.d + 2) if _sums_dq(run, n, row.summed_head_dims) else 0
    borrowed = run.attention.backend == "fa4" or run.attention.backward not in OURS
    carrier = n.T * n.q * n.dv * n.w if borrowed else 0
    return row.score_bytes(n, _keys(run, n)) + sums + carrier


def _sums_dq(run: RunConfig, n: RankShapes, head_dims: tuple[int, ...]) -> bool:
    every_layer_windowed = run.model.window is not None and run.model.window_skip_freq is None
    return (
        run.training.device == "cuda"
        and n.d == n.dv
        and n.d in head_dims
        and run.parallel.context_parallel_size == 1
        and run.model.attention_dropout == 0
        and not every_layer_windowed
    )


def _keys(run: RunConfig, n: RankShapes) -> int:
    return n.s * run.parallel.context_parallel_size

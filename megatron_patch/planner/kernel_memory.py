"""What an attention backend keeps for its backward pass, and works on in it.

Shape legend: as in `sizes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.stability.guard import TARGET

if TYPE_CHECKING:
    from megatron_patch.planner.sizes import RankShapes
    from megatron_patch.schema.run import RunConfig

FLOAT = 4
REFERENCE_TILE = 32 * 2**20
"""Bytes of one tile of scores in `stable_attention.reference` (its TILE_BYTES)."""
SUMMED_HEAD_DIMS = (64, 128)
"""Head dims whose dQ the kernels for sm_90 sum in float32 (`stable_attention.dispatch`)."""


def kernel_bytes(run: RunConfig, n: RankShapes) -> int:
    """Bytes the attention backend keeps for the backward beside q, k and v, O included.

    With ``stability.guard: switch`` the larger of before and after the switch: it comes in the
    middle of a run, which must not end there for lack of memory.
    """
    attention = run.attention
    residual = "bf16" if attention.residual == "default" else attention.residual
    now = _kept(run, n, attention.backend, stabilizer=attention.stabilizer, residual=residual)
    if run.stability.guard != "switch":
        return now
    backend, options = TARGET
    kept = residual if attention.backend == backend else "bf16"
    return max(now, _kept(run, n, backend, stabilizer=options["stabilizer"], residual=kept))


def _kept(run: RunConfig, n: RankShapes, backend: str, *, stabilizer: str, residual: str) -> int:
    """`kernel_bytes` of one backend.

    ``stable_flash`` states it itself (`stable_attention.stabilizers`); the vendors' flash kernels
    keep O and LSE; the unfused backends keep score matrices.
    """
    heads = n.T * n.q
    if backend == "stable_flash":
        from stable_attention.stabilizers import STABILIZERS

        return heads * STABILIZERS[stabilizer].saved_bytes(n.dv, residual)
    plain = heads * (n.w * n.dv + FLOAT)
    keys = n.s * run.parallel.context_parallel_size
    if backend == "mcore_local":
        return plain + heads * keys * (3 * n.w)
    if backend == "reference":
        return plain + heads * n.dv * FLOAT  # O in float32 as well
    return plain


def score_bytes(run: RunConfig, n: RankShapes) -> int:
    """What a backend works on in its backward pass, beside what it saved and returns.

    Score matrices of the unfused ones; dQ in float32, and two numbers a row, of ours on sm_90,
    which is planned for whatever the GPU.
    """
    scores = n.T * n.q * n.s * run.parallel.context_parallel_size
    if run.attention.backend == "stable_flash" and _sums_dq(run, n):
        return FLOAT * n.T * n.q * (n.d + 2)
    if run.attention.backend == "mcore_local":
        return 4 * n.w * scores
    if run.attention.backend == "reference":  # in tiles, between float32 dQ, dK, dV
        return 5 * min(FLOAT * scores, REFERENCE_TILE) + 3 * FLOAT * n.T * n.q * n.d
    return 0


def _sums_dq(run: RunConfig, n: RankShapes) -> bool:
    every_layer_windowed = run.model.window is not None and run.model.window_skip_freq is None
    return (
        run.training.device == "cuda"
        and n.d == n.dv
        and n.d in SUMMED_HEAD_DIMS
        and run.parallel.context_parallel_size == 1
        and run.model.attention_dropout == 0
        and not every_layer_windowed
    )

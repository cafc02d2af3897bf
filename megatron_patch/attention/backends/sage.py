"""``sage_int8``: INT8 attention that trains (SageBwd); its oracle where there is no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.attention.backends.row import FLOAT, Backend, Shapes, flash_bytes

if TYPE_CHECKING:
    from megatron_patch.attention.backends.call import AttentionCall, Result


def run(call: AttentionCall) -> Result:
    """Attention by `stable_attention.int8`.

    Raises ValueError: dropout, sinks, a softcap, maximum logits, or a head dim that kernels lack.
    """
    from stable_attention import ops
    from stable_attention.int8.settings import Settings
    from stable_attention.reference.int8 import int8_reference

    if call.sinks is not None:
        raise ValueError("sinks are given to 'sage_int8', which has none; use 'stable_flash'")
    settings, options = Settings(**call.own), call.options
    if call.q.is_cuda or ops.interpreting():
        from stable_attention.int8.launch import attend

        return attend(call.q, call.k, call.v, options, settings, **call.packed), None
    if options.dropout_p or options.softcap:
        raise ValueError("'sage_int8' has neither dropout nor softcap; use 'reference'")
    packed = {name: x for name, x in call.packed.items() if not name.startswith("max_")}
    out = int8_reference(
        call.q, call.k, call.v, settings,
        layout=options.layout, window=(options.window_left, options.window_right),
        scale=options.scale, **packed,
    )  # fmt: skip
    return out, None


def _saved_bytes(n: Shapes, keys: int, stabilizer: str, o_lo: str) -> int:
    """O and LSE, and of q and k the codes and a scale a row; `keeps_qk` says that they are not."""
    return flash_bytes(n, keys, stabilizer, o_lo) + n.T * (n.q + n.g) * (n.d + FLOAT)


def _work_bytes(n: Shapes, keys: int) -> int:
    """Codes and scales of dO, and delta."""
    return n.T * n.q * (n.dv + 2 * FLOAT)


BACKEND = Backend(
    name="sage_int8",
    kernel="stable_attention.int8 (Triton; PyTorch on a CPU)",
    reason="INT8 products; numerics of its own (attention.int8), coarser than BF16",
    devices=("cuda", "cpu"),
    head_dims=(64, 128, 64),
    v_head_dim=False,
    sinks=False,
    dropout=False,
    max_logits=False,
    min_sm=(8, 0),
    package="stable_attention.api",
    notes=(
        "needs QK-norm (model.qk_layernorm: true): without, SageBwd diverged at 2.1M tokens a step",
        "on a CPU it emulates every rounding with whole score matrices: slow",
    ),
    run=run,
    own_options=("smooth_k", "smooth_q", "scales", "normalizer", "projection"),
    wants_qk_norm=True,
    switchable=True,
    keeps_qk=False,
    saved_bytes=_saved_bytes,
    score_bytes=_work_bytes,
)

"""``mcore_local``: Megatron-Core's unfused core attention."""

from __future__ import annotations

from megatron_patch.attention.backends.row import Backend, Shapes, flash_bytes


def _saved_bytes(n: Shapes, keys: int, stabilizer: str, o_lo: str) -> int:
    """O, and three score matrices."""
    return flash_bytes(n, keys, stabilizer, o_lo) + n.T * n.q * keys * (3 * n.w)


BACKEND = Backend(
    name="mcore_local",
    kernel="Megatron-Core DotProductAttention (unfused)",
    reason="the stock baseline, any device; materializes the score matrix",
    devices=("cuda", "cpu"),
    dtypes=("bf16", "fp16", "fp32"),
    head_dims=(1, 1 << 16, 1),
    v_head_dim=False,
    open_window=False,
    thd=False,
    max_logits=False,
    module=("megatron.core.transformer.dot_product_attention", "DotProductAttention"),
    exact_delta=True,
    saved_bytes=_saved_bytes,
    score_bytes=lambda n, keys: 4 * n.w * n.T * n.q * keys,
)

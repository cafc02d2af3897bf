"""``sdpa_cudnn`` and ``sdpa_flash``: PyTorch's scaled_dot_product_attention, pinned to one kernel.

Shape legend: s length, b batch, h query heads, kv_heads key/value heads, d head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.attention.backends.row import Backend

if TYPE_CHECKING:
    import torch

    from megatron_patch.attention.backends.call import AttentionCall, Result


def run_cudnn(call: AttentionCall) -> Result:
    """Attention by cuDNN's fused kernel."""
    return _run(call, "CUDNN_ATTENTION"), None


def run_flash(call: AttentionCall) -> Result:
    """Attention by the FlashAttention-2 kernel that PyTorch ships."""
    return _run(call, "FLASH_ATTENTION"), None


def _run(call: AttentionCall, kernel: str) -> torch.Tensor:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options = call.options
    # is_causal is aligned top-left, which is the same as Megatron's only for equal lengths.
    if options.causal and call.q.shape[0] != call.k.shape[0]:
        raise ValueError(
            f"causal attention with {call.q.shape[0]} queries and {call.k.shape[0]} keys: the "
            "sdpa_* backends need equal lengths; use 'reference' or 'stable_flash'"
        )
    if options.deterministic and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "a repeatable backward of FlashAttention-2 needs "
            "torch.use_deterministic_algorithms(True); call it before training"
        )
    # [s, b, heads, d] -> [b, heads, s, d] as a view: both kernels take strides.
    q, k, v = (x.permute(1, 2, 0, 3) for x in (call.q, call.k, call.v))
    # One backend in the list: where it cannot run, PyTorch raises instead of taking another.
    with sdpa_kernel([getattr(SDPBackend, kernel)]):
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=options.dropout_p,
            is_causal=options.causal,
            scale=options.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return out.permute(2, 0, 1, 3)  # [s, b, h, d]


CUDNN = Backend(
    name="sdpa_cudnn",
    kernel="scaled_dot_product_attention, cuDNN",
    reason="the fastest vendor kernel",
    head_dims=(8, 128, 8),
    v_head_dim=False,
    window=False,
    sinks=False,
    thd=False,
    deterministic=False,
    max_logits=False,
    min_sm=(8, 0),
    notes=("its backward accumulates in an order that changes from run to run",),
    run=run_cudnn,
    switchable=True,
)
FLASH = Backend(
    name="sdpa_flash",
    kernel="scaled_dot_product_attention, FlashAttention-2",
    reason="the vendor kernel with a repeatable backward",
    v_head_dim=False,
    window=False,
    sinks=False,
    thd=False,
    max_logits=False,
    min_sm=(8, 0),
    notes=("deterministic under torch.use_deterministic_algorithms, set by training",),
    run=run_flash,
    switchable=True,
)

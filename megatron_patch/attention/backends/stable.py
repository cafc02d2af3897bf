"""``stable_flash``: the project's own kernels."""

from __future__ import annotations

from megatron_patch.attention.backends.call import Call, Result
from megatron_patch.attention.backends.reference import draw_seed
from stable_attention.api import stable_attention


def run(call: Call) -> Result:
    """Attention by `stable_attention`; ``call.options`` are its stabilizer settings."""
    watched = call.held is not None
    out = stable_attention(
        call.q,
        call.k,
        call.v,
        layout=call.layout,
        causal=call.causal,
        window=call.window,
        scale=call.scale,
        # Parameters are BF16; the softmax they join is float32.
        sinks=None if call.sinks is None else call.sinks.float(),
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        cu_seqlens_q_padded=call.cu_seqlens_q_padded,
        cu_seqlens_k_padded=call.cu_seqlens_k_padded,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        dropout_p=call.dropout_p,
        dropout_seed=draw_seed(call.q.device) if call.dropout_p > 0 else None,
        deterministic=call.deterministic,
        return_max_logits=call.want_max_logits or watched,
        return_residual=watched,
        **call.options,
    )
    if not isinstance(out, tuple):
        return out, None
    if call.held is not None:
        call.held["max_logits"] = out[1]
        if out[2].numel():
            call.held["low"] = out[2]
    return out[0], out[1]

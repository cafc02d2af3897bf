"""A call whose sequence is split over context-parallel ranks, for the backends that can do it."""

from __future__ import annotations

from megatron_patch.attention.backends.call import Call, Result
from megatron_patch.attention.backends.reference import draw_seed
from megatron_patch.context_parallel.api import context_parallel_attention


def run(call: Call, backend: str) -> Result:
    """Attention by `context_parallel_attention`; ``call.cp`` says over which ranks and how.

    The dropout seed comes from the model-parallel stream, which is the same on the ranks of a
    context-parallel group.
    """
    assert call.cp is not None
    watched = call.want_max_logits or call.held is not None
    out = context_parallel_attention(
        call.q,
        call.k,
        call.v,
        group=call.cp.group,
        mode=call.cp.mode,
        hierarchical=call.cp.hierarchical,
        layout=call.layout,
        backend=backend,
        causal=call.causal,
        window=call.window,
        scale=call.scale,
        sinks=call.sinks,
        dropout_p=call.dropout_p,
        dropout_seed=draw_seed(call.q.device) if call.dropout_p > 0 else None,
        cu_seqlens=call.cu_seqlens_q,
        cu_seqlens_padded=call.cu_seqlens_q_padded,
        max_seqlen=call.max_seqlen_q,
        deterministic=call.deterministic,
        return_max_logits=watched,
        **call.cp.options,
        **call.options,
    )
    if not isinstance(out, tuple):
        return out, None
    if call.held is not None:
        call.held["max_logits"] = out[1]
    return out[0], out[1]

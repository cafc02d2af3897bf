"""A call whose sequence is split over context-parallel ranks, for the backends that can do it."""

from __future__ import annotations

from megatron_patch.attention.backends.call import AttentionCall, Result
from megatron_patch.attention.backends.reference import draw_seed
from megatron_patch.context_parallel.api import attend


def run(call: AttentionCall, primitives: str) -> Result:
    """Attention over the ranks of ``call.cp`` with the chunk primitives of a module.

    The dropout seed comes from the model-parallel stream, which is the same on the ranks of a
    context-parallel group.
    """
    assert call.cp is not None
    cu, padded, longest = map(
        call.packed.get, ("cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q")
    )
    out = attend(
        call.q, call.k, call.v, call.options, ranks=call.cp, primitives=primitives,
        packed=(cu, padded, longest, None), sinks=call.sinks,
        dropout_seed=draw_seed(call.q.device) if call.options.dropout_p > 0 else None,
        return_max_logits=call.want_max_logits or call.observed is not None,
    )  # fmt: skip
    return call.result(out)

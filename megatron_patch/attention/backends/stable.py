"""``stable_flash``: the project's own kernels."""

from __future__ import annotations

from megatron_patch.attention.backends.call import AttentionCall, Result
from megatron_patch.attention.backends.reference import draw_seed
from stable_attention.api import attend


def run(call: AttentionCall) -> Result:
    """Attention by `stable_attention`."""
    watched = call.observed is not None
    out = attend(
        call.q,
        call.k,
        call.v,
        call.options,
        # Parameters are BF16; the softmax they join is float32.
        sinks=None if call.sinks is None else call.sinks.float(),
        dropout_seed=draw_seed(call.q.device) if call.options.dropout_p > 0 else None,
        return_max_logits=call.want_max_logits or watched,
        return_residual=watched,
        **call.packed,
    )
    if not isinstance(out, tuple):
        return out, None
    if call.observed is not None:
        call.observed["max_logits"] = out[1]
        if out[2].numel():
            call.observed["low"] = out[2]
    return out[0], out[1]

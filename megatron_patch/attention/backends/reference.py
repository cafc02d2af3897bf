"""``reference``: the blockwise float32 PyTorch path. Runs anywhere; exact and slow."""

from __future__ import annotations

import torch

from megatron_patch.attention.backends.call import Call, Result
from stable_attention.reference import reference_attention


def run(call: Call) -> Result:
    """Attention by `stable_attention.reference.reference_attention`, float32 inside.

    Raises:
        ValueError: padded packed sequences with a mask under which the padding would be seen.
    """
    out = reference_attention(
        call.q,
        call.k,
        call.v,
        layout=call.layout,
        causal=call.causal,
        window=call.window,
        scale=call.scale,
        sinks=call.sinks,
        cu_seqlens_q=_starts(call, call.cu_seqlens_q, call.cu_seqlens_q_padded),
        cu_seqlens_k=_starts(call, call.cu_seqlens_k, call.cu_seqlens_k_padded),
        dropout_p=call.dropout_p,
        dropout_seed=draw_seed(call.q.device) if call.dropout_p > 0 else None,
        return_max_logits=call.want_max_logits or call.held is not None,
    )
    if not isinstance(out, tuple):
        return out, None
    if call.held is not None:
        call.held["max_logits"] = out[1]
    return out[0], out[1]


def draw_seed(device: torch.device) -> torch.Tensor:
    """A dropout seed from the current (forked) random stream, left on the device.

    Drawn inside the tracker's fork, recompute draws the same one again.
    """
    return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)


def _starts(
    call: Call, lengths: torch.Tensor | None, padded: torch.Tensor | None
) -> torch.Tensor | None:
    if padded is None:
        return lengths
    # Padding follows the tokens of its sequence, so under a causal mask no token sees it, and
    # treating it as part of the sequence changes nothing that has a loss.
    if not call.causal or call.want_max_logits:
        raise ValueError(
            "packed sequences with padding between them (cu_seqlens_*_padded) need a causal mask "
            "and no maximum logits on 'reference'; pack without padding or use 'stable_flash'"
        )
    return padded

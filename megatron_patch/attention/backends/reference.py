"""``reference``: the blockwise float32 PyTorch path. Runs anywhere; exact and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.attention.backends.row import FLOAT, Backend, Shapes, flash_bytes

if TYPE_CHECKING:
    import torch

    from megatron_patch.attention.backends.call import AttentionCall, Result

TILE = 32 * 2**20
"""Bytes of one tile of scores in `stable_attention.reference` (its TILE_BYTES)."""


def run(call: AttentionCall) -> Result:
    """Attention by `stable_attention.reference.reference_attention`, float32 inside.

    Raises ValueError: padded packed sequences with a mask under which the padding would be seen.
    """
    from stable_attention.reference import reference_attention

    options = call.options
    out = reference_attention(
        call.q,
        call.k,
        call.v,
        layout=options.layout,
        window=(options.window_left, options.window_right),
        scale=options.scale,
        softcap=options.softcap,
        sinks=call.sinks,
        cu_seqlens_q=_starts(call, "cu_seqlens_q"),
        cu_seqlens_k=_starts(call, "cu_seqlens_k"),
        dropout_p=options.dropout_p,
        dropout_seed=draw_seed(call.q.device) if options.dropout_p > 0 else None,
        return_max_logits=call.want_max_logits or call.observed is not None,
    )
    return call.result(out)


def draw_seed(device: torch.device) -> torch.Tensor:
    """A dropout seed from the current (forked) random stream, left on the device.

    Drawn inside the tracker's fork, recompute draws the same one again.
    """
    import torch

    return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)


def _starts(call: AttentionCall, name: str) -> torch.Tensor | None:
    padded = call.packed.get(f"{name}_padded")
    if padded is None:
        return call.packed.get(name)
    # Padding follows the tokens of its sequence, so under a causal mask no token sees it, and
    # treating it as part of the sequence changes nothing that has a loss.
    if not call.options.causal or call.want_max_logits:
        raise ValueError(
            "packed sequences with padding between them (cu_seqlens_*_padded) need a causal mask "
            "and no maximum logits on 'reference'; pack without padding or use 'stable_flash'"
        )
    return padded


def _saved_bytes(n: Shapes, keys: int, stabilizer: str, o_lo: str) -> int:
    """O in float32 as well."""
    return flash_bytes(n, keys, stabilizer, o_lo) + n.T * n.q * n.dv * FLOAT


def _score_bytes(n: Shapes, keys: int) -> int:
    """In tiles, between float32 dQ, dK, dV."""
    return 5 * min(FLOAT * n.T * n.q * keys, TILE) + 3 * FLOAT * n.T * n.q * n.d


BACKEND = Backend(
    name="reference",
    kernel="stable_attention.reference (blockwise float32 PyTorch)",
    reason="exact float32 arithmetic anywhere; slow",
    devices=("cuda", "cpu"),
    dtypes=("bf16", "fp16", "fp32"),
    head_dims=(1, 1 << 16, 1),
    softcap=True,
    cp=True,
    run=run,
    chunk_primitives="stable_attention.reference.chunks",
    exact_delta=True,
    saved_bytes=_saved_bytes,
    score_bytes=_score_bytes,
)

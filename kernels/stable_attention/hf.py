"""Hugging Face transformers: ``stable_attention.hf.register()``, then
``from_pretrained(..., attn_implementation="stable_attention")``.

Shape legend: query [b, h, sq, d], key and value [b, kv_heads, sk, d]; output [b, sq, h, d].
"""

from __future__ import annotations

import weakref

import torch

from stable_attention.api import stable_attention
from stable_attention.problem import AttentionArgumentError

NAME = "stable_attention"


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` available; needs transformers >= 4.53."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(name, attention_forward)
    # Keeps a mask only where there is padding; causal masks and windows are the kernel's.
    AttentionMaskInterface.register(name, flash_attention_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function.

    Packed sequences come as ``cu_seq_lens_*`` or, with batch 1, as ``position_ids`` that start
    anew; finding those reads the device once a model forward.

    Raises:
        AttentionArgumentError: a padding or arbitrary mask (pack the sequences instead), a paged
            cache, ``output_attentions``.
    """
    for name in ("cache", "output_attentions"):
        if kwargs.get(name):
            raise AttentionArgumentError(
                name, "set", "None or False", "Use attn_implementation='eager' or 'sdpa' for it."
            )
    if attention_mask is not None:
        raise AttentionArgumentError(
            "attention_mask",
            f"a tensor of shape {tuple(attention_mask.shape)}",
            "None",
            "Pack sequences without padding (DataCollatorWithFlattening) or pad on the right and "
            "leave the mask out; arbitrary masks are not supported.",
        )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    options: dict = {
        "causal": causal,
        "window": None if sliding_window is None else (sliding_window - 1, 0 if causal else -1),
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "dropout_p": dropout,
    }
    if cu_seq_lens_q is None and query.shape[0] == 1 and query.shape[2] == key.shape[2]:
        cu_seq_lens_q = cu_seq_lens_k = _packed(position_ids)
    if cu_seq_lens_q is None:
        out = stable_attention(query, key, value, layout="bhsd", **options)
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2), None
    # Packed: transformers passes batch 1 and the tokens of all sequences along the length.
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
    out = stable_attention(
        q,
        k,
        v,
        layout="thd",
        cu_seqlens_q=cu_seq_lens_q,
        cu_seqlens_k=cu_seq_lens_k,
        max_seqlen_q=max_length_q,
        max_seqlen_k=max_length_k,
        **options,
    )
    assert isinstance(out, torch.Tensor)
    return out[None], None


_last: tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None] | None = None


def _packed(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """int32 [documents + 1] offsets where positions [1, s] start anew; None for one document.

    Every layer of a forward brings the same tensor, so the last answer is kept.
    """
    global _last
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] < 2:
        return None
    if _last is not None and _last[0]() is position_ids and _last[1] == position_ids._version:
        return _last[2]
    positions = position_ids[0]
    new = torch.ones_like(positions, dtype=torch.bool)
    new[1:] = positions[1:] != positions[:-1] + 1
    starts = new.nonzero()[:, 0].to(torch.int32)
    found = None
    if starts.numel() > 1:
        end = torch.full_like(starts[:1], positions.numel())
        found = torch.cat([starts, end])
    if not torch.is_inference(position_ids):
        _last = (weakref.ref(position_ids), position_ids._version, found)
    return found

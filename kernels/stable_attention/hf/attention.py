"""transformers' attention function.

Shape legend: query [b, h, sq, d], key and value [b, kv_heads, sk, d]; output [b, sq, h, d].
"""

from __future__ import annotations

import threading
import weakref

import torch

from stable_attention.api import stable_attention
from stable_attention.hf import serving
from stable_attention.hf.mask import Mask, document_offsets
from stable_attention.problem import AttentionArgumentError


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None = None,
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
    """(output, None). What `attention_mask` says of causality, windows and documents counts.

    Without a mask ``is_causal`` (the module's, if it is None), ``sliding_window`` and
    ``position_ids`` count; positions that start anew are documents, and finding those reads the
    device once a model forward. A window that is not causal reaches as far forwards as backwards.
    ``cu_seq_lens_*`` are documents of a batch of 1.

    Raises:
        AttentionArgumentError: a padding mask, a mask that is a tensor, documents that a model
            was given and did not pass on, a paged cache, ``output_attentions``, arguments that
            only some models' attention takes.
    """
    serving.called()
    _check_arguments(kwargs)
    if cu_seq_lens_q is None and cu_seq_lens_k is not None:
        raise AttentionArgumentError(
            "cu_seq_lens_q", "None beside cu_seq_lens_k", "offsets of both", "Pass both, or none."
        )
    if cu_seq_lens_q is not None and query.shape[0] != 1:
        raise AttentionArgumentError(
            "cu_seq_lens_q",
            f"given for a batch of {query.shape[0]}",
            "a batch of 1",
            "Put packed sequences behind each other in one row (DataCollatorWithFlattening).",
        )
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        reach = None if sliding_window is None else sliding_window - 1
        mask = Mask(
            causal=causal, window=None if reach is None else (reach, 0 if causal else reach)
        )
        if cu_seq_lens_q is None and query.shape[2] == key.shape[2]:
            mask.offsets = _documents(position_ids, (query.shape[0], query.shape[2]), causal)
    else:
        mask = _checked_mask(attention_mask)
        if cu_seq_lens_q is None and mask.offsets is None and mask.causal:
            _refuse_lost(cu_seq_lens_q=serving.given("cu_seq_lens_q"))
    if cu_seq_lens_q is None:
        cu_seq_lens_q = cu_seq_lens_k = mask.offsets
        max_length_q = max_length_k = None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict = {
        "causal": mask.causal,
        "window": mask.window,
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "dropout_p": dropout,
    }
    if cu_seq_lens_q is None:
        out = stable_attention(q, k, v, layout="bshd", **options)
        assert isinstance(out, torch.Tensor)
        return out, None
    out = stable_attention(
        *(x.flatten(0, 1) for x in (q, k, v)),
        layout="thd",
        cu_seqlens_q=cu_seq_lens_q.to(query.device),
        cu_seqlens_k=None if cu_seq_lens_k is None else cu_seq_lens_k.to(query.device),
        max_seqlen_q=max_length_q,
        max_seqlen_k=max_length_k,
        **options,
    )
    assert isinstance(out, torch.Tensor)
    return out.view(*q.shape[:-1], v.shape[-1]), None


def _check_arguments(kwargs: dict) -> None:
    for name in ("cache", "output_attentions", *_OF_OTHER_ATTENTIONS):
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise AttentionArgumentError(
                name, "set", "None or False", "Use attn_implementation='eager' or 'sdpa' for it."
            )


# Biases, the keys a sparse attention chose, sinks of every token: no kernel here knows them. The
# sinks of gpt-oss and its kin, a logit a head, come as ``s_aux``.
_OF_OTHER_ATTENTIONS = ("position_bias", "head_mask", "indices", "block_indices", "sinks")


def _checked_mask(mask: Mask | torch.Tensor) -> Mask:
    shape = mask.padded if isinstance(mask, Mask) else tuple(mask.shape)
    if not isinstance(mask, Mask) or shape is not None:
        raise AttentionArgumentError(
            "attention_mask",
            f"a tensor of shape {shape}",
            "None, or ones",
            "Pack sequences without padding (DataCollatorWithFlattening) or pad on the right and "
            "leave the mask out; arbitrary masks are not supported.",
        )
    return mask


def _documents(
    position_ids: torch.Tensor | None, size: tuple[int, int], causal: bool
) -> torch.Tensor | None:
    """`document_offsets` of the positions that came without a mask, for rows and tokens ``size``.

    Documents that the model was given, or that our mask saw, must have come along.
    """
    if position_ids is not None:
        return _packed(position_ids, size)
    if causal:
        _refuse_lost(cu_seq_lens_q=serving.given("cu_seq_lens_q"), position_ids=serving.packed())
        positions = serving.given("position_ids")
        if positions is not None:
            _refuse_lost(position_ids=_packed(positions, size))
    return None


def _refuse_lost(**documents: object) -> None:
    """Raise where the model was given documents that attention was not."""
    for name, value in documents.items():
        if value is not None and value is not False:
            raise AttentionArgumentError(
                name,
                "of several documents, and the model passes neither it nor a mask of them on to "
                "attention",
                "one document a row",
                "Use attn_implementation='eager' for it, if that knows the documents.",
            )


class _Last(threading.local):
    """Positions, what they were for, and their documents, of each thread's models."""

    known: tuple[weakref.ref[torch.Tensor], tuple[int, ...], torch.Tensor | None] | None = None


_last = _Last()


def _packed(position_ids: torch.Tensor, size: tuple[int, int]) -> torch.Tensor | None:
    """`document_offsets` of positions [b or 1, s] for rows and tokens ``size``.

    Every layer of a forward brings the same tensor, so the last answer is kept.
    """
    rows, tokens = size
    if position_ids.dim() != 2 or tokens < 2 or position_ids.shape[1] != tokens:
        return None
    begins = (position_ids.diff(dim=-1) != 1).expand(rows, -1)
    if torch.compiler.is_compiling() or torch.is_inference(position_ids):
        return document_offsets(begins)
    key = (*size, position_ids._version)
    known = _last.known
    if known is None or known[0]() is not position_ids or known[1] != key:
        known = _last.known = weakref.ref(position_ids), key, document_offsets(begins)
    return known[2]

"""Hugging Face transformers: ``stable_attention.hf.register()``, then
``from_pretrained(..., attn_implementation="stable_attention")``.

Shape legend: query [b, h, sq, d], key and value [b, kv_heads, sk, d]; output [b, sq, h, d].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FunctionType

import torch

from stable_attention.api import stable_attention
from stable_attention.problem import AttentionArgumentError

NAME = "stable_attention"


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` available; needs transformers >= 4.53."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, padding_mask)


def padding_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., object] | None = None,
    config: object = None,
    **kwargs,
) -> torch.Tensor | None:
    """transformers' mask function: a mask where there is padding, None where the kernels mask.

    They know causal masks, windows and, in batches of 1, packed documents. transformers states
    every other mask as a function, which its own mask for FlashAttention drops without a word.

    Raises:
        AttentionArgumentError: chunked attention longer than a chunk, functions joined to a mask
            (prefix LM, blocks of image tokens), packed documents in a batch of several rows, a
            static cache that is longer than its tokens. A compiled model hides packed documents
            of several rows: check one batch uncompiled.
    """
    from transformers.masking_utils import flash_attention_mask

    end = kv_length + kv_offset
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and end > chunk and _chunked(mask_function, config, kwargs):
        _refuse_mask(f"in chunks of {chunk} for {end} keys", f"at most {chunk} keys")
    bidirectional = "allow_is_bidirectional_skip" in kwargs
    plain = kwargs.get(f"allow_is_{'bidirectional' if bidirectional else 'causal'}_skip", True)
    if not plain:
        _check_function(mask_function, batch_size, kwargs)
    asked, offset = kwargs.get("q_length"), kwargs.get("q_offset")
    if isinstance(asked, int) and isinstance(offset, int) and not bidirectional:
        tokens = offset + asked
        if end > tokens:
            _refuse_mask(
                f"of {end} keys for {tokens} tokens", "a key a token", "Use a dynamic cache."
            )
    return flash_attention_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        config=config,
        **kwargs,
    )


def _refuse_mask(
    value: str, allowed: str, remedy: str = "Use attn_implementation='sdpa' or 'eager' for it."
) -> None:
    raise AttentionArgumentError("the mask", value, allowed, remedy)


def _chunked(mask_function: object, config: object, kwargs: dict) -> bool:
    """Whether a mask of a model that has chunked layers is one of theirs."""
    if kwargs.get("local_size") != getattr(config, "attention_chunk_size", None):
        return False
    if getattr(config, "sliding_window", None) != kwargs["local_size"]:
        return True
    return "chunked_overlay" in _parts(mask_function)


def _check_function(mask_function: object, batch_size: int, kwargs: dict) -> None:
    """Raise unless a mask that transformers would write out is one the kernels draw all the same.

    transformers writes it out for packed positions; for a compiled model, which may be packed for
    all that can be known while tracing; for a decoding step of one; and for every function that a
    model or a caller (``use_vmap``) joins.
    """
    parts = _parts(mask_function)
    if kwargs.get("use_vmap") or not parts <= _KNOWN_PARTS:
        names = ", ".join(sorted(parts - _KNOWN_PARTS)) or "a caller"
        _refuse_mask(f"a function of {names}", "causal, windows, full, packed documents")
    packed = "packed_sequence_mask_function" in parts
    if packed and batch_size > 1:
        _refuse_mask(f"of packed documents in {batch_size} rows", "a batch of 1", _ONE_ROW)
    if not packed and kwargs.get("q_length") != 1 and not torch.compiler.is_compiling():
        _refuse_mask("wanted as a tensor", "causal, windows, full, packed documents")


_KNOWN_PARTS = {
    "and_masks",
    "causal_mask_function",
    "sliding_window_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
}


def _parts(mask_function: object) -> set[str]:
    """Names of the functions of transformers.masking_utils that made a mask function.

    The outermost alone in a compiled model: Dynamo does not look into closures.
    """
    if isinstance(mask_function, tuple):
        return set().union(*map(_parts, mask_function))
    if not isinstance(mask_function, FunctionType):
        return set()
    outermost = {mask_function.__qualname__.split(".")[0]}
    if torch.compiler.is_compiling():
        return outermost
    inside = (cell.cell_contents for cell in mask_function.__closure__ or ())
    return outermost.union(*map(_parts, inside))


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
    anew; finding those reads the device once a model forward. A sliding window of a model that is
    not causal reaches as far forwards as backwards.

    Raises:
        AttentionArgumentError: a padding or arbitrary mask (pack the sequences instead), packed
            sequences in a batch of several rows (not seen inside a compiled model), a paged
            cache, ``output_attentions``, arguments that only some models' attention takes.
    """
    _check_arguments(attention_mask, kwargs)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    reach = None if sliding_window is None else sliding_window - 1
    options: dict = {
        "causal": causal,
        "window": None if reach is None else (reach, 0 if causal else reach),
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "dropout_p": dropout,
    }
    batch = query.shape[0]
    if cu_seq_lens_q is not None and batch != 1:
        raise AttentionArgumentError(
            "cu_seq_lens_q", f"given for a batch of {batch}", "a batch of 1", _ONE_ROW
        )
    # A compiled model of several rows could not read its positions without a graph break.
    looked_at = batch == 1 or not torch.compiler.is_compiling()
    if cu_seq_lens_q is None and query.shape[2] == key.shape[2] and looked_at:
        cu_seq_lens_q = cu_seq_lens_k = _packed(position_ids, batch)
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


def _check_arguments(attention_mask: torch.Tensor | None, kwargs: dict) -> None:
    for name in ("cache", "output_attentions", *_OF_OTHER_ATTENTIONS):
        given = kwargs.get(name)
        if given is not None and given is not False:
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


# Biases, the keys a sparse attention chose, sinks of every token: no kernel here knows them. The
# sinks of gpt-oss and its kin, a logit a head, come as ``s_aux``.
_OF_OTHER_ATTENTIONS = ("position_bias", "indices", "block_indices", "sinks")
_ONE_ROW = "Put packed sequences behind each other in one row (DataCollatorWithFlattening)."

_last: tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None] | None = None


def _packed(position_ids: torch.Tensor | None, batch: int = 1) -> torch.Tensor | None:
    """int32 [documents + 1] offsets where positions [1, s] start anew; None for one document.

    Every layer of a forward brings the same tensor, so the last answer is kept. Rows of a larger
    batch must be one document each.
    """
    global _last
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] < 2:
        return None
    if _last is not None and _last[0]() is position_ids and _last[1] == position_ids._version:
        return _last[2]
    if batch > 1 and bool((position_ids.diff(dim=-1) != 1).any()):
        raise AttentionArgumentError(
            "position_ids",
            f"starting anew inside rows of a batch of {batch}",
            "consecutive in every row; packed sequences in a batch of 1",
            _ONE_ROW,
        )
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

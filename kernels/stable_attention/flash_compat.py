"""FlashAttention-2's functions, with its signatures, on these kernels.

Shape legend: b batch, s length, h query heads, kv_heads key/value heads, d head dim, t packed
tokens; q [b, s, h, d], qkv [b, s, 3, h, d], kv [b, s, 2, kv_heads, d]; packed: [t, ...].

The same as there: bottom-right causal alignment, inclusive ``window_size``, any head dim up to 256
(padded here), GQA, softcap, rows without keys give 0, ``return_attn_probs`` gives
(out, lse, S_dmask), S_dmask only with dropout. Different: LSE of a row without keys is -inf;
dropout draws another (position-keyed) stream; gradients are bitwise reproducible with
``deterministic`` or without. Missing, and raising: ``alibi_slopes``, ``block_table`` and the
KV-cache function.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F

from stable_attention import ops
from stable_attention.api import attend
from stable_attention.describe import check_rank, describe
from stable_attention.extras import dropout_seed_tensor
from stable_attention.layouts import MAX_HEAD_DIM
from stable_attention.problem import (
    AttentionArgumentError,
    Options,
    check_unserved,
    integer,
    require,
    show,
)
from stable_attention.triton.probabilities import scores_and_mask

Outputs = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _get_block_size_n(
    device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """Keys per block of the running maximum in S_dmask: FlashAttention-2's published sizes."""
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    if 96 < head_dim <= 128:
        minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
        if minor[0] == 8 and minor[1] > 0:
            return 64 if is_causal and not is_dropout else 32
        return 32 if is_dropout else 64
    return 64


def _pad(x: torch.Tensor) -> torch.Tensor:
    """Head dim up to the next multiple of 8; zeros change neither scores nor other columns."""
    missing = -x.shape[-1] % 8
    x = F.pad(x, (0, missing)) if missing else x
    # After padding: a head dim of 1 has any stride, which .contiguous() leaves and padding keeps.
    return x if x.stride(-1) == 1 else x.contiguous()


def _head_dims(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> tuple[int, int]:
    """(d, dv), checked before padding hides them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, layout)
        size = x.shape[-1]
        require(
            1 <= size <= MAX_HEAD_DIM,
            f"head dim of {name}",
            size,
            f"1..{MAX_HEAD_DIM}",
            "Split heads.",
        )
    d = q.shape[-1]
    require(k.shape[-1] == d, "head dim of k", k.shape[-1], f"q's {d}", "Only v may differ.")
    return d, v.shape[-1]


def _window(window_size: object) -> tuple[int, int]:
    """FlashAttention's window, in which every negative bound is unlimited; any two integers."""
    allowed, remedy = "a pair (left, right) of integers, -1 for unlimited", "(-1, -1) is no window."
    pair: tuple[object, ...] = ()
    with suppress(TypeError):
        pair = tuple(window_size)  # type: ignore[arg-type]  # FlashAttention's tests give a tensor
    if isinstance(window_size, str) or len(pair) != 2:
        raise AttentionArgumentError("window_size", show(window_size), allowed, remedy)
    left, right = (integer("window_size", w, allowed, remedy) for w in pair)
    return max(left, -1), max(right, -1)


def _unpack(name: str, x: torch.Tensor, axis: int, count: int) -> tuple[torch.Tensor, ...]:
    """The ``count`` tensors that lie along an axis of a packed one."""
    rank = axis + 3
    ok = isinstance(x, torch.Tensor) and x.dim() == rank and x.shape[axis] == count
    allowed = f"a tensor of {rank} dimensions, {count} along dimension {axis}"
    require(ok, name, lambda: show(x), allowed, "Stack them there, or pass them one by one.")
    return x.unbind(axis)


def _signed_probabilities(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, **given: Any
) -> torch.Tensor:
    """S_dmask [b, h, sq, sk] in q's dtype, lengths rounded up to 128.

    exp(score - m), negative where dropped, with m the running maximum of a kernel that visits key
    blocks from last to first, which is what FlashAttention's tests undo.
    """
    problem, extras = describe(q, k, v, options, **given)
    scores, keep = scores_and_mask(problem, q, k, extras)
    block = _get_block_size_n(q.device, problem.d, True, problem.window_right == 0)
    columns = -problem.sk % 128
    rows = -problem.sq % 128
    scores = F.pad(scores, (0, columns, 0, rows), value=-torch.inf)
    keep = F.pad(keep, (0, columns, 0, rows), value=1)
    blocks = scores.unflatten(-1, (-1, block))
    top = blocks.amax(-1).flip(-1).cummax(-1).values.flip(-1)
    top = torch.where(top == -torch.inf, 0.0, top)
    p = torch.exp(blocks - top[..., None]).flatten(-2)
    return torch.where(keep.bool(), p, -p).to(q.dtype)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
    **packed: Any,
) -> Outputs:
    layout = "thd" if packed else "bshd"
    q, k, v = ops.under_autocast(q, k, v)
    d, dv = _head_dims(q, k, v, layout)
    q, k, v = _pad(q), _pad(k), _pad(v)
    options = Options.of(
        layout=layout,
        causal=causal,
        window=_window(window_size),
        scale=d**-0.5 if softmax_scale is None else softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    seed = dropout_seed_tensor(None, q) if options.dropout_p > 0 else None
    given = packed | {"dropout_seed": seed}
    result = attend(q, k, v, options, return_lse=return_attn_probs, **given)
    if isinstance(result, torch.Tensor):
        return result[..., :dv]
    out, lse = result[0][..., :dv], result[1]
    if seed is None:
        return out, lse, None
    with torch.no_grad():
        return out, lse, _signed_probabilities(q, k, v, options, **given)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """out [b, sq, h, dv] of q [b, sq, h, d], k and v [b, sk, kv_heads, d]; see the module."""
    check_unserved(alibi_slopes=alibi_slopes)
    return _attend(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """`flash_attn_func` with kv [b, sk, 2, kv_heads, d]."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    k, v = _unpack("kv", kv, 2, 2)
    return flash_attn_func(q, k, v, *rest, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """`flash_attn_func` with qkv [b, s, 3, h, d]."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    q, k, v = _unpack("qkv", qkv, 2, 3)
    return flash_attn_func(q, k, v, *rest, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Outputs:
    """out [tq, h, dv] of packed q [tq, h, d], k, v [tk, kv_heads, d]; cu_seqlens int32 [b + 1]."""
    check_unserved(alibi_slopes=alibi_slopes, block_table=block_table)
    return _attend(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """`flash_attn_varlen_func` with kv [tk, 2, kv_heads, d]."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    where = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)
    k, v = _unpack("kv", kv, 1, 2)
    return flash_attn_varlen_func(q, k, v, *where, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """`flash_attn_varlen_func` with qkv [t, 3, h, d]."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    where = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)
    q, k, v = _unpack("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(q, k, v, *where, return_attn_probs)


def flash_attn_with_kvcache(*args: object, **kwargs: object) -> torch.Tensor:
    """Not provided: raises `AttentionArgumentError`."""
    raise AttentionArgumentError(
        "flash_attn_with_kvcache", "called", "the training functions", "Use an inference kernel."
    )

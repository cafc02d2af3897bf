"""The public call: `stable_attention`.

Shape legend: b batch, sq/sk lengths, h query heads, kv_heads key/value heads, d query/key head dim,
dv value head dim, tq/tk packed tokens. Layouts: bshd [b, s, h, d], sbhd [s, b, h, d],
bhsd [b, h, s, d], thd [t, h, d] (packed sequences described by cu_seqlens).
"""

from __future__ import annotations

from typing import Any

import torch

from stable_attention import ops
from stable_attention.describe import describe
from stable_attention.problem import AttentionArgumentError, Options, check_unserved, flag


def stable_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | str | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | int | None = None,
    batch_offset: int = 0,
    head_offset: int = 0,
    softcap: float = 0.0,
    stabilizer: str = "compensated",
    o_lo: str = "bf16",
    beta: float = 2.0,
    eps: float = 1e-3,
    deterministic: bool = False,
    backward: str = "auto",
    allow_broken: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_o_lo: bool = False,
    attn_mask: None = None,
    bias: None = None,
    alibi_slopes: None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Exact scaled-dot-product attention, softmax(scale * q k^T + mask) v, differentiable.

    Args:
        q: queries, bfloat16 or float16, in ``layout``; [b, sq, h, d] for bshd. Under autocast q,
            k and v are cast to its dtype, as torch's scaled_dot_product_attention does.
        k: keys, [b, sk, kv_heads, d]; h must be a multiple of kv_heads (MHA, GQA, MQA).
        v: values, [b, sk, kv_heads, dv]; d and dv in 8..256, multiples of 8, may differ.
            Any strides, as long as the last dimension is contiguous; nothing is copied.
        layout: "bshd", "sbhd", "bhsd" or "thd".
        causal: query i sees keys j <= i + sk - sq (bottom-right alignment).
        window: (left, right), inclusive, around the same diagonal; -1 is unlimited. With ``causal``
            the right bound is 0. A window of w keys ending at the query's own is (w - 1, 0).
        scale: positive multiplier of the logits, default d ** -0.5.
        sinks: None; "off-by-one" (a sink logit of 0 in every head, softmax-one); or a floating
            tensor [h] of learnable sink logits (natural-log units, not scaled; gets a gradient).
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1] token offsets, for thd (required there).
        cu_seqlens_q_padded, cu_seqlens_k_padded: int32 [>= b] where each sequence starts in memory
            when there are gaps between sequences; lengths still come from ``cu_seqlens_*``.
        max_seqlen_q, max_seqlen_k: bounds of the longest sequence for thd. None uses the buffer
            length: right, without a device sync, but launches many empty tiles.
        dropout_p: probability of dropping a weight. The mask is a function of (seed, batch index,
            head, query, key) alone, so that tiling, chunking and recomputation never change it.
        dropout_seed: int, or an int64 scalar tensor on q's device (read on the device). None
            draws one from torch's generator of that device.
        batch_offset, head_offset: global index of batch 0 and head 0 for the dropout mask
            (data- and tensor-parallel ranks).
        softcap: c > 0 replaces each scaled logit s by c * tanh(s / c), to about 1e-7 * c; c is at
            most 1e5, and 0 is none.
        stabilizer: "compensated" (default), "projected", "compensated_projected", "none",
            "dynamic_max" or "paper_bf16"; see docs/numerics.md. "paper_bf16" reproduces a failure
            and needs ``allow_broken=True``.
            Experiments may also name a half of "compensated": "low_order_o" (the low-order part,
            O divided by the float32 sum) or "consistent_sum" (the rounded sum, no low-order part).
        o_lo: storage of O_lo, O's low-order part: "bf16", "int8", or "fp32" (delta from the
            float32 O itself; for experiments).
        beta, eps: parameters of "dynamic_max" (arXiv 2510.04212, Algorithm 1): factor of a
            repeated positive row maximum, and the distance in logits within which maxima repeat.
        deterministic: ask for bitwise reproducible gradients, which all kernels of our own give
            with False too.
        backward: whose backward pass runs: "own", "own_x2" (P and dS in two parts of the
            tensors' type; of stabilizers that project), "sdpa_cudnn" or "sdpa_flash" (torch's),
            "fa4" (FlashAttention-4), or "auto", the one that was measured to be best for the call's
            architecture, else "own". All get the same delta (`vendors`).
        return_lse: also return the float32 log-sum-exp (natural log; includes the sink),
            [b, h, sq], or [h, tq] for thd; differentiable. Rows without keys have -inf. It costs
            "compensated" a sum that training does without, and changes nothing else.
        return_max_logits: also return float32 [h], the largest scaled, softcapped, masked logit of
            each head over batch and positions (-inf if it saw none); not differentiable.
        return_o_lo: also return O_lo (its storage, in O's layout; empty for stabilizers that
            keep none); not differentiable.
        attn_mask, bias, alibi_slopes: not served. They are here so that code written for another
            attention learns what to use instead.

    Returns:
        out in ``layout`` ([b, sq, h, dv] for bshd) and q's dtype, or a tuple
        (out[, lse][, max_logits][, o_lo]) in that order. Rows that see no key are 0, and
        packed rows that belong to no sequence are 0.

    Raises:
        AttentionArgumentError: a `ValueError` with the value, the allowed set and the remedy, for
            every argument of a wrong type, shape or range.
        RuntimeError: in forward-mode AD, in gradients of torch.func and, from the gradients, in
            second derivatives.
    """
    check_unserved(attn_mask=attn_mask, bias=bias, alibi_slopes=alibi_slopes)
    options = Options.of(
        layout=layout,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        batch_offset=batch_offset,
        head_offset=head_offset,
        stabilizer=stabilizer,
        o_lo=o_lo,
        beta=beta,
        eps=eps,
        deterministic=deterministic,
        backward=backward,
        allow_broken=allow_broken,
    )
    return attend(
        q,
        k,
        v,
        options,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        return_o_lo=return_o_lo,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_k_padded=cu_seqlens_k_padded,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_seed=dropout_seed,
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    *,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_o_lo: bool = False,
    **given: Any,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`stable_attention` with parsed options; ``given`` are the other keywords of `describe`."""
    wanted = (
        flag("return_lse", return_lse),
        flag("return_max_logits", return_max_logits),
        flag("return_o_lo", return_o_lo),
    )
    q, k, v = ops.under_autocast(q, k, v)
    problem, extras = describe(q, k, v, options, **given)
    check_device(q)
    found = ops.attention(
        problem, q, k, v, extras,
        with_max_logits=wanted[1], with_lse=wanted[0], with_low=wanted[2],
    )  # fmt: skip
    if not any(wanted):
        return found[0]
    out, lse, low, max_logits, _ = found
    return (out, *(x for asked, x in zip(wanted, (lse, max_logits, low), strict=True) if asked))


def check_device(q: torch.Tensor) -> None:
    """`AttentionArgumentError` unless the kernels run where q is."""
    kind = q.device.type
    if kind == "cuda" or (kind == "cpu" and ops.interpreting()):
        return
    raise AttentionArgumentError(
        "q.device",
        q.device,
        "cuda (or cpu under Triton's interpreter)",
        "Move the tensors to a GPU; to try the kernels on a CPU set TRITON_INTERPRET=1 before "
        "stable_attention is imported; for exact CPU results use stable_attention.reference.",
    )

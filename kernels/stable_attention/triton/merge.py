"""Merge partial outputs of chunks in float32, and turn the merged output into what is kept.

Shape legend: out [B, S, H, DV] in any layout, float32; lse [B, H, S] (or [H, T] packed), float32.

A partial output is normalised over its own keys and weighs exp(lse_part - lse): the weights of the
parts sum to one, so nothing is rounded to 16 bits before the last part is in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stable_attention.layouts import dims, strides
from stable_attention.numerics import LN2, LOG2E, residual_encode, round_and_widen
from stable_attention.triton.memory import tile_offsets
from stable_attention.triton.options import padded

BLOCK_M = 32


@triton.jit
def log_add_exp(a, b):
    """log(exp a + exp b) and the weights exp(a - result), exp(b - result); -inf weighs nothing."""
    top = tl.maximum(a, b)
    safe = tl.where(top == -float("inf"), 0.0, top)
    wa = tl.exp2((a - safe) * LOG2E)
    wb = tl.exp2((b - safe) * LOG2E)
    total = wa + wb
    inv = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    lse = tl.where(total > 0, safe + tl.log2(tl.where(total > 0, total, 1.0)) * LN2, -float("inf"))
    return lse, wa * inv, wb * inv


@triton.jit(do_not_specialize=("s", "stride_lb", "stride_lh", "stride_pb", "stride_ph"))
def merge_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh,
    stride_xb, stride_xs, stride_xh, stride_pb, stride_ph, s,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0).to(tl.int64) * BM
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    rows = m0 + tl.arange(0, BM)
    row_ok = rows < s
    ok = row_ok[:, None] & (tl.arange(0, BDV) < DV)[None, :]
    p_lse = lse_ptr + b * stride_lb + h * stride_lh + rows
    p_part = part_lse_ptr + b * stride_pb + h * stride_ph + rows
    none = -float("inf")
    lse, w_old, w_new = log_add_exp(
        tl.load(p_lse, mask=row_ok, other=none), tl.load(p_part, mask=row_ok, other=none)
    )
    p_out = out_ptr + b * stride_ob + h * stride_oh + m0 * stride_os
    p_out += tile_offsets(stride_os, BM, BDV)
    p_new = part_ptr + b * stride_xb + h * stride_xh + m0 * stride_xs
    p_new += tile_offsets(stride_xs, BM, BDV)
    old = tl.load(p_out, mask=ok, other=0.0)
    new = tl.load(p_new, mask=ok, other=0.0)
    tl.store(p_out, old * w_old[:, None] + new * w_new[:, None], mask=ok)
    tl.store(p_lse, lse, mask=row_ok)


@triton.jit(do_not_specialize=("s", "stride_lb", "stride_lh"))
def finish_kernel(
    acc_ptr, lse_ptr, sink_ptr, out_ptr, low_ptr,
    stride_ab, stride_as, stride_ah, stride_lb, stride_lh, stride_ob, stride_os, stride_oh, s,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_LOW: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0).to(tl.int64) * BM
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    rows = m0 + tl.arange(0, BM)
    row_ok = rows < s
    ok = row_ok[:, None] & (tl.arange(0, BDV) < DV)[None, :]
    p_acc = acc_ptr + b * stride_ab + h * stride_ah + m0 * stride_as
    o = tl.load(p_acc + tile_offsets(stride_as, BM, BDV), mask=ok, other=0.0)
    if HAS_SINK:
        p_lse = lse_ptr + b * stride_lb + h * stride_lh + rows
        sink = tl.zeros([BM], tl.float32) + tl.load(sink_ptr + h)
        lse, keep, _ = log_add_exp(tl.load(p_lse, mask=row_ok, other=-float("inf")), sink)
        o = o * keep[:, None]
        tl.store(p_lse, lse, mask=row_ok)
    if HAS_LOW:
        hi, wide = round_and_widen(o, out_ptr.dtype.element_ty)
    else:
        hi = o.to(out_ptr.dtype.element_ty)
    place = b * stride_ob + h * stride_oh + m0 * stride_os
    off = tile_offsets(stride_os, BM, BDV)
    tl.store(out_ptr + place + off, hi, mask=ok)
    if HAS_LOW:
        low = residual_encode(o, hi, wide, low_ptr.dtype.element_ty)
        tl.store(low_ptr + place + off, low, mask=ok)


def _row_strides(lse: torch.Tensor) -> tuple[int, int]:
    return (0, lse.stride(0)) if lse.dim() == 2 else (lse.stride(0), lse.stride(1))


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    *,
    layout: str,
) -> None:
    """Fold (part, part_lse) into (out, lse) in place; all float32, same shapes, views allowed."""
    batch, s, heads, dv = dims(out, layout)
    if out.numel() == 0:
        return
    merge_kernel[(triton.cdiv(s, BLOCK_M), heads, batch)](
        out, lse, part, part_lse,
        *strides(out, layout), *_row_strides(lse), *strides(part, layout), *_row_strides(part_lse),
        s, DV=dv, BDV=padded(dv), BM=BLOCK_M,
    )  # fmt: skip


def finish(
    acc: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    layout: str,
    dtype: torch.dtype,
    low_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O in ``dtype``, its low-order part or an empty tensor); ``lse`` gains the sinks in place."""
    batch, s, heads, dv = dims(acc, layout)
    out = torch.empty(acc.shape, dtype=dtype, device=acc.device)
    low_shape = acc.shape if low_dtype is not None else (0,)
    low = torch.empty(low_shape, dtype=low_dtype or torch.bfloat16, device=acc.device)
    if acc.numel():
        finish_kernel[(triton.cdiv(s, BLOCK_M), heads, batch)](
            acc, lse, sinks, out, low if low.numel() else None,
            *strides(acc, layout), *_row_strides(lse), *strides(out, layout), s,
            DV=dv, BDV=padded(dv), BM=BLOCK_M, HAS_SINK=sinks is not None,
            HAS_LOW=low_dtype is not None,
        )  # fmt: skip
    return out, low

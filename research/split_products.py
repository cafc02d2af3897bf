"""Attention in float32 on tensor cores: the yardstick that a training run can afford.

What makes 16-bit attention inexact is that P and dS are rounded to 16 bits before they multiply V,
dO, Q and K, and that O is before it is read back for delta. Here P and dS stay float32: they are
cut into three BF16 parts, 8 bits each, and every part multiplies the other factor, which *is* BF16
as it comes from the model, exactly. delta comes from the float32 O. Products of two given tensors
(Q K^T, dO V^T) are exact as they are. So a forward pass has 4 products for 2, a backward pass 13
for 7 (two kernels, both of which compute S and dP).

Tensor cores truncate where they add to a large accumulator, a one-sided error (docs/numerics.md);
every tile's products are therefore summed by themselves and added with rounding to nearest.

Self-attention of BF16 tensors, as many key/value heads as query heads, full or causal.

Shape legend: b sequences, s tokens, h heads, d head dim; BM query rows, BN key rows of a tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from stable_attention.reference.geometry import from_bhsd, to_bhsd

HEAD_DIMS = (16, 32, 64, 128)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_product(acc, a, b):
    """acc + a @ b, [.., ..] float32: a float32 in three BF16 parts, the smallest first; b BF16."""
    high = a.to(tl.bfloat16)
    rest = a - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    tile = tl.dot(low, b)
    tile = tl.dot(middle, b, tile)
    tile = tl.dot(high, b, tile)
    return acc + tile


@triton.jit
def _rows(base, row_stride, first, s, BLOCK: tl.constexpr, D: tl.constexpr):
    """Rows first .. first + BLOCK of a [s, D] matrix, zeros past its end: [BLOCK, D]."""
    i = first + tl.arange(0, BLOCK)
    at = base + i.to(tl.int64)[:, None] * row_stride + tl.arange(0, D)[None, :]
    return tl.load(at, mask=(i < s)[:, None], other=0.0)


@triton.jit
def _store_rows(base, row_stride, first, s, x, BLOCK: tl.constexpr, D: tl.constexpr):
    i = first + tl.arange(0, BLOCK)
    at = base + i.to(tl.int64)[:, None] * row_stride + tl.arange(0, D)[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=(i < s)[:, None])


@triton.jit
def _place(s, BLOCK: tl.constexpr):
    """(first row of this program, sequence * heads + head): the tiles of a head are neighbours."""
    tiles = tl.cdiv(s, BLOCK)
    number = tl.program_id(0)
    return number % tiles * BLOCK, (number // tiles).to(tl.int64)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, exact_ptr, lse_ptr,
    q_row, q_head, q_batch, k_row, k_head, k_batch, v_row, v_head, v_batch,
    o_row, o_head, o_batch, s, heads, unit,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """O in BF16 and in float32 ([b, h, s, d], contiguous), and the LSE in log2 units [b, h, s]."""
    first, which = _place(s, BM)
    b, h = which // heads, which % heads
    keys = k_ptr + b * k_batch + h * k_head
    values = v_ptr + b * v_batch + h * v_head
    q = _rows(q_ptr + b * q_batch + h * q_head, q_row, first, s, BM, D)
    i = first + tl.arange(0, BM)
    acc = tl.zeros([BM, D], tl.float32)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    end = tl.minimum(first + BM, s) if CAUSAL else s
    for start in range(0, end, BN):
        k = _rows(keys, k_row, start, s, BN, D)
        v = _rows(values, v_row, start, s, BN, D)
        j = start + tl.arange(0, BN)
        seen = (j < s)[None, :] & ((j[None, :] <= i[:, None]) if CAUSAL else True)
        x = tl.where(seen, tl.dot(q, k.T), -float("inf"))
        larger = tl.maximum(top, tl.max(x, 1) * unit)  # key 0 is in the first tile of every row
        p = tl.exp2(x * unit - larger[:, None])
        alpha = tl.exp2(top - larger)
        total = total * alpha + tl.sum(p, 1)
        acc = _add_product(acc * alpha[:, None], p, v)
        top = larger
    acc = acc / total[:, None]
    _store_rows(o_ptr + b * o_batch + h * o_head, o_row, first, s, acc, BM, D)
    _store_rows(exact_ptr + which * s * D, D, first, s, acc, BM, D)
    tl.store(lse_ptr + which * s + i, top + tl.log2(total), mask=i < s)


@triton.jit
def _key_gradients(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_row, q_head, q_batch, k_row, k_head, k_batch, v_row, v_head, v_batch,
    g_row, g_head, g_batch, dk_row, dk_head, dk_batch, dv_row, dv_head, dv_batch,
    s, heads, unit, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dK and dV of BN keys; everything transposed, [BN, BM], so that P and dS stay in registers."""
    first, which = _place(s, BN)
    b, h = which // heads, which % heads
    queries = q_ptr + b * q_batch + h * q_head
    dout = do_ptr + b * g_batch + h * g_head
    k = _rows(k_ptr + b * k_batch + h * k_head, k_row, first, s, BN, D)
    v = _rows(v_ptr + b * v_batch + h * v_head, v_row, first, s, BN, D)
    j = first + tl.arange(0, BN)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    begin = first // BM * BM if CAUSAL else 0
    for start in range(begin, s, BM):
        q = _rows(queries, q_row, start, s, BM, D)
        do = _rows(dout, g_row, start, s, BM, D)
        i = start + tl.arange(0, BM)
        lse = tl.load(lse_ptr + which * s + i, mask=i < s, other=0.0)
        delta = tl.load(delta_ptr + which * s + i, mask=i < s, other=0.0)
        seen = (i < s)[None, :] & ((j[:, None] <= i[None, :]) if CAUSAL else True)
        p = tl.where(seen, tl.exp2(tl.dot(k, q.T) * unit - lse[None, :]), 0.0)
        dv = _add_product(dv, p, do)
        ds = p * (tl.dot(v, do.T) - delta[None, :])
        dk = _add_product(dk, ds, q)
    _store_rows(dk_ptr + b * dk_batch + h * dk_head, dk_row, first, s, dk * scale, BN, D)
    _store_rows(dv_ptr + b * dv_batch + h * dv_head, dv_row, first, s, dv, BN, D)


@triton.jit
def _query_gradient(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_row, q_head, q_batch, k_row, k_head, k_batch, v_row, v_head, v_batch,
    g_row, g_head, g_batch, dq_row, dq_head, dq_batch, s, heads, unit, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ of BM queries."""
    first, which = _place(s, BM)
    b, h = which // heads, which % heads
    keys = k_ptr + b * k_batch + h * k_head
    values = v_ptr + b * v_batch + h * v_head
    q = _rows(q_ptr + b * q_batch + h * q_head, q_row, first, s, BM, D)
    do = _rows(do_ptr + b * g_batch + h * g_head, g_row, first, s, BM, D)
    i = first + tl.arange(0, BM)
    lse = tl.load(lse_ptr + which * s + i, mask=i < s, other=0.0)
    delta = tl.load(delta_ptr + which * s + i, mask=i < s, other=0.0)
    dq = tl.zeros([BM, D], tl.float32)
    end = tl.minimum(first + BM, s) if CAUSAL else s
    for start in range(0, end, BN):
        k = _rows(keys, k_row, start, s, BN, D)
        v = _rows(values, v_row, start, s, BN, D)
        j = start + tl.arange(0, BN)
        seen = (j < s)[None, :] & ((j[None, :] <= i[:, None]) if CAUSAL else True)
        p = tl.where(seen, tl.exp2(tl.dot(q, k.T) * unit - lse[:, None]), 0.0)
        ds = p * (tl.dot(do, v.T) - delta[:, None])
        dq = _add_product(dq, ds, k)
    _store_rows(dq_ptr + b * dq_batch + h * dq_head, dq_row, first, s, dq * scale, BM, D)


def _tiles(d: int) -> dict[str, tuple[int, int, int]]:
    """(BM, BN, warps) of each kernel: what fits Hopper's registers, or nearly."""
    keys = (64, 128, 8) if d <= 64 else (64, 64, 8)
    return {"forward": (128, 64, 8), "keys": keys, "query": (128, 64, 8)}


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """(row, head, batch) of a bhsd view."""
    return x.stride(2), x.stride(1), x.stride(0)


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(O in BF16 with the strides of q, O in float32, LSE in log2 units) of bhsd views."""
    b, h, s, d = q.shape
    out = torch.empty_like(q)
    exact = q.new_empty(b, h, s, d, dtype=torch.float32)
    lse = q.new_empty(b, h, s, dtype=torch.float32)
    bm, bn, warps = _tiles(d)["forward"]
    if q.numel():
        _forward[(triton.cdiv(s, bm) * b * h,)](
            q, k, v, out, exact, lse,
            *_strides(q), *_strides(k), *_strides(v), *_strides(out), s, h, scale * LOG2E.value,
            D=d, BM=bm, BN=bn, CAUSAL=causal, num_warps=warps, num_stages=2,
        )  # fmt: skip
    return out, exact, lse


def run_backward(
    tensors: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK, dV in ``dtype``; ``tensors`` are q, k, v and what `run_forward` found but for O."""
    q, k, v, exact, lse = tensors
    b, h, s, d = q.shape
    dq, dk, dv = (torch.empty_like(x, dtype=dtype) for x in (q, k, v))
    if q.numel() == 0:
        return dq, dk, dv
    given = (q, k, v, dout, lse, (dout.float() * exact).sum(-1))
    where = [n for x in (q, k, v, dout) for n in _strides(x)]
    known: dict[str, Any] = {"D": d, "CAUSAL": causal, "num_stages": 2}
    sizes = (s, h, scale * LOG2E.value, scale)
    bm, bn, warps = _tiles(d)["keys"]
    _key_gradients[(triton.cdiv(s, bn) * b * h,)](
        *given, dk, dv, *where, *_strides(dk), *_strides(dv), *sizes,
        BM=bm, BN=bn, num_warps=warps, **known,
    )  # fmt: skip
    bm, bn, warps = _tiles(d)["query"]
    _query_gradient[(triton.cdiv(s, bm) * b * h,)](
        *given, dq, *where, *_strides(dq), *sizes, BM=bm, BN=bn, num_warps=warps, **known
    )
    return dq, dk, dv


class _SplitProducts(torch.autograd.Function):
    """Of bhsd views."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        q, k, v = (_with_rows(x) for x in (q, k, v))
        out, *kept = run_forward(q, k, v, scale=scale, causal=causal)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.how = {"scale": scale, "causal": causal}
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*run_backward(ctx.saved_tensors, _with_rows(grads[0]), **ctx.how), None, None)


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied unless its rows are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def split_product_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bshd",
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale Q K^T) V in float32, from and to BF16.

    Args:
        q, k, v: BF16 [b, s, h, d] in ``layout`` (bshd, sbhd or bhsd), one shape for all three; d
            one of `HEAD_DIMS`. On a GPU, or on the CPU under Triton's interpreter.
        causal: token i sees tokens 0 .. i.
        scale: of the scores, default d ** -0.5; above 0.

    Returns:
        O, BF16, in ``layout``; its backward reads it in float32 (4 bytes a value are kept).

    Raises:
        ValueError: anything else.
    """
    if layout not in ("bshd", "sbhd", "bhsd"):
        raise ValueError(f"layout={layout!r}: use bshd, sbhd or bhsd")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {x.dtype}: split products are of torch.bfloat16 tensors")
        if x.shape != q.shape or x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, q {tuple(q.shape)}: give q, k and v of one "
                "4-dimensional shape (self-attention, as many key/value heads as query heads)"
            )
    d = q.shape[-1]
    if d not in HEAD_DIMS:
        raise ValueError(f"head dim {d}: use one of {', '.join(map(str, HEAD_DIMS))}")
    scale = d**-0.5 if scale is None else scale
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale}: must be finite and above 0")
    out = _SplitProducts.apply(*(to_bhsd(x, layout) for x in (q, k, v)), scale, causal)
    return from_bhsd(out, layout)


__all__ = ["HEAD_DIMS", "split_product_attention"]

"""A carrier O: a tensor that gives any backward pass the delta it is wanted to have.

A backward pass reads O for delta = rowsum(dO o O) alone. Where it is handed a carrier in place of
O, it computes another delta: the carrier has up to three non-zero numbers a row, at the largest
|dO| of the row. The first is delta / dO rounded to 16 bits, the next two carry what is left. Every
product is exact in float32, so three BF16 numbers give delta to its last bit (2^-27), two FP16
numbers too.

Shape legend: b batch, s rows, h heads, dv head dim; BM rows of a tile, BDV its padded columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stable_attention.layouts import dims, strides
from stable_attention.numerics import INTERPRETED, widen
from stable_attention.triton.launches import launch
from stable_attention.triton.memory import load_tile, store_tile, tile_offsets
from stable_attention.triton.options import padded

# Rows of a tile and its warps.
BLOCK_M = 64
WARPS = 4
# Columns of a part: four threads of 16 bytes each read a row's.
PART = 32
# Most of |delta| that may be left uncarried: four times the rounding of a float32 sum.
TOLERANCE = tl.constexpr(2.0**-21)
# Half the smallest step of FP16. What is below it there, times the row's largest |dO|, is left.
HALF_STEP_FP16 = tl.constexpr(2.0**-25)
# Kernels that flush subnormal products to zero lose what is smaller.
SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def row_keys(do, FIRST: tl.constexpr):
    """Numbers that sort as |dO|, and name column and sign: one reduction finds all three.

    do [R, C] begins at column FIRST. From the highest bit: 15 bits of |dO|, the column counted from
    255 (of equals the first is taken: in a row of zeros that is a column which is stored),
    the sign.
    """
    bits = do.to(tl.uint16, bitcast=True).to(tl.uint32)
    columns = ((255 - FIRST - tl.arange(0, do.shape[1])) << 1).to(tl.uint32)
    return (bits << 17) | (bits >> 15) | columns[None, :]


@triton.jit
def reciprocal(g):
    """1 / g to the last bits but two; 0 where |g| is subnormal, and where 1 / g is."""
    if INTERPRETED:
        r = 1.0 / tl.where(g == 0.0, 1.0, g)
    else:
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [g], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.where(tl.abs(g) < SMALLEST, 0.0, r)


@triton.jit
def carried(keys, rest, DTYPE: tl.constexpr):
    """(largest key of each row, x in DTYPE with dO * x ~ rest there, what is left of rest).

    keys [R, C]; the rest [R]. Where dO is 0 (or subnormal, which kernels may flush to zero) x is
    0; a rest that is not finite stays so. x may overflow, which leaves NaN.
    """
    key = tl.max(keys, 1)
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        g = (((key >> 1) | (key << 31)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        g = widen(((key >> 17) | ((key & 1) << 15)).to(tl.uint16).to(DTYPE, bitcast=True))
    x = (rest * reciprocal(g)).to(DTYPE)
    return key, x, rest - g * widen(x)


@triton.jit
def finite_or_none(x, rest, before):
    """(x, rest); (0, before) where x is not finite."""
    ok = tl.abs(widen(x)) < float("inf")
    return tl.where(ok, x, tl.zeros_like(x)), tl.where(ok, rest, before)


@triton.jit
def three_of(keys, delta, DTYPE: tl.constexpr, ALL: tl.constexpr):
    """(x at each of the keys [R, C], 0 but for a row's three largest; bool [R]: not exact).

    ALL: a row's second and third are left out where they overflow; else the row is not exact.
    """
    key1, x1, rest1 = carried(keys, delta, DTYPE)
    others = tl.where(keys == key1[:, None], 0, keys)
    key2, x2, rest2 = carried(others, rest1, DTYPE)
    if ALL:
        x2, rest2 = finite_or_none(x2, rest2, rest1)
    others = tl.where(others == key2[:, None], 0, others)
    key3, x3, rest = carried(others, rest2, DTYPE)
    if ALL:
        x3, rest = finite_or_none(x3, rest, rest2)
    # Every key is there once, and x is 0 where dO is.
    x = tl.where(keys == key3[:, None], x3[:, None], tl.zeros(keys.shape, DTYPE))
    x = tl.where(keys == key2[:, None], x2[:, None], x)
    x = tl.where(keys == key1[:, None], x1[:, None], x)
    left = tl.abs(delta) * TOLERANCE + SMALLEST
    if DTYPE == tl.float16:  # noqa: SIM300
        first = ((key1 >> 17).to(tl.uint16)).to(DTYPE, bitcast=True)
        left += widen(first) * HALF_STEP_FP16
    # What is not finite needs no precision; a comparison with NaN is false.
    return x, (delta - delta == 0.0) & ~(tl.abs(rest) <= left)


@triton.constexpr_function
def _width(dv, first, part):
    """Columns that there are of a part."""
    return max(0, min(part, dv - first))


@triton.jit
def _part_keys(
    do_ptr, off, m0, stride, sq, FIRST: tl.constexpr,
    DV: tl.constexpr, BM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = _width(DV, FIRST, PART)
    return row_keys(load_tile(do_ptr, off, m0, stride, sq, BM, PART, width, True, 0, FIRST), FIRST)


@triton.jit
def _store_part(
    words_ptr, at, word, m0, stride, sq, FIRST: tl.constexpr,
    DV: tl.constexpr, BM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write a part in words of two columns; a thread has four of a row, and ``word`` at ``at``."""
    width: tl.constexpr = _width(DV, FIRST, PART) // 2
    here = FIRST // 2 + tl.arange(0, PART // 8)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tile = tl.where(here[None, :, :] == at[:, :, None], word[:, :, None], 0)
    tile = tl.reshape(tile, [BM, PART // 2])
    store_tile(words_ptr, tile, m0, stride, sq, BM, PART // 2, width, 0, FIRST // 2)


@triton.jit
def _all_columns(
    do_ptr, delta_ptr, carrier_ptr, ends_ptr, m0, stride_gs, stride_cs, batch, sq, sk, step,
    DV: tl.constexpr, BDV: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The carrier of R rows with the three largest of all columns, and what is said of them."""
    rows = m0 + tl.arange(0, R)
    delta = tl.load(delta_ptr + rows, mask=rows < sq, other=0.0)
    off = tile_offsets(stride_gs, R, BDV)
    do = load_tile(do_ptr, off, m0, stride_gs, sq, R, BDV, DV, True)
    tile, lacking = three_of(row_keys(do, 0), delta, do_ptr.dtype.element_ty, True)
    store_tile(carrier_ptr, tile, m0, stride_cs, sq, R, BDV, DV)
    if tl.max(lacking.to(tl.int32), 0) > 0:
        for i in range(1, batch + 1):
            tl.store(ends_ptr + i, i * sq)
            tl.store(ends_ptr + step + i, i * sk)


@triton.jit(do_not_specialize=("batch", "heads", "sq", "sk", "step", "stride_lb", "stride_lh"))
def carrier_kernel(
    do_ptr, delta_ptr, carrier_ptr, ends_ptr,
    stride_gb, stride_gs, stride_gh, stride_cb, stride_cs, stride_ch, stride_ws,
    stride_lb, stride_lh, batch, heads, sq, sk, step,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, PART: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Three columns of each row, of the largest that each of four threads finds.

    They do as well as the three largest of all, but where fewer threads find any: a tile with such
    a row is done again, FEW rows at a time, which takes no more registers than the usual path.
    """
    # Heads first: neighbours in time are neighbours in memory.
    h = (tl.program_id(0) % heads).to(tl.int64)
    m0 = tl.program_id(0) // heads * BM
    b = tl.program_id(1).to(tl.int64)
    do_ptr += b * stride_gb + h * stride_gh
    carrier_ptr += b * stride_cb + h * stride_ch
    delta_ptr += b * stride_lb + h * stride_lh
    again = True
    if BDV >= PART:
        rows = m0 + tl.arange(0, BM)
        delta = tl.load(delta_ptr + rows, mask=rows < sq, other=0.0)
        off = tile_offsets(stride_gs, BM, PART)
        best = tl.zeros([BM, PART], tl.uint32)
        for i in tl.static_range(BDV // PART):
            keys = _part_keys(do_ptr, off, m0, stride_gs, sq, i * PART, DV, BM, PART)
            best = tl.maximum(best, keys)
        # One of each thread.
        found = tl.max(tl.reshape(best, [BM, PART // 8, 8]), 2)
        x, lacking = three_of(found, delta, do_ptr.dtype.element_ty, False)
        again = tl.max(lacking.to(tl.int32), 0) > 0
        if not again:
            column = 255 - ((found >> 1) & 255).to(tl.int32)
            word = x.to(tl.uint16, bitcast=True).to(tl.uint32) << ((column & 1) << 4).to(tl.uint32)
            words_ptr = carrier_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
            for i in tl.static_range(BDV // PART):
                _store_part(words_ptr, column >> 1, word, m0, stride_ws, sq, i * PART, DV, BM, PART)
    if again:
        for few in range(0, BM // FEW):
            _all_columns(
                do_ptr, delta_ptr, carrier_ptr, ends_ptr, m0 + few * FEW, stride_gs, stride_cs,
                batch, sq, sk, step, DV, BDV, FEW,
            )  # fmt: skip


def _arguments(layout, sk, dout, delta, carrier, ends):
    batch, sq, heads, dv = dims(dout, layout)
    rows = (0, delta.stride(0)) if layout == "thd" else (delta.stride(0), delta.stride(1))
    steps = strides(carrier, layout)
    positional = (
        dout, delta, carrier, ends,
        *strides(dout, layout), *steps, steps[1] // 2, *rows,
        batch, heads, sq, sk, ends.stride(0),
    )  # fmt: skip
    named = {"DV": dv, "BDV": padded(dv), "BM": BLOCK_M, "PART": PART, "FEW": 8, "num_warps": WARPS}
    return (heads * triton.cdiv(sq, BLOCK_M), batch), positional, named


def carrier(
    dout: torch.Tensor, delta: torch.Tensor, *, layout: str, into: torch.Tensor, sk: int = 1
) -> torch.Tensor:
    """Write the carrier O of a delta; where rows lack one, as offsets of sequences.

    Args:
        dout: bf16 or fp16 in ``layout``, contiguous last dimension.
        delta: float32 [b, h, s], or [h, t] for thd, contiguous last dimension.
        into: what to write, dout's shape and dtype, contiguous last dimension, even strides.
        sk: key length.

    Returns:
        int32 [3, b + 1 or more]: multiples of sq, of sk, and zeros, if a row of the call has no
        carrier, else zeros alone. They are cu_seqlens_q, cu_seqlens_k and, with the batch strides
        of dense tensors, where each sequence starts. So kernels launched with them do their work
        only if it is needed, and the host need not know.
    """
    batch = dims(dout, layout)[0]
    ends = torch.zeros((3, (batch // 4 + 1) * 4), dtype=torch.int32, device=dout.device)
    if dout.numel():
        launch(
            carrier_kernel,
            (layout, sk),
            (dout, delta, into, ends),
            lambda *tensors: _arguments(layout, sk, *tensors),
        )
    return ends

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
from stable_attention.numerics import widen
from stable_attention.triton.launches import launch
from stable_attention.triton.memory import load_tile, store_tile, tile_offsets
from stable_attention.triton.options import padded

# Rows of a tile and its warps: 32 numbers a thread at head dim 128.
BLOCK_M = 32
WARPS = 4
# Most of |delta| that may be left uncarried: four times the rounding of a float32 sum.
TOLERANCE = tl.constexpr(2.0**-21)
# Half the smallest step of FP16. What is below it there, times the row's largest |dO|, is left.
HALF_STEP_FP16 = tl.constexpr(2.0**-25)
# Kernels that flush subnormal products to zero lose what is smaller.
SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def row_keys(do, BDV: tl.constexpr):
    """Numbers that sort as |dO|, and name column and sign: one reduction finds all three.

    From the highest bit: 15 bits of |dO|, the column counted from the right (of equals the first
    is taken: in a row of zeros that is a column which is stored), the sign.
    """
    bits = do.to(tl.uint16, bitcast=True).to(tl.uint32)
    columns = ((BDV - 1 - tl.arange(0, BDV)) << 1).to(tl.uint32)
    return (bits << 17) | (bits >> 15) | columns[None, :]


@triton.jit
def largest(keys, DTYPE: tl.constexpr):
    """(largest key of each row, the dO it stands for as float32); keys [BM, BDV]."""
    key = tl.max(keys, 1)
    g = widen(((key >> 17) | ((key & 1) << 15)).to(tl.uint16).to(DTYPE, bitcast=True))
    # Kernels may flush subnormal float32 to zero; of FP16 all are normal there.
    return key, tl.where(tl.abs(g) < SMALLEST, 0.0, g)


@triton.jit
def carried(rest, g, DTYPE: tl.constexpr, FIRST: tl.constexpr):
    """(x in DTYPE with g * x ~ rest, what is left of rest).

    A row of zeros carries 0; a delta that is not finite stays so. FIRST may overflow, which leaves
    NaN; the others are then left out.
    """
    x = tl.where(g == 0.0, rest * 0.0, rest / tl.where(g == 0.0, 1.0, g)).to(DTYPE)
    wide = widen(x)
    if not FIRST:
        ok = tl.abs(wide) < float("inf")
        x = tl.where(ok, x, tl.zeros_like(x))
        wide = tl.where(ok, wide, 0.0)
    return x, rest - g * wide


@triton.jit(do_not_specialize=("sq", "sk", "stride_lb", "stride_lh"))
def carrier_kernel(
    do_ptr, delta_ptr, carrier_ptr, ends_ptr,
    stride_gb, stride_gs, stride_gh, stride_cb, stride_cs, stride_ch, stride_lb, stride_lh, sq, sk,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = do_ptr.dtype.element_ty
    m0 = tl.program_id(0) * BM
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    g_row = b * stride_gb + h * stride_gh
    off = tile_offsets(stride_gs, BM, BDV)
    do = load_tile(do_ptr + g_row, off, m0, stride_gs, sq, BM, BDV, DV, True)
    rows = m0 + tl.arange(0, BM)
    row = b * stride_lb + h * stride_lh
    delta = tl.load(delta_ptr + row + rows, mask=rows < sq, other=0.0)
    keys = row_keys(do, BDV)
    key1, g1 = largest(keys, DTYPE)
    x1, rest = carried(delta, g1, DTYPE, True)
    keys2 = tl.where(keys == key1[:, None], 0, keys)
    key2, g2 = largest(keys2, DTYPE)
    x2, rest = carried(rest, g2, DTYPE, False)
    keys3 = tl.where(keys2 == key2[:, None], 0, keys2)
    key3, g3 = largest(keys3, DTYPE)
    x3, rest = carried(rest, g3, DTYPE, False)
    # Every key is there once, and x is 0 where dO is.
    tile = tl.where(keys == key3[:, None], x3[:, None], tl.zeros_like(do))
    tile = tl.where(keys == key2[:, None], x2[:, None], tile)
    tile = tl.where(keys == key1[:, None], x1[:, None], tile)
    c_row = b * stride_cb + h * stride_ch
    store_tile(carrier_ptr + c_row, tile, m0, stride_cs, sq, BM, BDV, DV)
    left = tl.abs(delta) * TOLERANCE + SMALLEST
    if DTYPE == tl.float16:  # noqa: SIM300
        left += tl.abs(g1) * HALF_STEP_FP16
    # What is not finite needs no precision; a comparison with NaN is false.
    lacking = (delta - delta == 0.0) & ~(tl.abs(rest) <= left)
    if tl.max(lacking.to(tl.int32), 0) > 0:
        tl.store(ends_ptr + 1, sq)
        tl.store(ends_ptr + 5, sk)


def _arguments(layout, sk, dout, delta, carrier, ends):
    batch, sq, heads, dv = dims(dout, layout)
    rows = (0, delta.stride(0)) if layout == "thd" else (delta.stride(0), delta.stride(1))
    positional = (
        dout, delta, carrier, ends,
        *strides(dout, layout), *strides(carrier, layout), *rows, sq, sk,
    )  # fmt: skip
    named = {"DV": dv, "BDV": padded(dv), "BM": BLOCK_M, "num_warps": WARPS}
    return (triton.cdiv(sq, BLOCK_M), heads, batch), positional, named


def carrier(
    dout: torch.Tensor, delta: torch.Tensor, *, layout: str, into: torch.Tensor, sk: int = 1
) -> torch.Tensor:
    """Write the carrier O of a delta; where rows lack one, as offsets of packed sequences.

    Args:
        dout: bf16 or fp16 in ``layout``, contiguous last dimension.
        delta: float32 [b, h, s], or [h, t] for thd, contiguous last dimension.
        into: what to write, dout's shape and dtype, contiguous last dimension.
        sk: key length.

    Returns:
        int32 [2, 4]: the rows begin with the offsets (0, sq) and (0, sk) of one sequence if a row
        of the call has no carrier, else with zeros. So kernels launched for packed sequences at
        these offsets do their work only if it is needed, and the host need not know.
    """
    ends = torch.zeros((2, 4), dtype=torch.int32, device=dout.device)
    if dout.numel():
        launch(
            carrier_kernel,
            (layout, sk),
            (dout, delta, into, ends),
            lambda *tensors: _arguments(layout, sk, *tensors),
        )
    return ends

"""What surrounds the backward kernel: numbers of rows in its form, and dQ from its sums.

Shape legend: as in `backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stable_attention.numerics import lse_to_shift
from stable_attention.triton.memory import store_tile, tile_offsets


@triton.jit(do_not_specialize=("sq", "heads", "query_tiles", "stride_lb", "stride_lh"))
def rows_kernel(
    lse_ptr, delta_ptr, shift_ptr, padded_ptr, turns_ptr, counter_ptr,
    stride_lb, stride_lh, sq, heads, query_tiles,
    BM: tl.constexpr,
):  # fmt: skip
    """Shift (log2 units) and delta of a query tile, whole: rows past the end have P = 0."""
    tile = tl.program_id(0)
    head = tile // query_tiles
    row0 = (tile % query_tiles) * BM
    rows = row0 + tl.arange(0, BM)
    ok = rows < sq
    first = (head // heads).to(tl.int64) * stride_lb + (head % heads).to(tl.int64) * stride_lh
    lse = tl.load(lse_ptr + first + rows, mask=ok, other=-float("inf"))
    delta = tl.load(delta_ptr + first + rows, mask=ok, other=0.0)
    place = tile.to(tl.int64) * BM + tl.arange(0, BM)
    tl.store(shift_ptr + place, lse_to_shift(lse))
    tl.store(padded_ptr + place, delta)
    tl.store(turns_ptr + tile, 0)
    if tile == 0:
        tl.store(counter_ptr, 0)


@triton.jit(do_not_specialize=("sq", "heads", "query_tiles"))
def dq_kernel(
    sum_ptr, dq_ptr, stride_b, stride_s, stride_h, sq, heads, query_tiles, scale,
    BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dQ in its own type and layout from the float32 sums of a query tile."""
    tile = tl.program_id(0)
    head = tile // query_tiles
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    total = tl.load(sum_ptr + tile.to(tl.int64) * (BM * D) + tile_offsets(D, BM, D))
    store_tile(
        dq_ptr + b * stride_b + h * stride_h, total * scale, (tile % query_tiles) * BM,
        stride_s, sq, BM, D, D,
    )  # fmt: skip


__all__ = ["dq_kernel", "rows_kernel"]

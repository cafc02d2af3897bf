"""What surrounds the persistent kernels: where tiles of packed sequences lie, numbers of rows in
the form of the backward pass, and gradients from its float32 sums.

Shape legend: as in `backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stable_attention.hopper.tiles import FIELDS
from stable_attention.numerics import lse_to_shift
from stable_attention.triton.geometry import locate
from stable_attention.triton.memory import POINTERS, load_tile, store_tile, tile_offsets

CHUNK = tl.constexpr(1024)
"""Sequences whose tiles are counted at once."""


@triton.jit
def _tiles_of(cu, starts, sequences, total, length, BM: tl.constexpr):
    """Tiles of sequences [CHUNK], 0 where the number is negative."""
    ok = sequences >= 0
    begin = tl.load(cu + sequences, mask=ok, other=0)
    n = tl.load(cu + sequences + 1, mask=ok, other=0) - begin
    start = tl.load(starts + sequences, mask=ok, other=0)
    start = tl.minimum(tl.maximum(start, 0), total)
    return tl.cdiv(tl.minimum(tl.minimum(tl.maximum(n, 0), length), total - start), BM)


@triton.jit(do_not_specialize=("batch", "sq", "sk", "tq", "tk", "most"))
def places_kernel(
    cu_q, cu_k, start_q, start_k, places_ptr, counter_ptr, batch, sq, sk, tq, tk, most,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Records (`tiles.FIELDS`) of one sequence's tiles: of BM queries, or in a second program and
    the table after the first one, of BN keys. Their number follows the counter of items."""
    b = tl.program_id(0)
    of_keys = tl.program_id(1)
    before = 0
    before_q = 0
    tiles = 0
    for first in range(0, batch, CHUNK):
        i = first + tl.arange(0, CHUNK)
        i = tl.where(i < batch, i, -1)
        of_q = _tiles_of(cu_q, start_q, i, tq, sq, BM)
        here = of_q
        if of_keys == 1:
            here = _tiles_of(cu_k, start_k, i, tk, sk, BN)
        before_q += tl.sum(tl.where(i < b, of_q, 0), 0)
        before += tl.sum(tl.where(i < b, here, 0), 0)
        tiles += tl.sum(here, 0)
    q0, nq = locate(cu_q, start_q, b, tq, sq, True)
    k0, nk = locate(cu_k, start_k, b, tk, sk, True)
    own = tl.cdiv(nq, BM)
    if of_keys == 1:
        own = tl.cdiv(nk, BN)
        # Keys without a query read rows of no sequence, whose P is 0.
        before_q = tl.where(nq == 0, most - 1, before_q)
    # Offsets that are no sequences' stay within the tables.
    nq = tl.minimum(nq, tl.maximum(most - before_q, 0) * BM)
    before_q = tl.minimum(before_q, most - 1)
    for first in range(0, own, CHUNK):
        n = first + tl.arange(0, CHUNK)
        ok = (n < own) & (before + n < most)
        place = places_ptr + (of_keys * most + before + n).to(tl.int64) * FIELDS
        tl.store(place, n, mask=ok)
        tl.store(place + 1, q0 + 0 * n, mask=ok)
        tl.store(place + 2, nq + 0 * n, mask=ok)
        tl.store(place + 3, k0 + 0 * n, mask=ok)
        tl.store(place + 4, nk + 0 * n, mask=ok)
        tl.store(place + 5, before_q + 0 * n, mask=ok)
        tl.store(place + 6, b + 0 * n, mask=ok)
    if b == 0:
        tl.store(counter_ptr, 0)
        tl.store(counter_ptr + 1 + of_keys, tl.minimum(tiles, most))


@triton.jit
def _query_tile(places_ptr, counter_ptr, t, sq, PACKED: tl.constexpr):
    """(tile within its sequence, first token, queries) of a query tile; none for one too many."""
    if PACKED:
        place = places_ptr + t * FIELDS
        ok = t < tl.load(counter_ptr + 1)
        n = tl.load(place, mask=ok, other=0)
        return n, tl.load(place + 1, mask=ok, other=0), tl.load(place + 2, mask=ok, other=0)
    else:
        return t, 0, sq


@triton.jit(do_not_specialize=("sq", "heads", "query_tiles", "stride_lb", "stride_lh"))
def rows_kernel(
    lse_ptr, delta_ptr, shift_ptr, padded_ptr, turns_ptr, counter_ptr, places_ptr,
    stride_lb, stride_lh, sq, heads, query_tiles,
    BM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Shift (log2 units) and delta of a query tile, whole: rows past the end have P = 0."""
    tile = tl.program_id(0)
    head = tile // query_tiles
    m, start, sq = _query_tile(places_ptr, counter_ptr, tile % query_tiles, sq, PACKED)
    rows = m * BM + tl.arange(0, BM)
    ok = rows < sq
    first = (head // heads).to(tl.int64) * stride_lb + (head % heads).to(tl.int64) * stride_lh
    first += start
    lse = tl.load(lse_ptr + first + rows, mask=ok, other=-float("inf"))
    delta = tl.load(delta_ptr + first + rows, mask=ok, other=0.0)
    place = tile.to(tl.int64) * BM + tl.arange(0, BM)
    tl.store(shift_ptr + place, lse_to_shift(lse))
    tl.store(padded_ptr + place, delta)
    tl.store(turns_ptr + tile, 0)
    if tile == 0 and not PACKED:
        tl.store(counter_ptr, 0)


@triton.jit(do_not_specialize=("s", "heads", "tiles"))
def sum_kernel(
    sum_ptr, out_ptr, turns_ptr, counter_ptr, places_ptr, stride_b, stride_s, stride_h,
    s, heads, tiles, scale,
    ROWS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    TURNS: tl.constexpr, PACKED: tl.constexpr, LATER: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A gradient tile in its own type and layout from PARTS float32 sums, in their order; COLUMNS
    of it a program.

    With TURNS, those of a tile to which nobody added are 0. LATER: tiles are of keys. ADD: to what
    is there.
    """
    tile = tl.program_id(0)
    head = tile // tiles
    t = tile % tiles
    start = 0
    n = t
    if PACKED:
        place = places_ptr + t * FIELDS
        ok = t < tl.load(counter_ptr + 1 + LATER)
        n = tl.load(place, mask=ok, other=0)
        start = tl.load(place + 1 + 2 * LATER, mask=ok, other=0)
        s = tl.load(place + 2 + 2 * LATER, mask=ok, other=0)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    if COLUMNS < D:
        sum_ptr += tl.program_id(1) * COLUMNS
        out_ptr += tl.program_id(1) * COLUMNS
    first = (head * PARTS * tiles + t).to(tl.int64) * (ROWS * D)
    total = tl.load(sum_ptr + first + tile_offsets(D, ROWS, COLUMNS))
    for _part in tl.static_range(1, PARTS):
        first += tiles.to(tl.int64) * (ROWS * D)
        total += tl.load(sum_ptr + first + tile_offsets(D, ROWS, COLUMNS))
    if TURNS:
        total = tl.where(tl.load(turns_ptr + tile) > 0, total, 0.0)
    where = out_ptr + b * stride_b + h * stride_h + tl.cast(start, tl.int64) * stride_s
    total *= scale
    if ADD:
        off = tile_offsets(stride_s, ROWS, COLUMNS)
        total += load_tile(
            where, off, n * ROWS, stride_s, s, ROWS, COLUMNS, COLUMNS, True, POINTERS, 0
        )
    store_tile(where, total, n * ROWS, stride_s, s, ROWS, COLUMNS, COLUMNS)


__all__ = ["places_kernel", "rows_kernel", "sum_kernel"]

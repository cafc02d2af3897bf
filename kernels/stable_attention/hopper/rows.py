"""What surrounds the persistent kernels: where tiles of packed sequences lie, numbers of rows in
the form of the backward pass, and gradients from its float32 sums.

Shape legend: as in `backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stable_attention.hopper.tiles import FIELDS, ONE_PLANE
from stable_attention.numerics import key_of_rank, lse_planes_to_shift, lse_to_shift
from stable_attention.triton.geometry import locate
from stable_attention.triton.memory import POINTERS, load_tile, store_tile, tile_offsets

CHUNK = tl.constexpr(1024)
"""Sequences whose tiles are counted at once."""
LARGEST = tl.constexpr(4096.0)
"""Largest LSE, in log2 units, that one float32 number holds well enough: P is off by 2^-13."""


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


@triton.jit(do_not_specialize=("sq", "heads", "query_tiles", "stride_lb", "stride_lh", "plane"))
def rows_kernel(
    lse_ptr, delta_ptr, shift_ptr, padded_ptr, rank_ptr, turns_ptr, counter_ptr, places_ptr,
    stride_lb, stride_lh, plane, sq, heads, query_tiles,
    BM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Shift (log2 units) and delta of a query tile, whole: rows past the end have P = 0.

    With ranks, which start at 0, a tile's second plane of LSE follows its shift; ``plane``: its
    stride.
    """
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
    if rank_ptr is not None:
        rest = tl.load(lse_ptr + tl.cast(plane, tl.int64) + first + rows, mask=ok, other=0.0)
        planes = shift_ptr + tile.to(tl.int64) * (2 * BM) + tl.arange(0, BM)
        tl.store(planes, lse_planes_to_shift(lse))
        largest = tl.max(tl.where(lse == -float("inf"), 0.0, tl.abs(lse)), 0)
        tl.store(planes + BM, tl.where(largest <= LARGEST, ONE_PLANE, rest))
        tl.store(rank_ptr + place, tl.zeros([BM], tl.int32))
    else:
        tl.store(shift_ptr + place, lse_to_shift(lse))
    tl.store(padded_ptr + place, delta)
    if turns_ptr is not None:
        tl.store(turns_ptr + tile, 0)
    if tile == 0 and not PACKED:
        tl.store(counter_ptr, 0)


@triton.jit
def _along_keys(
    excess_ptr, rank_ptr, target_ptr, key_ptr, tile, target_row, ok, keys, stride_ks,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """[ROWS, D]: what rows of dS sum to too much, times a key of their largest dS."""
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    excess = tl.load(excess_ptr + rows)
    if target_ptr is not None:
        excess -= tl.load(target_ptr + target_row, mask=ok, other=0.0)
    key, found = key_of_rank(tl.load(rank_ptr + rows))
    found &= ok & (key < keys)
    place = key_ptr + key.to(tl.int64)[:, None] * stride_ks + tl.arange(0, D)[None, :]
    return excess[:, None] * tl.load(place, mask=found[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("s", "heads", "tiles", "keys", "group", "stride_lb", "stride_lh"))
def sum_kernel(
    sum_ptr, out_ptr, turns_ptr, counter_ptr, places_ptr, stride_b, stride_s, stride_h,
    s, heads, tiles, scale,
    excess_ptr, rank_ptr, target_ptr, key_ptr, stride_lb, stride_lh, stride_kb, stride_ks,
    stride_kh, keys, group,
    ROWS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, TURNS: tl.constexpr,
    PACKED: tl.constexpr, LATER: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A gradient tile in its own type and layout from PARTS float32 sums, in their order.

    With TURNS, those of a tile to which nobody added are 0. LATER: tiles are of keys. ADD: to what
    is there. With excess_ptr: less what `_along_keys` says; target_ptr has LSE's strides.
    """
    tile = tl.program_id(0)
    head = tile // tiles
    t = tile % tiles
    start = 0
    start_k = 0
    n = t
    if PACKED:
        place = places_ptr + t * FIELDS
        ok = t < tl.load(counter_ptr + 1 + LATER)
        n = tl.load(place, mask=ok, other=0)
        start = tl.load(place + 1 + 2 * LATER, mask=ok, other=0)
        s = tl.load(place + 2 + 2 * LATER, mask=ok, other=0)
        if excess_ptr is not None:
            start_k = tl.load(place + 3, mask=ok, other=0)
            keys = tl.load(place + 4, mask=ok, other=0)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    first = (head * PARTS * tiles + t).to(tl.int64) * (ROWS * D)
    total = tl.load(sum_ptr + first + tile_offsets(D, ROWS, D))
    for _part in tl.static_range(1, PARTS):
        first += tiles.to(tl.int64) * (ROWS * D)
        total += tl.load(sum_ptr + first + tile_offsets(D, ROWS, D))
    if excess_ptr is not None:
        rows = n * ROWS + tl.arange(0, ROWS)
        key_ptr += b * stride_kb + (h // group) * stride_kh
        key_ptr += tl.cast(start_k, tl.int64) * stride_ks
        total -= _along_keys(
            excess_ptr, rank_ptr, target_ptr, key_ptr, tile,
            b * stride_lb + h * stride_lh + start + rows, rows < s, keys, stride_ks, ROWS, D,
        )  # fmt: skip
    if TURNS:
        total = tl.where(tl.load(turns_ptr + tile) > 0, total, 0.0)
    where = out_ptr + b * stride_b + h * stride_h + tl.cast(start, tl.int64) * stride_s
    total *= scale
    if ADD:
        off = tile_offsets(stride_s, ROWS, D)
        total += load_tile(where, off, n * ROWS, stride_s, s, ROWS, D, D, True, POINTERS, 0)
    store_tile(where, total, n * ROWS, stride_s, s, ROWS, D, D)


__all__ = ["places_kernel", "rows_kernel", "sum_kernel"]

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
NEARLY_ALL = tl.constexpr(15 / 16)
"""P above which errors of delta show in dS, which is (1 - P) of what the row's delta is made of."""
MARKED = tl.constexpr(128)
"""Keys, or tokens of packed sequences, that share a mark: whether `saturated_kernel` has work."""


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


@triton.jit(
    do_not_specialize=("sq", "heads", "query_tiles", "stride_lb", "stride_lh", "plane", "marks")
)
def rows_kernel(
    lse_ptr, delta_ptr, shift_ptr, padded_ptr, rank_ptr, marks_ptr, turns_ptr, counter_ptr,
    places_ptr, stride_lb, stride_lh, plane, marks, sq, heads, query_tiles,
    BM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Shift (log2 units) and delta of a query tile, whole: rows past the end have P = 0.

    With a ``plane``, the stride of LSE's second one, that of a tile follows its shift; of chunks,
    whose LSE has one, a mark that there is none. Ranks start at 0, as do so many ``marks``.
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
    if plane is not None or rank_ptr is not None:
        planes = shift_ptr + tile.to(tl.int64) * (2 * BM) + tl.arange(0, BM)
        if plane is not None:
            rest = tl.load(lse_ptr + tl.cast(plane, tl.int64) + first + rows, mask=ok, other=0.0)
            tl.store(planes, lse_planes_to_shift(lse))
            largest = tl.max(tl.where(lse == -float("inf"), 0.0, tl.abs(lse)), 0)
            tl.store(planes + BM, tl.where(largest <= LARGEST, ONE_PLANE, rest))
        else:
            tl.store(planes, lse_to_shift(lse))
            tl.store(planes + BM, tl.full([BM], ONE_PLANE, tl.float32))
        if rank_ptr is not None:
            tl.store(rank_ptr + place, tl.zeros([BM], tl.int32))
        if marks_ptr is not None:
            for i in range(tile, marks, tl.num_programs(0)):
                tl.store(marks_ptr + i, 0)
    else:
        tl.store(shift_ptr + place, lse_to_shift(lse))
    tl.store(padded_ptr + place, delta)
    if turns_ptr is not None:
        tl.store(turns_ptr + tile, 0)
    if tile == 0 and not PACKED:
        tl.store(counter_ptr, 0)


@triton.jit
def _keys_of(ptr, key, found, stride, D: tl.constexpr):
    """[ROWS, D] float32 of rows ``key`` of K or Q; zeros where none is found."""
    place = ptr + key.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(place, mask=found[:, None], other=0.0).to(tl.float32)


@triton.jit
def _carriers(
    rank_ptr, shift_ptr, of_key_ptr, marks_ptr, key_ptr, query_ptr,
    tile, row, s, first_mark, first_key, keys, left, right, stride_ks, stride_qs, unit,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """(key [ROWS] along which dQ is put right, whether there is one, its P): of the largest dS.

    Notes the key for `saturated_kernel` and marks it, or notes -1 where P is not nearly all of the
    row. Where it is, its dS is minus the sum of all others and may be small by chance: rows without
    such a key also try the first one of other rows of the tile. first_key: token of key 0. Of
    chunks (of_key_ptr is None) nothing is noted.
    """
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = row < s
    key, found = key_of_rank(tl.load(rank_ptr + rows))
    found &= ok & (key < keys)
    planes = shift_ptr + tile.to(tl.int64) * (2 * ROWS) + tl.arange(0, ROWS)
    shift = tl.load(planes)
    rest = tl.load(planes + ROWS)
    shift += tl.where(rest < ONE_PLANE, rest, 0.0)
    q = _keys_of(query_ptr, row, ok, stride_qs, D)
    p = tl.exp2(tl.sum(q * _keys_of(key_ptr, key, found, stride_ks, D), 1) * unit - shift)
    saturated = found & (p > NEARLY_ALL)
    common = tl.min(tl.where(saturated, key, keys), 0)
    if common < keys:
        of_common = tl.load(key_ptr + tl.cast(common, tl.int64) * stride_ks + tl.arange(0, D))
        other = tl.exp2(tl.sum(q * of_common.to(tl.float32)[None, :], 1) * unit - shift)
        distance = common - (row + keys - s)
        seen = ok & (distance <= right) & (-distance <= left)
        changed = seen & (other > NEARLY_ALL) & (p <= NEARLY_ALL)
        key = tl.where(changed, common, key)
        p = tl.where(changed, other, p)
        found |= changed
        saturated |= changed
    if of_key_ptr is not None:
        tl.store(of_key_ptr + rows, tl.where(saturated, key, -1))
        mark = marks_ptr + first_mark + (first_key + key) // MARKED
        tl.store(mark, tl.full([ROWS], 1, tl.int32), mask=saturated)
    return key, found, p


@triton.jit
def _carry(
    so_far_ptr, top_ptr, best_ptr, excess, p, key, found, row, s, key_ptr, stride_best, stride_ks,
    D: tl.constexpr,
):  # fmt: skip
    """Add a chunk's share to what rows keep between chunks, as `triton.projection.carry` does: the
    sum of dS, and where its P is larger than any before, the key to be put right along."""
    ok = row < s
    tl.store(so_far_ptr + row, tl.load(so_far_ptr + row, mask=ok, other=0.0) + excess, mask=ok)
    better = found & (p > tl.load(top_ptr + row, mask=ok, other=float("inf")))
    tl.store(top_ptr + row, p, mask=better)
    to = best_ptr + row.to(tl.int64)[:, None] * stride_best + tl.arange(0, D)[None, :]
    best = _keys_of(key_ptr, key, better, stride_ks, D)
    tl.store(to, best.to(best_ptr.dtype.element_ty), mask=better[:, None])


@triton.jit(
    do_not_specialize=(
        "s", "heads", "tiles", "marks", "keys", "left", "right", "group", "stride_lb", "stride_lh",
    )
)  # fmt: skip
def sum_kernel(
    sum_ptr, out_ptr, turns_ptr, counter_ptr, places_ptr, stride_b, stride_s, stride_h,
    s, heads, tiles, scale,
    so_far_ptr, top_ptr, best_ptr,
    excess_ptr, rank_ptr, shift_ptr, weight_ptr, of_key_ptr, marks_ptr,
    target_ptr, key_ptr, query_ptr, stride_lb, stride_lh, stride_kb, stride_ks, stride_kh,
    stride_qb, stride_qs, stride_qh, marks, keys, left, right, group, unit,
    ROWS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, TURNS: tl.constexpr,
    PACKED: tl.constexpr, LATER: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A gradient tile in its own type and layout from PARTS float32 sums, in their order.

    With TURNS, those of a tile to which nobody added are 0. LATER: tiles are of keys. ADD: to what
    is there. With excess_ptr: less what rows of dS sum to too much, along `_carriers`, or with
    top_ptr that is kept for other chunks (`_carry`). target_ptr and top_ptr have LSE's strides.
    left, right: of `plan.reach`; marks: of a key/value head.
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
    if excess_ptr is not None:
        row = n * ROWS + tl.arange(0, ROWS)
        key_ptr += b * stride_kb + (h // group) * stride_kh
        key_ptr += tl.cast(start_k, tl.int64) * stride_ks
        query_ptr += b * stride_qb + h * stride_qh + tl.cast(start, tl.int64) * stride_qs
        key, found, p = _carriers(
            rank_ptr, shift_ptr, of_key_ptr, marks_ptr, key_ptr, query_ptr,
            tile, row, s, (head // group) * marks, start_k, keys, left, right, stride_ks, stride_qs,
            unit, ROWS, D,
        )  # fmt: skip
        rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        excess = tl.load(excess_ptr + rows)
        place = b * stride_lb + h * stride_lh + start
        if top_ptr is not None:
            if TURNS:
                excess = tl.where(tl.load(turns_ptr + tile) > 0, excess, 0.0)
            best_ptr += b * stride_b + h * stride_h
            _carry(
                so_far_ptr + place, top_ptr + place, best_ptr, excess, p, key, found, row, s,
                key_ptr, stride_s, stride_ks, D,
            )  # fmt: skip
        else:
            if target_ptr is not None:
                excess -= tl.load(target_ptr + place + row, mask=row < s, other=0.0)
            tl.store(weight_ptr + rows, excess * p)
    first = (head * PARTS * tiles + t).to(tl.int64) * (ROWS * D)
    total = tl.load(sum_ptr + first + tile_offsets(D, ROWS, D))
    for _part in tl.static_range(1, PARTS):
        first += tiles.to(tl.int64) * (ROWS * D)
        total += tl.load(sum_ptr + first + tile_offsets(D, ROWS, D))
    if excess_ptr is not None and top_ptr is None:
        total -= excess[:, None] * _keys_of(key_ptr, key, found, stride_ks, D)
    if TURNS:
        total = tl.where(tl.load(turns_ptr + tile) > 0, total, 0.0)
    where = out_ptr + b * stride_b + h * stride_h + tl.cast(start, tl.int64) * stride_s
    total *= scale
    if ADD:
        off = tile_offsets(stride_s, ROWS, D)
        total += load_tile(where, off, n * ROWS, stride_s, s, ROWS, D, D, True, POINTERS, 0)
    store_tile(where, total, n * ROWS, stride_s, s, ROWS, D, D)


@triton.jit(
    do_not_specialize=(
        "marks", "sq", "sk", "left", "right", "kv_heads", "group", "key_tiles", "query_tiles",
    )
)  # fmt: skip
def saturated_kernel(
    dk_ptr, query_ptr, weight_ptr, of_key_ptr, marks_ptr, counter_ptr, places_ptr,
    stride_kb, stride_ks, stride_kh, stride_qb, stride_qs, stride_qh,
    marks, sq, sk, left, right, kv_heads, group, key_tiles, query_tiles, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr,
    SCAN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dK of a key tile less what errors of delta left in it, for the rows that `sum_kernel` names.

    P is nearly 1 there and dS a small difference: an error of delta shows in it. Rows sum to minus
    that error, which P of the row multiplies. Looks at SCAN rows at once.
    """
    tl.static_assert(MARKED.value >= BN)
    program = tl.program_id(0)
    head = program // key_tiles
    n = program % key_tiles
    start = 0
    start_k = 0
    before = 0
    if PACKED:
        record = places_ptr + n * FIELDS
        ok = n < tl.load(counter_ptr + 2)
        n = tl.load(record, mask=ok, other=0)
        start = tl.load(record + 1, mask=ok, other=0)
        sq = tl.load(record + 2, mask=ok, other=0)
        start_k = tl.load(record + 3, mask=ok, other=0)
        sk = tl.load(record + 4, mask=ok, other=0)
        before = tl.load(record + 5, mask=ok, other=0)
    b = (head // kv_heads).to(tl.int64)
    h = (head % kv_heads).to(tl.int64)
    marks_ptr += head * marks
    last = start_k + tl.maximum(tl.minimum(n * BN + BN, sk) - 1, 0)
    marked = tl.load(marks_ptr + (start_k + n * BN) // MARKED) | tl.load(marks_ptr + last // MARKED)
    if marked == 0:
        return
    # Rows that see a key of this tile.
    first = tl.maximum(n * BN - (sk - sq) - right, 0) // STEP * STEP
    last = tl.minimum(tl.minimum(n * BN + BN, sk) - (sk - sq) + left, sq)
    keys = n * BN + tl.arange(0, BN)
    columns = tl.arange(0, D)[None, :]
    total = tl.zeros([BN, D], tl.float32)
    any_found = 0
    for g in range(0, group):
        place = ((head * group + g) * query_tiles + before).to(tl.int64) * BM
        of_head = query_ptr + b * stride_qb + (h * group + g) * stride_qh
        of_head += tl.cast(start, tl.int64) * stride_qs
        for low in range(first, last, SCAN):
            scanned = low + tl.arange(0, SCAN)
            of_scanned = tl.load(of_key_ptr + place + scanned, mask=scanned < last, other=-1)
            found = (of_scanned >= n * BN) & (of_scanned < n * BN + BN)
            # Often the first row of a sequence alone, whose only key has all of it.
            end = tl.max(tl.where(found, scanned + 1, 0), 0)
            if end > 0:
                any_found = 1
                begin = tl.min(tl.where(found, scanned, end), 0) // STEP * STEP
                for i in range(begin, end, STEP):
                    rows = i + tl.arange(0, STEP)
                    key = tl.load(of_key_ptr + place + rows, mask=rows < last, other=-1)
                    weight = tl.load(weight_ptr + place + rows, mask=rows < last, other=0.0)
                    here = (key >= n * BN) & (key < n * BN + BN)
                    where = of_head + rows.to(tl.int64)[:, None] * stride_qs + columns
                    q = tl.load(where, mask=here[:, None], other=0.0)
                    share = tl.where(keys[:, None] == key[None, :], weight[None, :], 0.0)
                    # fp16 has no exponents for what is left of a gradient.
                    total = tl.dot(share.to(tl.bfloat16), q.to(tl.bfloat16), total)
    if any_found > 0:
        dk_ptr += b * stride_kb + h * stride_kh + tl.cast(start_k, tl.int64) * stride_ks
        off = tile_offsets(stride_ks, BN, D)
        dk = load_tile(dk_ptr, off, n * BN, stride_ks, sk, BN, D, D, True, POINTERS, 0)
        store_tile(dk_ptr, dk.to(tl.float32) - scale * total, n * BN, stride_ks, sk, BN, D, D)


__all__ = ["places_kernel", "rows_kernel", "saturated_kernel", "sum_kernel"]

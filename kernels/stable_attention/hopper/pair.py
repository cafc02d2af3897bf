"""Pair experiment: 128 keys an item, 64 of each consumer."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stable_attention.hopper.backward import new_barriers
from stable_attention.hopper.barriers import advance, next_item, warp_sync
from stable_attention.hopper.producer import PAIR
from stable_attention.hopper.tiles import (
    first_row_of,
    item_at,
    load_parts,
    place_of,
    query_tiles_of,
    zeros_outside,
)

BM = gl.constexpr(64)
BN = gl.constexpr(128)


@gluon.jit
def _product(left_s, ring, slot, zero, C: gl.constexpr, W: gl.constexpr, PARTS: gl.constexpr):
    N: gl.constexpr = zero.shape[1]
    rows = ring.index(slot * PARTS).slice(C * N, N)
    x = warpgroup_mma(
        left_s.index(0).slice(W * 64, 64), rows.permute((1, 0)), zero, use_acc=False, is_async=True
    )
    for part in gl.static_range(1, PARTS):
        rows = ring.index(slot * PARTS + part).slice(C * N, N)
        x = warpgroup_mma(
            left_s.index(part).slice(W * 64, 64), rows.permute((1, 0)), x, is_async=True
        )
    return x


@gluon.jit
def _store(place, x, row, rows, stride, column):
    """x [64, N], rows from ``row`` on of so many, to a gradient of 16 bits at ``place``."""
    like: gl.constexpr = x.type.layout
    r = row + gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, like)), 1)
    columns = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, like)), 0)
    where = place + (r.to(gl.int64) * stride + (columns + column))
    gl.store(where, x.to(place.dtype.element_ty), mask=r < rows)


@gluon.jit
def _consumer(
    dk_ptr, dv_ptr, q_s, k_s, v_s, do_s, shift_s, delta_s, item_s, item_full, item_empty,
    k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty,
    counter, places, sq, sk, left, right, key_tiles, query_tiles, head_block, kv_heads, group,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, unit, scale,
    W: gl.constexpr, SLOTS: gl.constexpr, N: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = q_s.shape[0] // SLOTS
    WIDTH: gl.constexpr = q_s.shape[2]
    DV: gl.constexpr = do_s.shape[2]
    dtype: gl.constexpr = q_s.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    DK_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    DV_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16]
    )
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DV_L, k_width=2)
    DS_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DK_L, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, S_L)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero_s = gl.zeros([64, N], gl.float32, S_L)
    slot = 0
    parity = 0
    item_slot = 0
    item_parity = 0
    key_parity = 0
    tiles = key_tiles
    if PACKED:
        tiles = gl.load(counter + 2)
    running = True
    while running:
        mbarrier.wait(item_full.index(item_slot), item_parity)
        item = gl.max(item_s.index(item_slot).load(one), 0)
        mbarrier.arrive(item_empty.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        running = item >= 0
        if running:
            place, head = item_at(item, tiles, head_block, False)
            n, _, queries, start_k, keys = place_of(places, place, sq, sk, PACKED)
            first, count = query_tiles_of(
                n, query_tiles, queries, keys, left, right, BM, BN, False, BAND
            )
            count = gl.maximum(count, 1)
            zero = gl.zeros([64, WIDTH], gl.float32, DK_L)
            dk0 = zero
            dk1 = zero
            dk2 = zero
            dv = gl.zeros([64, DV], gl.float32, DV_L)
            first_key = n * BN + W * 64
            middle = first * BM + (keys - queries) - first_key
            end = keys - 1 - first_key
            behind = middle + count * BM
            mbarrier.wait(k_full, key_parity)
            mbarrier.wait(v_full, key_parity)
            key_parity ^= 1
            for _ in range(0, count * group):
                for c in gl.static_range(BM // N):
                    if c == 0:
                        mbarrier.wait(q_full.index(slot), parity)
                    made = _product(k_s, q_s, slot, zero_s, c, W, PARTS)
                    if c == 0:
                        mbarrier.wait(do_full.index(slot), parity)
                    dp_made = _product(v_s, do_s, slot, zero_s, c, W, 1)
                    s, dp_made = warpgroup_mma_wait(1, deps=(made, dp_made))
                    shift = shift_s.index(slot).reshape((BM,)).slice(c * N, N).load(columns)
                    p = gl.exp2(s * unit - gl.expand_dims(shift, 0))
                    if BAND:
                        to_right = middle + right
                        to_left = middle - left
                        if (gl.minimum(to_right, end) < 63) | (to_left + N - 1 > 0):
                            p = zeros_outside(p, to_right, to_left, end)
                        middle += N
                    dp = warpgroup_mma_wait(0, deps=(dp_made,))
                    delta = delta_s.index(slot).reshape((BM,)).slice(c * N, N).load(columns)
                    ds = gl.convert_layout((p * (dp - gl.expand_dims(delta, 0))).to(dtype), DS_L)
                    p_rounded = gl.convert_layout(p.to(dtype), P_L)
                    grads = do_s.index(slot).slice(c * N, N)
                    dv = warpgroup_mma(p_rounded, grads, dv, is_async=True)
                    dk0 = warpgroup_mma(ds, q_s.index(slot * PARTS).slice(c * N, N), dk0, is_async=True)
                    dk1 = warpgroup_mma(ds, q_s.index(slot * PARTS + 1).slice(c * N, N), dk1, is_async=True)
                    dk2 = warpgroup_mma(ds, q_s.index(slot * PARTS + 2).slice(c * N, N), dk2, is_async=True)
                    dv, dk0, dk1, dk2 = warpgroup_mma_wait(PARTS, deps=(dv, dk0, dk1, dk2))
                    if c == BM // N - 1:
                        mbarrier.arrive(do_empty.index(slot), count=1)
                    dk0, dk1, dk2 = warpgroup_mma_wait(0, deps=(dk0, dk1, dk2))
                    if c == BM // N - 1:
                        mbarrier.arrive(q_empty.index(slot), count=1)
                slot, parity = advance(slot, parity, SLOTS)
                middle = gl.where(middle == behind, middle - count * BM, middle)
            mbarrier.arrive(v_empty, count=1)
            mbarrier.arrive(k_empty, count=1)
            b = (head // kv_heads).to(gl.int64)
            hk = (head % kv_heads).to(gl.int64)
            out = dv_ptr + b * stride_dvb + hk * stride_dvh + start_k.to(gl.int64) * stride_dvs
            _store(out, dv, first_key, keys, stride_dvs, 0)
            out = dk_ptr + b * stride_dkb + hk * stride_dkh + start_k.to(gl.int64) * stride_dks
            _store(out, dk0 * scale, first_key, keys, stride_dks, 0)
            _store(out, dk1 * scale, first_key, keys, stride_dks, WIDTH)
            _store(out, dk2 * scale, first_key, keys, stride_dks, 2 * WIDTH)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, counter, places,
    q_s, k_s, v_s, do_s, shift_s, delta_s, item_s, item_full, item_empty,
    k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty,
    sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads, group,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    SLOTS: gl.constexpr, N: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = q_s.shape[0] // SLOTS
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = 0
    parity = 0
    item_slot = 0
    item_parity = 0
    key_parity = 0
    tiles = key_tiles
    if PACKED:
        tiles = gl.load(counter + 2)
    items = tiles * all_heads
    # Programs begin with their own number. As many are taken from the counter as there are items,
    # so it ends as it began.
    item = gl.program_id(0)
    running = True
    while running:
        running = item < items
        mbarrier.wait(item_empty.index(item_slot), item_parity ^ 1)
        item_s.index(item_slot).store(gl.full([1], gl.where(running, item, -1), gl.int32, one))
        warp_sync(item)
        mbarrier.arrive(item_full.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        if running:
            t, head = item_at(item, tiles, head_block, False)
            n, start_q, queries, start_k, keys = place_of(places, t, sq, sk, PACKED)
            b = head // kv_heads
            hk = head % kv_heads
            mbarrier.wait(k_empty, key_parity ^ 1)
            mbarrier.expect(k_full, PARTS * k_desc.block_type.nbytes)
            load_parts(
                k_desc, n * BN, b * stride_kb + hk * stride_kh, start_k, keys,
                k_full, k_s, 0, PARTS, PACKED,
            )  # fmt: skip
            mbarrier.wait(v_empty, key_parity ^ 1)
            mbarrier.expect(v_full, v_desc.block_type.nbytes)
            load_parts(
                v_desc, n * BN, b * stride_vb + hk * stride_vh, start_k, keys,
                v_full, v_s, 0, 1, PACKED,
            )  # fmt: skip
            key_parity ^= 1
            first, count = query_tiles_of(
                n, query_tiles, queries, keys, left, right, BM, BN, False, BAND
            )
            first_row = first_row_of(places, t, PACKED)
            for g in range(0, group):
                h = hk * group + g
                row = (head * group + g) * query_tiles + first_row
                q_column = b * stride_qb + h * stride_qh
                do_column = b * stride_gb + h * stride_gh
                for m in range(first, first + gl.maximum(count, 1)):
                    mbarrier.wait(q_empty.index(slot), parity ^ 1)
                    mbarrier.expect(
                        q_full.index(slot),
                        PARTS * q_desc.block_type.nbytes + shift_desc.block_type.nbytes,
                    )
                    load_parts(
                        q_desc, m * BM, q_column, start_q, queries,
                        q_full.index(slot), q_s, slot, PARTS, PACKED,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        shift_desc, [row + m, 0], q_full.index(slot), shift_s.index(slot)
                    )
                    mbarrier.wait(do_empty.index(slot), parity ^ 1)
                    mbarrier.expect(
                        do_full.index(slot),
                        do_desc.block_type.nbytes + delta_desc.block_type.nbytes,
                    )
                    load_parts(
                        do_desc, m * BM, do_column, start_q, queries,
                        do_full.index(slot), do_s, slot, 1, PACKED,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        delta_desc, [row + m, 0], do_full.index(slot), delta_s.index(slot)
                    )
                    slot, parity = advance(slot, parity, SLOTS)
            item = gl.num_programs(0) + next_item(counter, items - 1)


@gluon.jit(
    do_not_specialize=[
        "sq", "sk", "left", "right", "all_heads", "key_tiles", "query_tiles", "head_block",
        "kv_heads", "group",
    ]
)  # fmt: skip
def pair_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, dk_ptr, dv_ptr, counter, places,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads, group,
    unit, scale,
    D: gl.constexpr, SLOTS: gl.constexpr, N: gl.constexpr, BAND: gl.constexpr,
    PACKED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    COLUMNS: gl.constexpr = q_desc.block_type.shape[-1]
    DV: gl.constexpr = do_desc.block_type.shape[-1]
    PARTS: gl.constexpr = D // COLUMNS
    q_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, COLUMNS], dtype)
    do_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, DV], dtype)
    q_s = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, BM, COLUMNS], q_l)
    do_s = gl.allocate_shared_memory(dtype, [SLOTS, BM, DV], do_l)
    k_s = gl.allocate_shared_memory(dtype, [PARTS, BN, COLUMNS], q_l)
    v_s = gl.allocate_shared_memory(dtype, [1, BN, DV], do_l)
    shift_s = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, BM], shift_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, BM], delta_desc.layout)
    item_s = gl.allocate_shared_memory(gl.int32, [PAIR, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full, item_empty = new_barriers(1, PAIR), new_barriers(2, PAIR)
    k_full, k_empty = new_barriers(1, 1).index(0), new_barriers(2, 1).index(0)
    v_full, v_empty = new_barriers(1, 1).index(0), new_barriers(2, 1).index(0)
    q_full, q_empty = new_barriers(1, SLOTS), new_barriers(2, SLOTS)
    do_full, do_empty = new_barriers(1, SLOTS), new_barriers(2, SLOTS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                dk_ptr, dv_ptr, q_s, k_s, v_s, do_s, shift_s, delta_s, item_s, item_full, item_empty,
                k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty,
                counter, places, sq, sk, left, right, key_tiles, query_tiles, head_block, kv_heads,
                group, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
                unit, scale, 0, SLOTS, N, BAND, PACKED,
            )),
            (_consumer, (
                dk_ptr, dv_ptr, q_s, k_s, v_s, do_s, shift_s, delta_s, item_s, item_full, item_empty,
                k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty,
                counter, places, sq, sk, left, right, key_tiles, query_tiles, head_block, kv_heads,
                group, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
                unit, scale, 1, SLOTS, N, BAND, PACKED,
            )),
            (_producer, (
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, counter, places,
                q_s, k_s, v_s, do_s, shift_s, delta_s, item_s, item_full, item_empty,
                k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty,
                sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads, group,
                stride_qb, stride_qh, stride_kb, stride_kh,
                stride_vb, stride_vh, stride_gb, stride_gh, SLOTS, N, BAND, PACKED,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


__all__ = ["pair_kernel"]

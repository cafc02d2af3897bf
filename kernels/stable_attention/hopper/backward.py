"""The backward pass on sm_90: dK, dV and the float32 sum of dQ, in one persistent kernel.

Shape legend: B batch, H query heads, HK key/value heads, GROUP = H / HK, D head dim (of v too);
BM x BN tile of queries x keys. Scores are transposed, [keys, queries]. shift and delta are
[B * H * query tiles, BM] float32 (`rows`); sums of dQ [B * H * query tiles * BM, D] float32.

Five roles, each a partition of warps. The *producer* copies tiles to shared memory. Two *consumers*
of 4 warps have 64 keys of the key tile each: they make P and dS of a query tile and add to dV and
dK in registers. dS passes through a ring of two slots, because dQ of a query tile needs both
consumers' part; that product runs a tile late, so neither waits for the other. Half of it is each
consumer's, which leaves it in shared memory for the two *writers*: they add it to dQ's sums in
global memory by TMA, taking turns in the fixed order of `tiles.turn_of`. The first stores, so
nothing is cleared, and repeats are bitwise equal.

A slot of the rings is freed by both consumers, of the list of items by the writers too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stable_attention.hopper.barriers import (
    advance,
    pass_turn,
    tma_add,
    wait_for_turn,
)
from stable_attention.hopper.dropout import dropped, kept_bits
from stable_attention.hopper.producer import PAIR, backward_producer
from stable_attention.hopper.softmax import softened
from stable_attention.hopper.tiles import (
    batch_of,
    first_row_of,
    item_at,
    place_of,
    query_tiles_of,
    store_tile,
    turn_of,
    zeros_outside,
)


@gluon.jit
def _dq_product(ds, k_s, zero, W: gl.constexpr, BM: gl.constexpr, D: gl.constexpr):
    """Start this consumer's half of dS^T K: of the rows of 128 queries, of the columns else."""
    if BM == 128:
        part = ds.slice(W * 64, 64, dim=1).permute((1, 0))
        return warpgroup_mma(part, k_s, zero, use_acc=False, is_async=True)
    else:
        keys = k_s.slice(W * (D // 2), D // 2, dim=1)
        return warpgroup_mma(ds.permute((1, 0)), keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _hand_over(dq, dq_s, dq_full, dq_empty, slot, W: gl.constexpr):
    """Leave this consumer's half of a dQ tile to the writer of the slot."""
    mbarrier.wait(dq_empty, slot ^ 1)
    dq_s.index(W).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(slot), count=1)


@gluon.jit
def _store_part(place, x):
    """x [64, D] float32, whose lanes hold two neighbours, four of them a sector of 32 bytes."""
    like: gl.constexpr = x.type.layout
    rows = gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, like)), 1)
    columns = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, like)), 0)
    gl.store(place + (rows * x.shape[1] + columns), x)


@gluon.jit
def _step(
    dk, dv, s, slot, parity, m, n, last, sq, sk, left, right, unit, steepness,
    seed_ptr, head, batch, threshold, keep_scale,
    q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s,
    ds_full, ds_empty, dq_full, dq_empty, q_full, q_empty, do_full, do_empty,
    zero_s, zero_dq,
    W: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    CAPPED: gl.constexpr, BAND: gl.constexpr, DROPOUT: gl.constexpr, MASKED: gl.constexpr,
    FIRST: gl.constexpr, AHEAD: gl.constexpr, S_L: gl.constexpr, A_L: gl.constexpr,
):  # fmt: skip
    """Fold query tile m into dk and dv, and finish dQ of the tile before unless FIRST.

    AHEAD: s holds this tile's scores already, and the next tile's are made here, unless last.
    """
    dtype: gl.constexpr = q_s.dtype
    columns: gl.constexpr = gl.SliceLayout(0, S_L)
    k = k_s.slice(W * 64, 64)
    v = v_s.slice(W * 64, 64)
    if not AHEAD:
        mbarrier.wait(q_full.index(slot), parity)
        s_made = warpgroup_mma(
            k, q_s.index(slot).permute((1, 0)), zero_s, use_acc=False, is_async=True
        )
    mbarrier.wait(do_full.index(slot), parity)
    dp_made = warpgroup_mma(
        v, do_s.index(slot).permute((1, 0)), zero_s, use_acc=False, is_async=True
    )
    if not AHEAD:
        s, dp_made = warpgroup_mma_wait(1, deps=(s_made, dp_made))
    shift = shift_s.index(slot).reshape((BM,)).load(columns)
    s = softened(s, steepness, CAPPED)
    p = gl.exp2(s * unit - gl.expand_dims(shift, 0))
    if BAND:
        # Of the first query and this consumer's first key: which keys it may see.
        middle = m * BM + (sk - sq) - (n * BN + W * 64)
        to_right = middle + right
        to_left = middle - left
        end = sk - 1 - n * BN - W * 64
        if (gl.minimum(to_right, end) < 63) | (to_left + BM - 1 > 0):
            p = zeros_outside(p, to_right, to_left, end)
    elif MASKED:
        keys = gl.expand_dims(n * BN + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_L)), 1)
        visible = keys < sk
        if CAUSAL:
            visible = keys <= gl.expand_dims(m * BM + gl.arange(0, BM, columns), 0)
        p = gl.where(visible, p, 0.0)
    if DROPOUT:
        bits = kept_bits(seed_ptr, n * BN + W * 64, m * BM, head, batch, threshold, BM)
        p_rounded = gl.convert_layout(dropped(p, bits).to(dtype), A_L)
    else:
        p_rounded = gl.convert_layout(p.to(dtype), A_L)
    if CAPPED:
        # `numerics.score_slope`, before dP is there: s needs no registers any more.
        p = p * (1.0 - s * s)
    dv_made = warpgroup_mma(p_rounded, do_s.index(slot), dv, is_async=True)
    dp, dv = warpgroup_mma_wait(1, deps=(dp_made, dv_made))
    if DROPOUT:
        dp = dropped(dp * keep_scale, bits)
    delta = delta_s.index(slot).reshape((BM,)).load(columns)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
    mbarrier.wait(ds_empty.index(slot), parity ^ 1)
    ds_s.index(slot).slice(W * 64, 64).store(ds)
    ds_operand = gl.convert_layout(ds, A_L)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot), count=1)
    before = slot ^ 1
    if not FIRST:
        mbarrier.wait(ds_full.index(before), parity ^ before)
        dq_made = _dq_product(ds_s.index(before), k_s, zero_dq, W, BM, D)
    dk_made = warpgroup_mma(ds_operand, q_s.index(slot), dk, is_async=True)
    following, following_parity = advance(slot, parity, PAIR)
    if FIRST:
        dv, dk_made = warpgroup_mma_wait(1, deps=(dv, dk_made))
        mbarrier.arrive(do_empty.index(slot), count=1)
    else:
        dv, dq_made, dk_made = warpgroup_mma_wait(2, deps=(dv, dq_made, dk_made))
        mbarrier.arrive(do_empty.index(slot), count=1)
        dq, dk_made = warpgroup_mma_wait(1, deps=(dq_made, dk_made))
        mbarrier.arrive(ds_empty.index(before), count=1)
        _hand_over(dq, dq_s, dq_full, dq_empty, before, W)
    if AHEAD:
        mbarrier.wait(q_full.index(following), following_parity, pred=last == 0)
        # After the last tile this is a product of what lies there, which nobody reads.
        s_made = warpgroup_mma(
            k, q_s.index(following).permute((1, 0)), zero_s, use_acc=False, is_async=True
        )
        dk, s_made = warpgroup_mma_wait(1, deps=(dk_made, s_made))
        mbarrier.arrive(q_empty.index(slot), count=1)
        s = warpgroup_mma_wait(0, deps=(s_made,))
    else:
        dk = warpgroup_mma_wait(0, deps=(dk_made,))
        mbarrier.arrive(q_empty.index(slot), count=1)
    return dk, dv, s, following, following_parity


@gluon.jit
def _consumer(
    dk_desc, dv_desc, q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s, out_s, item_s,
    item_full, item_empty, k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty,
    ds_full, ds_empty, dq_full, dq_empty,
    counter, places, part_ptr, sq, sk, left, right, all_heads, key_tiles, query_tiles,
    head_block, kv_heads, stride_dkb, stride_dkh, stride_dvb, stride_dvh, unit,
    steepness, scale, seed_ptr, threshold, batch_offset, head_offset, keep_scale,
    W: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    CAPPED: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr, DROPOUT: gl.constexpr,
    EVEN: gl.constexpr, GROUP: gl.constexpr, SUMS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    DQ: gl.constexpr = D if BM == 128 else D // 2
    # Query tiles that the diagonal crosses. Keys past the end lie in the last key tile only, and a
    # causal mask hides them from its few query tiles; without one, all of them look.
    EDGE: gl.constexpr = BN // BM if CAUSAL else 0
    TAIL: gl.constexpr = not (EVEN or CAUSAL or BAND)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    KV_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DQ, 16]
    )
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV_L, k_width=2)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero_s = gl.zeros([64, BM], gl.float32, S_L)
    zero_dq = gl.zeros([64, DQ], gl.float32, DQ_L)
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
            place, head = item_at(item, tiles, head_block, CAUSAL or BAND)
            n, _, queries, start_k, keys = place_of(places, place, sq, sk, PACKED)
            first, count = query_tiles_of(
                n, query_tiles, queries, keys, left, right, BM, BN, CAUSAL, BAND
            )
            if BAND:
                # Keys that no query sees meet a tile whose P is 0.
                count = gl.maximum(count, 1)
            head_0 = 0
            batch = 0
            if DROPOUT:
                head_0 = (head % kv_heads) * GROUP + head_offset
                batch = batch_of(places, place, head // kv_heads, PACKED) + batch_offset
            dk = gl.zeros([64, D], gl.float32, KV_L)
            dv = gl.zeros([64, D], gl.float32, KV_L)
            mbarrier.wait(k_full, key_parity)
            s = zero_s
            if AHEAD:
                mbarrier.wait(q_full.index(slot), parity)
                s = warpgroup_mma(
                    k_s.slice(W * 64, 64), q_s.index(slot).permute((1, 0)), zero_s,
                    use_acc=False, is_async=False,
                )  # fmt: skip
            mbarrier.wait(v_full, key_parity)
            key_parity ^= 1
            dk, dv, s, slot, parity = _step(
                dk, dv, s, slot, parity, first, n, gl.where(count * GROUP == 1, 1, 0),
                queries, keys, left, right, unit, steepness,
                seed_ptr, head_0, batch, threshold, keep_scale,
                q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s,
                ds_full, ds_empty, dq_full, dq_empty, q_full, q_empty, do_full, do_empty,
                zero_s, zero_dq, W, BM, BN, D, CAUSAL, CAPPED, BAND, DROPOUT,
                CAUSAL or TAIL, True, AHEAD, S_L, A_L,
            )  # fmt: skip
            for g in range(0, GROUP):
                begin = gl.where(g == 0, 1, 0)
                if CAUSAL:
                    if EDGE > 1 or GROUP > 1:
                        for t in range(begin, gl.minimum(EDGE, count)):
                            last = gl.where((t + 1 == count) & (g + 1 == GROUP), 1, 0)
                            dk, dv, s, slot, parity = _step(
                                dk, dv, s, slot, parity, first + t, n, last,
                                queries, keys, left, right, unit, steepness,
                                seed_ptr, head_0 + g, batch, threshold, keep_scale,
                                q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s,
                                ds_full, ds_empty, dq_full, dq_empty,
                                q_full, q_empty, do_full, do_empty,
                                zero_s, zero_dq, W, BM, BN, D, CAUSAL, CAPPED, BAND, DROPOUT,
                                True, False, AHEAD, S_L, A_L,
                            )  # fmt: skip
                    begin = EDGE
                for t in range(begin, count):
                    last = gl.where((t + 1 == count) & (g + 1 == GROUP), 1, 0)
                    dk, dv, s, slot, parity = _step(
                        dk, dv, s, slot, parity, first + t, n, last,
                        queries, keys, left, right, unit, steepness,
                        seed_ptr, head_0 + g, batch, threshold, keep_scale,
                        q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s,
                        ds_full, ds_empty, dq_full, dq_empty, q_full, q_empty, do_full, do_empty,
                        zero_s, zero_dq, W, BM, BN, D, CAUSAL, CAPPED, BAND, DROPOUT,
                        TAIL, False, AHEAD, S_L, A_L,
                    )  # fmt: skip
            mbarrier.arrive(v_empty, count=1)
            if DROPOUT:
                dv = dv * keep_scale
            b = head // kv_heads
            hk = head % kv_heads
            row = n * BN + W * 64
            out = out_s.index(W)
            before = slot ^ 1
            mbarrier.wait(ds_full.index(before), parity ^ before)
            dq_made = _dq_product(ds_s.index(before), k_s, zero_dq, W, BM, D)
            if SUMS:
                own = part_ptr + ((head * key_tiles + place) * BN + W * 64).to(gl.int64) * D
                _store_part(own + key_tiles.to(gl.int64) * all_heads * (BN * D), dv)
            else:
                tma.store_wait(0)
                out.store(dv.to(out.dtype))
                fence_async_shared()
                column = b * stride_dvb + hk * stride_dvh
                store_tile(dv_desc, row, column, start_k, keys, out, PACKED)
            dq = warpgroup_mma_wait(0, deps=(dq_made,))
            mbarrier.arrive(ds_empty.index(before), count=1)
            mbarrier.arrive(k_empty, count=1)
            _hand_over(dq, dq_s, dq_full, dq_empty, before, W)
            if SUMS:
                _store_part(own, dk)
            else:
                rounded = (dk * scale).to(out.dtype)
                tma.store_wait(0)
                out.store(rounded)
                fence_async_shared()
                column = b * stride_dkb + hk * stride_dkh
                store_tile(dk_desc, row, column, start_k, keys, out, PACKED)
    tma.store_wait(0)


@gluon.jit
def _writer(
    sum_desc, turns, counter, places, dq_s, item_s, item_full, item_empty, dq_full, dq_empty,
    sq, sk, left, right, key_tiles, query_tiles, head_block,
    W: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, DQ: gl.constexpr, CAUSAL: gl.constexpr,
    BAND: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Every second dQ tile: await the turn, store or add, free the buffer once it has been read,
    pass the turn on once all is written."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    if PACKED:
        key_tiles = gl.load(counter + 2)
    done = 0  # tiles of the items before
    item_slot = 0
    item_parity = 0
    running = True
    while running:
        mbarrier.wait(item_full.index(item_slot), item_parity)
        item = gl.max(item_s.index(item_slot).load(one), 0)
        mbarrier.arrive(item_empty.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        running = item >= 0
        if running:
            t, head = item_at(item, key_tiles, head_block, CAUSAL or BAND)
            n, _, queries, _, keys = place_of(places, t, sq, sk, PACKED)
            first_row = first_row_of(places, t, PACKED)
            first, seen = query_tiles_of(
                n, query_tiles, queries, keys, left, right, BM, BN, CAUSAL, BAND
            )
            count = gl.maximum(seen, 1)
            for u in range((W + done) & 1, count * GROUP, 2):
                number = done + u
                m = first + u % count
                tile = (head * GROUP + u // count) * query_tiles + first_row + m
                turn = turn_of(m, n, queries, keys, right, BM, BN, CAUSAL, BAND)
                if BAND:
                    turn = gl.where(seen > 0, turn, -1)
                wait_for_turn(turns + tile, turn)
                mbarrier.wait(dq_full.index(number & 1), (number >> 1) & 1)
                row = tile * BM
                second_row = row
                column = DQ
                if BM == 128:
                    second_row = row + 64
                    column = 0
                if turn == 0:
                    tma.async_copy_shared_to_global(sum_desc, [row, 0], dq_s.index(0))
                    tma.async_copy_shared_to_global(sum_desc, [second_row, column], dq_s.index(1))
                elif turn > 0:  # not of keys that no query sees
                    tma_add(sum_desc, [row, 0], dq_s.index(0))
                    tma_add(sum_desc, [second_row, column], dq_s.index(1))
                tma.store_wait(0)
                mbarrier.arrive(dq_empty, count=1)
                if turn >= 0:
                    pass_turn(turns + tile)
            done += count * GROUP
    tma.store_wait(0)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, SLOTS: gl.constexpr):
    """A barrier for each slot, which COUNT arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit(
    do_not_specialize=[
        "sq", "sk", "left", "right", "all_heads", "key_tiles", "query_tiles", "head_block",
        "kv_heads", "threshold", "batch_offset", "head_offset",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, dk_desc, dv_desc, sum_desc,
    turns, counter, places, part_ptr, seed_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    stride_dkb, stride_dkh, stride_dvb, stride_dvh,
    sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads, unit,
    steepness, scale, threshold, batch_offset, head_offset, keep_scale,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    CAPPED: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr, DROPOUT: gl.constexpr,
    EVEN: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr, SUMS: gl.constexpr,
    AHEAD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    DQ: gl.constexpr = D if BM == 128 else D // 2
    # A ragged descriptor's tile has two dimensions more.
    tile_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    q_s = gl.allocate_shared_memory(dtype, [PAIR, BM, D], tile_l)
    do_s = gl.allocate_shared_memory(dtype, [PAIR, BM, D], tile_l)
    k_s = gl.allocate_shared_memory(dtype, [BN, D], tile_l)
    v_s = gl.allocate_shared_memory(dtype, [BN, D], tile_l)
    shift_s = gl.allocate_shared_memory(gl.float32, [PAIR, 1, BM], shift_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [PAIR, 1, BM], delta_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    ds_s = gl.allocate_shared_memory(dtype, [PAIR, BN, BM], ds_layout)
    out_s = gl.allocate_shared_memory(dtype, [2, 64, D], tile_l)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 64, DQ], sum_desc.layout)
    item_s = gl.allocate_shared_memory(gl.int32, [PAIR, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = new_barriers(1, PAIR)
    item_empty = new_barriers(4, PAIR)
    k_fulls = new_barriers(1, 1)
    k_empties = new_barriers(2, 1)
    v_fulls = new_barriers(1, 1)
    v_empties = new_barriers(2, 1)
    q_full = new_barriers(1, PAIR)
    q_empty = new_barriers(2, PAIR)
    do_full = new_barriers(1, PAIR)
    do_empty = new_barriers(2, PAIR)
    ds_full = new_barriers(2, PAIR)
    ds_empty = new_barriers(2, PAIR)
    dq_full = new_barriers(2, PAIR)
    dq_empties = new_barriers(1, 1)
    k_full = k_fulls.index(0)
    k_empty = k_empties.index(0)
    v_full = v_fulls.index(0)
    v_empty = v_empties.index(0)
    dq_empty = dq_empties.index(0)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                dk_desc, dv_desc, q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s, out_s, item_s,
                item_full, item_empty, k_full, k_empty, v_full, v_empty,
                q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty,
                counter, places, part_ptr, sq, sk, left, right, all_heads, key_tiles, query_tiles,
                head_block, kv_heads, stride_dkb, stride_dkh, stride_dvb, stride_dvh, unit,
                steepness, scale, seed_ptr, threshold, batch_offset, head_offset, keep_scale,
                0, BM, BN, D, CAUSAL, CAPPED, BAND, PACKED, DROPOUT, EVEN, GROUP, SUMS, AHEAD,
            )),
            (_consumer, (
                dk_desc, dv_desc, q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s, out_s, item_s,
                item_full, item_empty, k_full, k_empty, v_full, v_empty,
                q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty,
                counter, places, part_ptr, sq, sk, left, right, all_heads, key_tiles, query_tiles,
                head_block, kv_heads, stride_dkb, stride_dkh, stride_dvb, stride_dvh, unit,
                steepness, scale, seed_ptr, threshold, batch_offset, head_offset, keep_scale,
                1, BM, BN, D, CAUSAL, CAPPED, BAND, PACKED, DROPOUT, EVEN, GROUP, SUMS, AHEAD,
            )),
            (backward_producer, (
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, counter, places,
                q_s, k_s, v_s, do_s, shift_s, delta_s, item_s,
                item_full, item_empty, k_full, k_empty, v_full, v_empty,
                q_full, q_empty, do_full, do_empty,
                sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads,
                stride_qb, stride_qh, stride_kb, stride_kh,
                stride_vb, stride_vh, stride_gb, stride_gh,
                BM, BN, CAUSAL, BAND, PACKED, GROUP, SPLITS,
            )),
            (_writer, (
                sum_desc, turns, counter, places, dq_s, item_s, item_full, item_empty,
                dq_full, dq_empty, sq, sk, left, right, key_tiles, query_tiles, head_block,
                0, BM, BN, DQ, CAUSAL, BAND, PACKED, GROUP,
            )),
            (_writer, (
                sum_desc, turns, counter, places, dq_s, item_s, item_full, item_empty,
                dq_full, dq_empty, sq, sk, left, right, key_tiles, query_tiles, head_block,
                1, BM, BN, DQ, CAUSAL, BAND, PACKED, GROUP,
            )),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )  # fmt: skip


__all__ = ["backward_kernel", "new_barriers"]

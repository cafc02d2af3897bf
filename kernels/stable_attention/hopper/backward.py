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

A slot of the rings is freed by both consumers, of the list of items by the writers too. Under
PROJECT a *follower* is the sixth role: it finds a key of the largest dS of rows (`excess`).
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

from stable_attention.hopper import bundles
from stable_attention.hopper.barriers import (
    advance,
    new_barriers,
    pass_turn,
    tma_add,
    wait_for_turn,
)
from stable_attention.hopper.dropout import dropped, kept_bits
from stable_attention.hopper.excess import ONES, follower, row_sums
from stable_attention.hopper.producer import PAIR, backward_producer
from stable_attention.hopper.softmax import product_layout, softened
from stable_attention.hopper.tiles import (
    ONE_PLANE,
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
def _dq_product(ds, k_s, W: gl.constexpr, T: gl.constexpr):
    """Start this consumer's half of dS^T K: of the rows of 128 queries, of the columns else."""
    HALF: gl.constexpr = T.D // 2
    if T.BM == 128:
        zero = gl.zeros([64, T.D], gl.float32, product_layout(T.D))
        part = ds.slice(W * 64, 64, dim=1).permute((1, 0))
        return warpgroup_mma(part, k_s, zero, use_acc=False, is_async=True)
    else:
        zero = gl.zeros([64, HALF], gl.float32, product_layout(HALF))
        keys = k_s.slice(W * HALF, HALF, dim=1)
        return warpgroup_mma(ds.permute((1, 0)), keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _hand_over(dq, of_rows, ring, excess, slot, W: gl.constexpr, T: gl.constexpr):
    """Leave this consumer's half of a dQ tile, and sums of rows [64, 8], to the slot's writer."""
    mbarrier.wait(ring.empty, slot ^ 1)
    ring.slots.index(W).store(dq)
    if _sums_rows(W, T):
        place = excess.sums.reshape((T.BM,))
        if T.BM == 128:
            place = place.slice(W * 64, 64)
        place.store(gl.max(of_rows, 1))
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot), count=1)


@gluon.constexpr_function
def _sums_rows(W, T):
    """Whether rows of dQ that this consumer makes are its own."""
    return T.PROJECT and (T.BM == 128 or W == 0)


@gluon.jit
def _store_part(place, x):
    """x [64, D] float32, whose lanes hold two neighbours, four of them a sector of 32 bytes."""
    like: gl.constexpr = x.type.layout
    rows = gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, like)), 1)
    columns = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, like)), 0)
    gl.store(place + (rows * x.shape[1] + columns), x)


@gluon.jit
def _step(
    state, t, g, item, items, softmax, drop, smem, excess,
    MASKED: gl.constexpr, FIRST: gl.constexpr, W: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Fold query tile t of head g of an item into state, and finish dQ of the tile before unless
    FIRST.

    state: (slot of the rings, its parity, dk, dv, s). s [64 keys, BM]: this tile's scores where
    they are made AHEAD; the next tile's are made here.
    """
    slot, parity, dk, dv, s = state
    S_L: gl.constexpr = product_layout(T.BM)
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product_layout(T.D), k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, S_L)
    SUMMED: gl.constexpr = _sums_rows(W, T)
    q_s, do_s, ds_s = smem.q.slots, smem.do.slots, smem.ds.slots
    dtype: gl.constexpr = q_s.dtype
    zero_s = gl.zeros([64, T.BM], gl.float32, S_L)
    if FIRST:
        last = gl.where(item.count * T.GROUP == 1, 1, 0)
    else:
        last = gl.where((t + 1 == item.count) & (g + 1 == T.GROUP), 1, 0)
    m = item.first + t
    head = item.head + g
    k = smem.k.slots.slice(W * 64, 64)
    v = smem.v.slots.slice(W * 64, 64)
    if not T.AHEAD:
        mbarrier.wait(smem.q.full.index(slot), parity)
        s_made = warpgroup_mma(
            k, q_s.index(slot).permute((1, 0)), zero_s, use_acc=False, is_async=True
        )
    mbarrier.wait(smem.do.full.index(slot), parity)
    dp_made = warpgroup_mma(
        v, do_s.index(slot).permute((1, 0)), zero_s, use_acc=False, is_async=True
    )
    if not T.AHEAD:
        s, dp_made = warpgroup_mma_wait(1, deps=(s_made, dp_made))
    shift_s = smem.shift.index(slot)
    if not T.PROJECT:
        shift = shift_s.reshape((T.BM,)).load(columns)
    s = softened(s, softmax.steepness, T.CAPPED)
    if T.PROJECT:
        planes = shift_s.reshape((2 * T.BM,))
        x = s * softmax.unit - gl.expand_dims(planes.slice(0, T.BM).load(columns), 0)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        if gl.max(planes.slice(T.BM, 1).load(one), 0) < ONE_PLANE:  # else one plane is enough
            x = x - gl.expand_dims(planes.slice(T.BM, T.BM).load(columns), 0)
        p = gl.exp2(x)
    else:
        p = gl.exp2(s * softmax.unit - gl.expand_dims(shift, 0))
    if T.BAND:
        # Of the first query and this consumer's first key: which keys it may see.
        middle = m * T.BM + (item.keys - item.queries) - (item.n * T.BN + W * 64)
        to_right = middle + items.right
        to_left = middle - items.left
        end = item.keys - 1 - item.n * T.BN - W * 64
        if (gl.minimum(to_right, end) < 63) | (to_left + T.BM - 1 > 0):
            p = zeros_outside(p, to_right, to_left, end)
    elif MASKED:
        keys = item.n * T.BN + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, S_L))
        keys = gl.expand_dims(keys, 1)
        visible = keys < item.keys
        if T.CAUSAL:
            visible = keys <= gl.expand_dims(m * T.BM + gl.arange(0, T.BM, columns), 0)
        p = gl.where(visible, p, 0.0)
    if T.DROPOUT:
        key = item.n * T.BN + W * 64
        bits = kept_bits(drop.seed_ptr, key, m * T.BM, head, item.batch, drop.threshold, T.BM)
        p_rounded = gl.convert_layout(dropped(p, bits).to(dtype), A_L)
    else:
        p_rounded = gl.convert_layout(p.to(dtype), A_L)
    if T.CAPPED:
        # `numerics.score_slope`, before dP is there: s needs no registers any more.
        p = p * (1.0 - s * s)
    dv_made = warpgroup_mma(p_rounded, do_s.index(slot), dv, is_async=True)
    dp, dv = warpgroup_mma_wait(1, deps=(dp_made, dv_made))
    if T.DROPOUT:
        dp = dropped(dp * drop.keep_scale, bits)
    delta = smem.delta.index(slot).reshape((T.BM,)).load(columns)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
    mbarrier.wait(smem.ds.empty.index(slot), parity ^ 1)
    ds_s.index(slot).slice(W * 64, 64).store(ds)
    if T.PROJECT and T.AHEAD:
        # Readers of dS have the registers that it would take; by the arrival all of it lies there.
        ds_operand = ds_s.index(slot).slice(W * 64, 64)
    else:
        ds_operand = gl.convert_layout(ds, A_L)
    fence_async_shared()
    mbarrier.arrive(smem.ds.full.index(slot), count=1)
    before = slot ^ 1
    if not FIRST:
        mbarrier.wait(smem.ds.full.index(before), parity ^ before)
        sums_made = None
        if SUMMED:
            sums_made = row_sums(ds_s.index(before), excess.ones, W, T)
        dq_made = _dq_product(ds_s.index(before), smem.k.slots, W, T)
    dk_made = warpgroup_mma(ds_operand, q_s.index(slot), dk, is_async=True)
    following, following_parity = advance(slot, parity, PAIR)
    if FIRST:
        dv, dk_made = warpgroup_mma_wait(1, deps=(dv, dk_made))
        mbarrier.arrive(smem.do.empty.index(slot), count=1)
    else:
        sums = None
        if SUMMED:
            dv, sums_made, dq_made, dk_made = warpgroup_mma_wait(
                2 + T.BN // ONES, deps=(dv, sums_made, dq_made, dk_made)
            )
        else:
            dv, dq_made, dk_made = warpgroup_mma_wait(2, deps=(dv, dq_made, dk_made))
        mbarrier.arrive(smem.do.empty.index(slot), count=1)
        if SUMMED:
            sums, dq, dk_made = warpgroup_mma_wait(1, deps=(sums_made, dq_made, dk_made))
        else:
            dq, dk_made = warpgroup_mma_wait(1, deps=(dq_made, dk_made))
        mbarrier.arrive(smem.ds.empty.index(before), count=1)
        _hand_over(dq, sums, smem.dq, excess, before, W, T)
    if T.AHEAD:
        mbarrier.wait(smem.q.full.index(following), following_parity, pred=last == 0)
        # After the last tile this is a product of what lies there, which nobody reads.
        s_made = warpgroup_mma(
            k, q_s.index(following).permute((1, 0)), zero_s, use_acc=False, is_async=True
        )
        dk, s_made = warpgroup_mma_wait(1, deps=(dk_made, s_made))
        mbarrier.arrive(smem.q.empty.index(slot), count=1)
        s = warpgroup_mma_wait(0, deps=(s_made,))
    else:
        dk = warpgroup_mma_wait(0, deps=(dk_made,))
        mbarrier.arrive(smem.q.empty.index(slot), count=1)
    return following, following_parity, dk, dv, s


@gluon.jit
def _consumer(gradients, smem, excess, items, softmax, drop, W: gl.constexpr, T: gl.constexpr):
    """dK and dV of 64 keys of every item, and this consumer's half of dQ's products."""
    # Query tiles that the diagonal crosses. Keys past the end lie in the last key tile only, and a
    # causal mask hides them from its few query tiles; without one, all of them look.
    EDGE: gl.constexpr = T.BN // T.BM if T.CAUSAL else 0
    TAIL: gl.constexpr = not (T.EVEN or T.CAUSAL or T.BAND)
    S_L: gl.constexpr = product_layout(T.BM)
    KV_L: gl.constexpr = product_layout(T.D)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = 0
    parity = 0
    item_slot = 0
    item_parity = 0
    key_parity = 0
    tiles = items.key_tiles
    if T.PACKED:
        tiles = gl.load(items.counter + 2)
    running = True
    while running:
        mbarrier.wait(smem.item.full.index(item_slot), item_parity)
        number = gl.max(smem.item.slots.index(item_slot).load(one), 0)
        mbarrier.arrive(smem.item.empty.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        running = number >= 0
        if running:
            place, head = item_at(number, tiles, items.head_block, T.CAUSAL or T.BAND)
            n, _, queries, start_k, keys = place_of(
                items.places, place, items.sq, items.sk, T.PACKED
            )
            first, count = query_tiles_of(
                n, items.query_tiles, queries, keys, items.left, items.right,
                T.BM, T.BN, T.CAUSAL, T.BAND,
            )  # fmt: skip
            if T.BAND:
                # Keys that no query sees meet a tile whose P is 0.
                count = gl.maximum(count, 1)
            head_0 = 0
            batch = 0
            if T.DROPOUT:
                head_0 = (head % items.heads) * T.GROUP + drop.head_offset
                batch = batch_of(items.places, place, head // items.heads, T.PACKED)
                batch += drop.batch_offset
            item = bundles.Item(n, first, count, queries, keys, head_0, batch)
            dk = gl.zeros([64, T.D], gl.float32, KV_L)
            dv = gl.zeros([64, T.D], gl.float32, KV_L)
            mbarrier.wait(smem.k.full, key_parity)
            s = gl.zeros([64, T.BM], gl.float32, S_L)
            if T.AHEAD:
                mbarrier.wait(smem.q.full.index(slot), parity)
                s = warpgroup_mma(
                    smem.k.slots.slice(W * 64, 64), smem.q.slots.index(slot).permute((1, 0)),
                    s, use_acc=False, is_async=False,
                )  # fmt: skip
            mbarrier.wait(smem.v.full, key_parity)
            key_parity ^= 1
            state = _step(
                (slot, parity, dk, dv, s), 0, 0, item, items, softmax, drop, smem, excess,
                T.CAUSAL or TAIL, True, W, T,
            )  # fmt: skip
            for g in range(0, T.GROUP):
                begin = gl.where(g == 0, 1, 0)
                if T.CAUSAL:
                    if EDGE > 1 or T.GROUP > 1:
                        for t in range(begin, gl.minimum(EDGE, count)):
                            state = _step(
                                state, t, g, item, items, softmax, drop, smem, excess,
                                True, False, W, T,
                            )  # fmt: skip
                    begin = EDGE
                for t in range(begin, count):
                    state = _step(
                        state, t, g, item, items, softmax, drop, smem, excess, TAIL, False, W, T
                    )
            slot, parity, dk, dv, _ = state
            mbarrier.arrive(smem.v.empty, count=1)
            if T.DROPOUT:
                dv = dv * drop.keep_scale
            b = head // items.heads
            hk = head % items.heads
            row = n * T.BN + W * 64
            out = smem.out.index(W)
            before = slot ^ 1
            mbarrier.wait(smem.ds.full.index(before), parity ^ before)
            sums = None
            if _sums_rows(W, T):
                sums = row_sums(smem.ds.slots.index(before), excess.ones, W, T)
            dq_made = _dq_product(smem.ds.slots.index(before), smem.k.slots, W, T)
            if T.SUMS:
                own = ((head * items.key_tiles + place) * T.BN + W * 64).to(gl.int64) * T.D
                own = gradients.part_ptr + own
                of_v = items.key_tiles.to(gl.int64) * items.all_heads * (T.BN * T.D)
                _store_part(own + of_v, dv)
            else:
                tma.store_wait(0)
                out.store(dv.to(out.dtype))
                fence_async_shared()
                column = b * gradients.dv.stride_b + hk * gradients.dv.stride_h
                store_tile(gradients.dv.desc, row, column, start_k, keys, out, T.PACKED)
            if _sums_rows(W, T):
                sums, dq = warpgroup_mma_wait(0, deps=(sums, dq_made))
            else:
                dq = warpgroup_mma_wait(0, deps=(dq_made,))
            mbarrier.arrive(smem.ds.empty.index(before), count=1)
            mbarrier.arrive(smem.k.empty, count=1)
            _hand_over(dq, sums, smem.dq, excess, before, W, T)
            if T.SUMS:
                _store_part(own, dk)
            else:
                rounded = (dk * gradients.scale).to(out.dtype)
                tma.store_wait(0)
                out.store(rounded)
                fence_async_shared()
                column = b * gradients.dk.stride_b + hk * gradients.dk.stride_h
                store_tile(gradients.dk.desc, row, column, start_k, keys, out, T.PACKED)
    tma.store_wait(0)


@gluon.jit
def _writer(sum_desc, excess, turns, smem, items, W: gl.constexpr, T: gl.constexpr):
    """Every second dQ tile: await the turn, store or add, free the buffer once it has been read,
    pass the turn on once all is written."""
    dq_s = smem.dq.slots
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    key_tiles = items.key_tiles
    if T.PACKED:
        key_tiles = gl.load(items.counter + 2)
    done = 0  # tiles of the items before
    item_slot = 0
    item_parity = 0
    running = True
    while running:
        mbarrier.wait(smem.item.full.index(item_slot), item_parity)
        number = gl.max(smem.item.slots.index(item_slot).load(one), 0)
        mbarrier.arrive(smem.item.empty.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        running = number >= 0
        if running:
            t, head = item_at(number, key_tiles, items.head_block, T.CAUSAL or T.BAND)
            n, _, queries, _, keys = place_of(items.places, t, items.sq, items.sk, T.PACKED)
            first_row = first_row_of(items.places, t, T.PACKED)
            first, seen = query_tiles_of(
                n, items.query_tiles, queries, keys, items.left, items.right,
                T.BM, T.BN, T.CAUSAL, T.BAND,
            )  # fmt: skip
            count = gl.maximum(seen, 1)
            for u in range((W + done) & 1, count * T.GROUP, 2):
                number = done + u
                m = first + u % count
                tile = (head * T.GROUP + u // count) * items.query_tiles + first_row + m
                turn = turn_of(m, n, queries, keys, items.right, T.BM, T.BN, T.CAUSAL, T.BAND)
                if T.BAND:
                    turn = gl.where(seen > 0, turn, -1)
                wait_for_turn(turns + tile, turn)
                mbarrier.wait(smem.dq.full.index(number & 1), (number >> 1) & 1)
                row = tile * T.BM
                second_row = row
                column = T.D // 2
                if T.BM == 128:
                    second_row = row + 64
                    column = 0
                if T.PROJECT:
                    if turn == 0:
                        tma.async_copy_shared_to_global(excess.sum_desc, [tile, 0], excess.sums)
                    elif turn > 0:
                        tma_add(excess.sum_desc, [tile, 0], excess.sums)
                if turn == 0:
                    tma.async_copy_shared_to_global(sum_desc, [row, 0], dq_s.index(0))
                    tma.async_copy_shared_to_global(sum_desc, [second_row, column], dq_s.index(1))
                elif turn > 0:  # not of keys that no query sees
                    tma_add(sum_desc, [row, 0], dq_s.index(0))
                    tma_add(sum_desc, [second_row, column], dq_s.index(1))
                tma.store_wait(0)
                mbarrier.arrive(smem.dq.empty, count=1)
                if turn >= 0:
                    pass_turn(turns + tile)
            done += count * T.GROUP
    tma.store_wait(0)


@gluon.jit
def _ring(slots, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """PAIR slots, which FULL and EMPTY arrivals make so."""
    return bundles.Ring(slots, new_barriers(FULL, PAIR), new_barriers(EMPTY, PAIR))


@gluon.jit
def _one_slot(tile):
    """The same of a tile that the producer copies for both consumers."""
    return bundles.Ring(tile, new_barriers(1, 1).index(0), new_barriers(2, 1).index(0))


@gluon.jit
def _new_memory(inputs, sum_desc, T: gl.constexpr):
    dtype: gl.constexpr = inputs.q.desc.dtype
    DQ: gl.constexpr = T.D if T.BM == 128 else T.D // 2
    # A ragged descriptor's tile has two dimensions more.
    tile_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, T.D], dtype)
    q_s = gl.allocate_shared_memory(dtype, [PAIR, T.BM, T.D], tile_l)
    do_s = gl.allocate_shared_memory(dtype, [PAIR, T.BM, T.D], tile_l)
    k_s = gl.allocate_shared_memory(dtype, [T.BN, T.D], tile_l)
    v_s = gl.allocate_shared_memory(dtype, [T.BN, T.D], tile_l)
    rows: gl.constexpr = inputs.shift_desc.layout
    shift_s = gl.allocate_shared_memory(gl.float32, [PAIR, 1, (2 if T.PROJECT else 1) * T.BM], rows)
    delta_s = gl.allocate_shared_memory(gl.float32, [PAIR, 1, T.BM], inputs.delta_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T.BN, T.BM], dtype)
    ds_s = gl.allocate_shared_memory(dtype, [PAIR, T.BN, T.BM], ds_layout)
    out_s = gl.allocate_shared_memory(dtype, [2, 64, T.D], tile_l)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 64, DQ], sum_desc.layout)
    item_s = gl.allocate_shared_memory(gl.int32, [PAIR, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return bundles.BackwardMemory(
        item=_ring(item_s, 1, 5 if T.PROJECT else 4), k=_one_slot(k_s), v=_one_slot(v_s),
        q=_ring(q_s, 1, 2), do=_ring(do_s, 1, 2), ds=_ring(ds_s, 2, 3 if T.PROJECT else 2),
        dq=bundles.Ring(dq_s, new_barriers(2, PAIR), new_barriers(1, 1).index(0)),
        shift=shift_s, delta=delta_s, out=out_s,
    )  # fmt: skip


@gluon.jit
def _new_excess(sum_desc, rank_ptr, dtype: gl.constexpr, T: gl.constexpr):
    sums_s = gl.allocate_shared_memory(gl.float32, [1, T.BM], sum_desc.layout)
    ones_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, ONES], dtype)
    ones_s = gl.allocate_shared_memory(dtype, [8, ONES], ones_l)
    ones_s.store(gl.full([8, ONES], 1.0, dtype, gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])))
    return bundles.Excess(sum_desc, rank_ptr, sums_s, ones_s)


@gluon.jit(
    do_not_specialize=[
        "sq", "sk", "left", "right", "all_heads", "key_tiles", "query_tiles", "head_block",
        "kv_heads", "threshold", "batch_offset", "head_offset",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, dk_desc, dv_desc, sum_desc,
    excess_desc, rank_ptr, turns, counter, places, part_ptr, seed_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    stride_dkb, stride_dkh, stride_dvb, stride_dvh,
    sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads, unit,
    steepness, scale, threshold, batch_offset, head_offset, keep_scale,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    CAPPED: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr, DROPOUT: gl.constexpr,
    EVEN: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr, SUMS: gl.constexpr,
    AHEAD: gl.constexpr, PROJECT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    T: gl.constexpr = bundles.BackwardTraits(
        BM, BN, D, GROUP, SPLITS, CAUSAL, BAND, PACKED, EVEN, CAPPED, DROPOUT, SUMS, AHEAD, PROJECT
    )
    items = bundles.Items(
        counter, places, sq, sk, left, right,
        query_tiles, key_tiles, head_block, all_heads, kv_heads,
    )  # fmt: skip
    inputs = bundles.Inputs(
        bundles.Tiled(q_desc, stride_qb, stride_qh),
        bundles.Tiled(k_desc, stride_kb, stride_kh),
        bundles.Tiled(v_desc, stride_vb, stride_vh),
        bundles.Tiled(do_desc, stride_gb, stride_gh),
        shift_desc,
        delta_desc,
    )
    gradients = bundles.Gradients(
        bundles.Tiled(dk_desc, stride_dkb, stride_dkh),
        bundles.Tiled(dv_desc, stride_dvb, stride_dvh),
        part_ptr,
        scale,
    )
    softmax = bundles.Softmax(unit, steepness)
    drop = bundles.Dropout(seed_ptr, threshold, batch_offset, head_offset, keep_scale)
    smem = _new_memory(inputs, sum_desc, T)
    if PROJECT:
        excess = _new_excess(excess_desc, rank_ptr, q_desc.dtype, T)
        fence_async_shared()
        SMALL: gl.constexpr = 504 - 2 * REGISTERS  # what consumers leave to each of the others
        gl.warp_specialize(
            [
                (_consumer, (gradients, smem, excess, items, softmax, drop, 0, T)),
                (_consumer, (gradients, smem, excess, items, softmax, drop, 1, T)),
                (backward_producer, (inputs, smem, items, T)),
                (_writer, (sum_desc, excess, turns, smem, items, 0, T)),
                (_writer, (sum_desc, excess, turns, smem, items, 1, T)),
                (follower, (excess, smem, items, T)),
            ],
            [4, 1, 1, 1, 1],
            [REGISTERS, SMALL, SMALL, SMALL, SMALL],
        )
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consumer, (gradients, smem, None, items, softmax, drop, 0, T)),
                (_consumer, (gradients, smem, None, items, softmax, drop, 1, T)),
                (backward_producer, (inputs, smem, items, T)),
                (_writer, (sum_desc, None, turns, smem, items, 0, T)),
                (_writer, (sum_desc, None, turns, smem, items, 1, T)),
            ],
            [4, 1, 1, 1],
            [REGISTERS, 24, 24, 24],
        )


__all__ = ["backward_kernel"]

"""The backward pass on sm_90 of head dims 192 (q, k) and 128 (v), those of latent attention.

Shape legend and roles: as in `backward`. Tiles have BM = 64 queries and BN = 128 keys. In shared
memory all of them are cut into tiles of 64 x 64, one after the other: a row of tiles of Q or K has
COLUMNS_D of them, of V or dO COLUMNS_V; K, V and dS have a row for each consumer.

Of 240 registers of a thread dK and dV take 160, so a consumer makes one thing after the other and
its tensor cores are those of the other consumer in the meantime. dQ is handed over in two rounds,
of 64 columns and of 32: 96 of 192 are each consumer's. Each writer has every second dQ tile.
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

from stable_attention.hopper.backward import new_barriers
from stable_attention.hopper.barriers import advance, pass_turn, tma_add, wait_for_turn
from stable_attention.hopper.producer import PAIR, backward_producer
from stable_attention.hopper.softmax import halves, hidden_queries
from stable_attention.hopper.tiles import (
    first_row_of,
    item_at,
    place_of,
    query_tiles_of,
    turn_of,
)

BM, BN = gl.constexpr(64), gl.constexpr(128)
COLUMNS_D, COLUMNS_V = gl.constexpr(3), gl.constexpr(2)
"""Tiles of 64 columns that head dims have."""
PIECE = gl.constexpr(32)
"""Columns of dQ that leave in one copy."""
ROUNDS = gl.constexpr(2)
"""Of dQ's columns of a consumer."""
FAR = gl.constexpr(2**30)
"""Keys to the side that no mask has."""


@gluon.jit
def _across(left_s, right_s, left, right, zero, COLUMNS: gl.constexpr):
    """Start left right^T [64, 64] of rows of tiles that begin at these."""
    x = warpgroup_mma(
        left_s.index(left), right_s.index(right).permute((1, 0)), zero,
        use_acc=False, is_async=True,
    )  # fmt: skip
    for c in gl.static_range(1, COLUMNS):
        x = warpgroup_mma(
            left_s.index(left + c), right_s.index(right + c).permute((1, 0)), x, is_async=True
        )
    return x


@gluon.jit
def _half_across(v_s, do_s, z, slot, zero, W: gl.constexpr, HALF: gl.constexpr):
    """Start dP of half of the queries."""
    x = zero
    for c in gl.static_range(COLUMNS_V):
        right = do_s.index(slot * COLUMNS_V + c).slice(32 * HALF, 32)
        x = warpgroup_mma(
            v_s.index(z + W * COLUMNS_V + c), right.permute((1, 0)), x, use_acc=c > 0, is_async=True
        )
    return x


@gluon.jit
def _gradient(p, dp, delta_s, slot, HALF: gl.constexpr, DTYPE: gl.constexpr, AW_L: gl.constexpr):
    """(dS, P as an operand) of half of the queries, rounded."""
    columns: gl.constexpr = gl.SliceLayout(0, p.type.layout)
    delta = delta_s.index(slot).reshape((BM,)).slice(32 * HALF, 32).load(columns)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(DTYPE)
    return ds, gl.convert_layout(p.to(DTYPE), AW_L)


@gluon.jit
def _fold(
    dv, dk_a, dk_b, p, ds, do_s, q_s, slot, HALF: gl.constexpr, AW_L: gl.constexpr,
    AS_L: gl.constexpr,
):  # fmt: skip
    """Start dV + P^T dO and dK + dS^T Q of half of the queries."""
    dv = warpgroup_mma(p, _pair(do_s, slot * COLUMNS_V).slice(32 * HALF, 32), dv, is_async=True)
    q = _pair(q_s, slot * COLUMNS_D).slice(32 * HALF, 32)
    dk_a = warpgroup_mma(gl.convert_layout(ds, AW_L), q, dk_a, is_async=True)
    q = q_s.index(slot * COLUMNS_D + 2).slice(32 * HALF, 32)
    dk_b = warpgroup_mma(gl.convert_layout(ds, AS_L), q, dk_b, is_async=True)
    return dv, dk_a, dk_b


@gluon.jit
def _pair(tiles, first):
    """Two tiles of a row as one [64, 128]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], tiles.dtype)
    return tiles.index(first)._reinterpret(tiles.dtype, [64, 128], layout)


@gluon.jit
def _dq_product(ds_s, k_s, z, slot, zero, W: gl.constexpr, ROUND: gl.constexpr):
    """Start a round of this consumer's columns of dS^T K: the first or last 64, and half of the
    64 between. Two products, of the keys of each consumer."""
    dq = zero
    for w in gl.static_range(2):
        if ROUND == 0:
            keys = k_s.index(z + COLUMNS_D * w + 2 * W)
        else:
            keys = k_s.index(z + COLUMNS_D * w + 1).slice(PIECE * W, PIECE, dim=1)
        left = ds_s.index(slot * 2 + w).permute((1, 0))
        dq = warpgroup_mma(left, keys, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _hand_over(dq, dq_s, dq_full, dq_empty, tile, W: gl.constexpr, ROUND: gl.constexpr):
    """Leave columns of a dQ tile to its writer; tile: modulo 2."""
    mbarrier.wait(dq_empty.index(W), ROUND ^ 1)
    if ROUND == 0:
        a, b = halves(dq)
        dq_s.index(2 * W).store(a)
        dq_s.index(2 * W + 1).store(b)
    else:
        dq_s.index(2 * W).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full.index((tile * 2 + W) * ROUNDS + ROUND), count=1)


@gluon.jit
def _step(
    dk_a, dk_b, dv, s, slot, parity, m, last, right, left, end, unit,
    q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s,
    ds_full, ds_empty, dq_full, dq_empty, q_full, q_empty, do_full, do_empty,
    zero_s, zero_b,
    W: gl.constexpr, BAND: gl.constexpr, EDGE: gl.constexpr, FIRST: gl.constexpr,
    S_L: gl.constexpr, B_L: gl.constexpr, AS_L: gl.constexpr, AW_L: gl.constexpr,
):  # fmt: skip
    """Fold query tile m, whose scores are s, into dk (128 columns and 64) and dv, make the next
    tile's scores unless last, and finish dQ of the tile before unless FIRST.

    right, left, end: of `hidden_queries`, for the first query tile. EDGE: it hides some.
    """
    dtype: gl.constexpr = q_s.dtype
    columns: gl.constexpr = gl.SliceLayout(0, S_L)
    # 0, of which compilers do not know: where tiles of K and V lie would be worked out before the
    # loop, a descriptor for every instruction, and kept in registers that there are not.
    z = slot >> 1
    mbarrier.wait(do_full.index(slot), parity)
    dp_made = _half_across(v_s, do_s, z, slot, zero_b, W, 0)
    if BAND or EDGE:
        to_right = right + m * BM
        to_left = left + m * BM
        if EDGE:  # known when it is compiled: no branch  # noqa: SIM114
            s = hidden_queries(s, to_right, to_left, end)
        elif (gl.minimum(to_right, end) < 63) | (to_left + BM - 1 > 0):
            s = hidden_queries(s, to_right, to_left, end)
    shift = shift_s.index(slot).reshape((BM,)).load(columns)
    p = gl.exp2(s * unit - gl.expand_dims(shift, 0))
    pa, pb = halves(p)
    pa = gl.convert_layout(pa, B_L, assert_trivial=True)
    pb = gl.convert_layout(pb, B_L, assert_trivial=True)
    dp = warpgroup_mma_wait(0, deps=(dp_made,))
    ds, p_rounded = _gradient(pa, dp, delta_s, slot, 0, dtype, AW_L)
    dp_made = _half_across(v_s, do_s, z, slot, zero_b, W, 1)
    mbarrier.wait(ds_empty.index(slot), parity ^ 1)
    ds_s.index(slot * 2 + W).slice(0, 32, dim=1).store(ds)
    dv, dk_a, dk_b = _fold(dv, dk_a, dk_b, p_rounded, ds, do_s, q_s, slot, 0, AW_L, AS_L)
    dp, dv, dk_a, dk_b = warpgroup_mma_wait(0, deps=(dp_made, dv, dk_a, dk_b))
    ds_b, p_b = _gradient(pb, dp, delta_s, slot, 1, dtype, AW_L)
    ds_s.index(slot * 2 + W).slice(32, 32, dim=1).store(ds_b)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot), count=1)
    dv, dk_a, dk_b = _fold(dv, dk_a, dk_b, p_b, ds_b, do_s, q_s, slot, 1, AW_L, AS_L)
    following, following_parity = advance(slot, parity, PAIR)
    before = slot ^ 1
    if FIRST:
        dv, dk_a, dk_b = warpgroup_mma_wait(0, deps=(dv, dk_a, dk_b))
        mbarrier.arrive(do_empty.index(slot), count=1)
        mbarrier.arrive(q_empty.index(slot), count=1)
    else:
        mbarrier.wait(ds_full.index(before), parity ^ before)
        dq_a = _dq_product(ds_s, k_s, z, before, zero_s, W, 0)
        dv, dk_a, dk_b, dq_a = warpgroup_mma_wait(2, deps=(dv, dk_a, dk_b, dq_a))
        mbarrier.arrive(do_empty.index(slot), count=1)
        mbarrier.arrive(q_empty.index(slot), count=1)
        dq_b = _dq_product(ds_s, k_s, z, before, zero_b, W, 1)
        dq_a, dq_b = warpgroup_mma_wait(2, deps=(dq_a, dq_b))
        _hand_over(dq_a, dq_s, dq_full, dq_empty, before, W, 0)
    mbarrier.wait(q_full.index(following), following_parity, pred=last == 0)
    # After the last tile this is a product of what lies there, which nobody reads.
    s = _across(k_s, q_s, z + W * COLUMNS_D, following * COLUMNS_D, zero_s, COLUMNS_D)
    if not FIRST:
        dq_b, s = warpgroup_mma_wait(COLUMNS_D, deps=(dq_b, s))
        mbarrier.arrive(ds_empty.index(before), count=1)
        _hand_over(dq_b, dq_s, dq_full, dq_empty, before, W, 1)
    s = warpgroup_mma_wait(0, deps=(s,))
    return dk_a, dk_b, dv, s, following, following_parity


@gluon.jit
def _store(place, x, row, rows, stride):
    """x [64, N], rows from ``row`` on of so many, to a gradient of 16 bits."""
    like: gl.constexpr = x.type.layout
    r = row + gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, like)), 1)
    columns = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, like)), 0)
    where = place + (r.to(gl.int64) * stride + columns)
    gl.store(where, x.to(place.dtype.element_ty), mask=r < rows)


@gluon.jit
def _consumer(
    dk_ptr, dv_ptr, q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s, item_s,
    item_full, item_empty, k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty,
    ds_full, ds_empty, dq_full, dq_empty,
    counter, places, sq, sk, left, right, key_tiles, query_tiles, head_block, kv_heads,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, unit, scale,
    W: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    S_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    WIDE_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    B_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 16]
    )
    # Query tiles that the diagonal crosses.
    EDGE: gl.constexpr = BN // BM if CAUSAL else 0
    AS_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
    AW_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE_L, k_width=2)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero_s = gl.zeros([64, 64], gl.float32, S_L)
    zero_b = gl.zeros([64, PIECE], gl.float32, B_L)
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
            # Keys that no query sees meet a tile whose P is 0.
            count = gl.maximum(count, 1)
            dk_a = gl.zeros([64, 128], gl.float32, WIDE_L)
            dk_b = zero_s
            dv = gl.zeros([64, 128], gl.float32, WIDE_L)
            # Which keys, counted from this consumer's first one, the first of all queries may see.
            row = n * BN + W * 64
            to_right = -row
            to_left = -FAR
            end = FAR
            if BAND:
                to_right = keys - queries - row + right
                to_left = keys - queries - row - left
                end = keys - 1 - row
            mbarrier.wait(k_full, key_parity)
            mbarrier.wait(q_full.index(slot), parity)
            s = _across(k_s, q_s, W * COLUMNS_D, slot * COLUMNS_D, zero_s, COLUMNS_D)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.wait(v_full, key_parity)
            key_parity ^= 1
            dk_a, dk_b, dv, s, slot, parity = _step(
                dk_a, dk_b, dv, s, slot, parity, first, gl.where(count * GROUP == 1, 1, 0),
                to_right, to_left, end, unit,
                q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s,
                ds_full, ds_empty, dq_full, dq_empty, q_full, q_empty, do_full, do_empty,
                zero_s, zero_b, W, BAND, CAUSAL, True, S_L, B_L, AS_L, AW_L,
            )  # fmt: skip
            for g in range(0, GROUP):
                begin = gl.where(g == 0, 1, 0)
                if CAUSAL:
                    for t in range(begin, gl.minimum(EDGE, count)):
                        last = gl.where((t + 1 == count) & (g + 1 == GROUP), 1, 0)
                        dk_a, dk_b, dv, s, slot, parity = _step(
                            dk_a, dk_b, dv, s, slot, parity, first + t, last,
                            to_right, to_left, end, unit,
                            q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s,
                            ds_full, ds_empty, dq_full, dq_empty,
                            q_full, q_empty, do_full, do_empty,
                            zero_s, zero_b, W, BAND, True, False, S_L, B_L, AS_L, AW_L,
                        )  # fmt: skip
                    begin = EDGE
                for t in range(begin, count):
                    last = gl.where((t + 1 == count) & (g + 1 == GROUP), 1, 0)
                    dk_a, dk_b, dv, s, slot, parity = _step(
                        dk_a, dk_b, dv, s, slot, parity, first + t, last,
                        to_right, to_left, end, unit,
                        q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s,
                        ds_full, ds_empty, dq_full, dq_empty, q_full, q_empty, do_full, do_empty,
                        zero_s, zero_b, W, BAND, False, False, S_L, B_L, AS_L, AW_L,
                    )  # fmt: skip
            mbarrier.arrive(v_empty, count=1)
            before = slot ^ 1
            mbarrier.wait(ds_full.index(before), parity ^ before)
            dq_a = _dq_product(ds_s, k_s, 0, before, zero_s, W, 0)
            dq_a = warpgroup_mma_wait(0, deps=(dq_a,))
            dq_b = _dq_product(ds_s, k_s, 0, before, zero_b, W, 1)
            _hand_over(dq_a, dq_s, dq_full, dq_empty, before, W, 0)
            dq_b = warpgroup_mma_wait(0, deps=(dq_b,))
            mbarrier.arrive(ds_empty.index(before), count=1)
            mbarrier.arrive(k_empty, count=1)
            b = (head // kv_heads).to(gl.int64)
            hk = (head % kv_heads).to(gl.int64)
            out = dv_ptr + b * stride_dvb + hk * stride_dvh + start_k.to(gl.int64) * stride_dvs
            _store(out, dv, row, keys, stride_dvs)
            _hand_over(dq_b, dq_s, dq_full, dq_empty, before, W, 1)
            out = dk_ptr + b * stride_dkb + hk * stride_dkh + start_k.to(gl.int64) * stride_dks
            _store(out, dk_a * scale, row, keys, stride_dks)
            _store(out + 128, dk_b * scale, row, keys, stride_dks)


@gluon.jit
def _writer(
    sum_desc, turns, counter, places, dq_s, item_s, item_full, item_empty, dq_full, dq_empty,
    sq, sk, left, right, key_tiles, query_tiles, head_block,
    W: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """As in `backward`. A tile's parts are taken in a fixed order: the second consumer lags half a
    tile behind the first."""
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
                for w in gl.static_range(2):
                    for r in gl.static_range(ROUNDS):
                        full = dq_full.index(((number & 1) * 2 + w) * ROUNDS + r)
                        mbarrier.wait(full, (number >> 1) & 1)
                        for piece in gl.static_range(2 - r):
                            column = (128 * w if r == 0 else 64 + PIECE * w) + PIECE * piece
                            source = dq_s.index(2 * w + piece)
                            if turn == 0:
                                tma.async_copy_shared_to_global(
                                    sum_desc, [tile * BM, column], source
                                )
                            elif turn > 0:  # not of keys that no query sees
                                tma_add(sum_desc, [tile * BM, column], source)
                        tma.store_wait(0)
                        mbarrier.arrive(dq_empty.index(w), count=1)
                if turn >= 0:
                    pass_turn(turns + tile)
            done += count * GROUP
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "sq", "sk", "left", "right", "all_heads", "key_tiles", "query_tiles", "head_block",
        "kv_heads",
    ]
)  # fmt: skip
def latent_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, dk_ptr, dv_ptr, sum_desc,
    turns, counter, places,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads, unit, scale,
    CAUSAL: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    # A ragged descriptor's tile has two dimensions more.
    tile_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    q_s = gl.allocate_shared_memory(dtype, [PAIR * COLUMNS_D, 64, 64], tile_l)
    do_s = gl.allocate_shared_memory(dtype, [PAIR * COLUMNS_V, 64, 64], tile_l)
    k_s = gl.allocate_shared_memory(dtype, [2 * COLUMNS_D, 64, 64], tile_l)
    v_s = gl.allocate_shared_memory(dtype, [2 * COLUMNS_V, 64, 64], tile_l)
    shift_s = gl.allocate_shared_memory(gl.float32, [PAIR, 1, BM], shift_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [PAIR, 1, BM], delta_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [PAIR * 2, 64, 64], tile_l)
    dq_s = gl.allocate_shared_memory(gl.float32, [4, BM, PIECE], sum_desc.layout)
    item_s = gl.allocate_shared_memory(gl.int32, [PAIR, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full, item_empty = new_barriers(1, PAIR), new_barriers(4, PAIR)
    k_full, k_empty = new_barriers(1, 1).index(0), new_barriers(2, 1).index(0)
    v_full, v_empty = new_barriers(1, 1).index(0), new_barriers(2, 1).index(0)
    q_full, q_empty = new_barriers(1, PAIR), new_barriers(2, PAIR)
    do_full, do_empty = new_barriers(1, PAIR), new_barriers(2, PAIR)
    ds_full, ds_empty = new_barriers(2, PAIR), new_barriers(2, PAIR)
    dq_full, dq_empty = new_barriers(1, 4 * ROUNDS), new_barriers(1, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                dk_ptr, dv_ptr, q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s, item_s,
                item_full, item_empty, k_full, k_empty, v_full, v_empty,
                q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty,
                counter, places, sq, sk, left, right, key_tiles, query_tiles, head_block, kv_heads,
                stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
                unit, scale,
                0, CAUSAL, BAND, PACKED, GROUP,
            )),
            (_consumer, (
                dk_ptr, dv_ptr, q_s, k_s, v_s, do_s, shift_s, delta_s, ds_s, dq_s, item_s,
                item_full, item_empty, k_full, k_empty, v_full, v_empty,
                q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty,
                counter, places, sq, sk, left, right, key_tiles, query_tiles, head_block, kv_heads,
                stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
                unit, scale,
                1, CAUSAL, BAND, PACKED, GROUP,
            )),
            (backward_producer, (
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, counter, places,
                q_s, k_s, v_s, do_s, shift_s, delta_s, item_s,
                item_full, item_empty, k_full, k_empty, v_full, v_empty,
                q_full, q_empty, do_full, do_empty,
                sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads,
                stride_qb, stride_qh, stride_kb, stride_kh,
                stride_vb, stride_vh, stride_gb, stride_gh,
                BM, BN, CAUSAL, BAND, PACKED, GROUP, 1,
            )),
            (_writer, (
                sum_desc, turns, counter, places, dq_s, item_s, item_full, item_empty,
                dq_full, dq_empty, sq, sk, left, right, key_tiles, query_tiles, head_block,
                0, CAUSAL, BAND, PACKED, GROUP,
            )),
            (_writer, (
                sum_desc, turns, counter, places, dq_s, item_s, item_full, item_empty,
                dq_full, dq_empty, sq, sk, left, right, key_tiles, query_tiles, head_block,
                1, CAUSAL, BAND, PACKED, GROUP,
            )),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )  # fmt: skip


__all__ = ["PIECE", "latent_kernel"]

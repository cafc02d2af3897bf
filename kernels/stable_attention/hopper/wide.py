"""The backward pass on sm_90 for head dims above 128: dK, dV and the float32 sum of dQ.

Shape legend: as in `backward`; D is the head dim of q and k, DV of v. Tiles have BM = BN = 64.

Registers hold dK and dV of 64 keys and no more, so two consumers of 4 warps share a key tile: the
first makes P and adds to dV, the second makes dS and adds to dK. P passes from one to the other in
float32. Both are left sides from registers. Each makes half of dQ's columns, in two pieces, and
leaves them in shared memory for the two *writers*, as in `backward`: there the order of additions
is said.

The first consumer's half of dQ runs a tile late, one piece of it in the shadow of the softmax. The
second's waits for nobody; its second piece follows while P of the next tile is made.
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
from stable_attention.hopper.barriers import (
    advance,
    arrive_named,
    pass_turn,
    sync_named,
    tma_add,
    wait_for_turn,
)
from stable_attention.hopper.producer import PAIR, backward_producer
from stable_attention.hopper.softmax import fetched, halves, put_away
from stable_attention.hopper.tiles import (
    first_row_of,
    item_at,
    place_of,
    query_tiles_of,
    turn_of,
    zeros_outside,
)

TILE = gl.constexpr(64)
"""Queries and keys of a tile."""
PIECE = gl.constexpr(32)
"""Columns of dQ that leave in one copy."""
P_FULL, P_EMPTY = gl.constexpr(8), gl.constexpr(9)
"""Named barriers of P's place."""


@gluon.jit
def _product(left_s, right_s, left, right, zero, PARTS: gl.constexpr):
    """Start left right^T [64, 64] of tiles whose columns lie in PARTS."""
    x = warpgroup_mma(
        left_s.index(left * PARTS), right_s.index(right * PARTS).permute((1, 0)), zero,
        use_acc=False, is_async=True,
    )  # fmt: skip
    for part in gl.static_range(1, PARTS):
        x = warpgroup_mma(
            left_s.index(left * PARTS + part), right_s.index(right * PARTS + part).permute((1, 0)),
            x, is_async=True,
        )  # fmt: skip
    return x


@gluon.jit
def _begin(x_slot, zero, q_s, k_s, v_s, do_s, W: gl.constexpr, D_PARTS: gl.constexpr):
    """Start what a tile begins with: scores or dP, [keys, queries]."""
    if W == 0:
        return _product(k_s, q_s, 0, x_slot, zero, D_PARTS)
    else:
        return _product(v_s, do_s, 0, x_slot, zero, 1)


@gluon.jit
def _dq_product(ds, k_s, zero, W: gl.constexpr, ROUND: gl.constexpr, D_PARTS: gl.constexpr):
    """Start a round of this consumer's half of dS^T K: 64 columns, then the 64 or 32 others."""
    if D_PARTS == 1:
        keys = k_s.index(0).slice(128 * W + 64 * ROUND, 64, dim=1)
    elif ROUND == 0:
        keys = k_s.index(2 * W)
    else:
        keys = k_s.index(1).slice(32 * W, 32, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _hand_over(
    dq, dq_s, dq_full, dq_empty, tile, W: gl.constexpr, ROUND: gl.constexpr, ROUNDS: gl.constexpr
):
    """Leave columns of a dQ tile to its writer; tile: modulo 2."""
    place: gl.constexpr = 2 * W + (4 * ROUND if ROUNDS == 2 else 0)
    if ROUNDS == 1:
        mbarrier.wait(dq_empty.index(0), ROUND ^ 1)
    else:
        mbarrier.wait(dq_empty.index(ROUND), tile ^ 1)
    if dq.shape[1] == 64:
        a, b = halves(dq)
        dq_s.index(place).store(a)
        dq_s.index(place + 1).store(b)
    else:
        dq_s.index(place).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(tile * 2 + ROUND), count=1)


@gluon.jit
def _add(acc, operand, right_s, slot, PARTS: gl.constexpr):
    """Start acc + operand right, a tuple of the parts of its columns."""
    a = warpgroup_mma(operand, right_s.index(slot * PARTS), acc[0], is_async=True)
    if PARTS == 1:
        return (a,)
    else:
        b = warpgroup_mma(operand, right_s.index(slot * PARTS + 1), acc[1], is_async=True)
        c = warpgroup_mma(operand, right_s.index(slot * PARTS + 2), acc[2], is_async=True)
        return (a, b, c)


@gluon.jit
def _added(acc, dq, PARTS: gl.constexpr):
    """Await the parts of acc, after which dq was started."""
    if PARTS == 1:
        a, dq = warpgroup_mma_wait(1, deps=(acc[0], dq))
        return (a,), dq
    else:
        a, b, c, dq = warpgroup_mma_wait(1, deps=(acc[0], acc[1], acc[2], dq))
        return (a, b, c), dq


@gluon.jit
def _step(
    acc, x, slot, parity, m, n, last, sq, sk, left, right, unit,
    q_s, k_s, v_s, do_s, shift_s, delta_s, p_s, ds_s, dq_s,
    ds_full, ds_empty, dq_full, dq_empty, q_full, q_empty, do_full, do_empty,
    zero_s, zero_a, zero_b,
    W: gl.constexpr, DO_SLOTS: gl.constexpr, ROUNDS: gl.constexpr, D_PARTS: gl.constexpr,
    BAND: gl.constexpr, FIRST: gl.constexpr, S_L: gl.constexpr, A_L: gl.constexpr,
):  # fmt: skip
    """Fold query tile m into acc, of which x are the scores or dP; begin the next tile, unless
    last. The first consumer finishes dQ of the tile before, unless FIRST, the second of this one.
    """
    dtype: gl.constexpr = q_s.dtype
    columns: gl.constexpr = gl.SliceLayout(0, S_L)
    PARTS: gl.constexpr = 1 if W == 0 else D_PARTS
    BEGUN: gl.constexpr = D_PARTS if W == 0 else 1
    do_slot = slot % DO_SLOTS
    do_parity = parity if DO_SLOTS == 2 else slot
    following, following_parity = advance(slot, parity, PAIR)
    before = slot ^ 1
    if W == 0:
        if not FIRST:
            mbarrier.wait(ds_full.index(before), parity ^ before)
            dq = _dq_product(ds_s.index(before), k_s, zero_a, W, 0, D_PARTS)
        shift = shift_s.index(slot).reshape((TILE,)).load(columns)
        p = gl.exp2(x * unit - gl.expand_dims(shift, 0))
        if BAND:
            middle = m * TILE + (sk - sq) - n * TILE
            end = sk - 1 - n * TILE
            if (gl.minimum(middle + right, end) < TILE - 1) | (middle - left + TILE - 1 > 0):
                p = zeros_outside(p, middle + right, middle - left, end)
        sync_named(P_EMPTY, "256", 4)
        put_away(p_s, p)
        arrive_named(P_FULL, "256")
        operand = gl.convert_layout(p.to(dtype), A_L)
        if not FIRST:
            dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.wait(do_full.index(do_slot), do_parity)
        acc = _add(acc, operand, do_s, do_slot, 1)
        if FIRST:
            acc = (warpgroup_mma_wait(0, deps=(acc[0],)),)
            mbarrier.arrive(do_empty.index(do_slot), count=1)
            mbarrier.wait(q_full.index(following), following_parity, pred=last == 0)
            begun = _begin(following, zero_s, q_s, k_s, v_s, do_s, W, D_PARTS)
        else:
            _hand_over(dq, dq_s, dq_full, dq_empty, before, W, 0, ROUNDS)
            dq_b = _dq_product(ds_s.index(before), k_s, zero_b, W, 1, D_PARTS)
            acc, dq_b = _added(acc, dq_b, PARTS)
            mbarrier.arrive(do_empty.index(do_slot), count=1)
            mbarrier.wait(q_full.index(following), following_parity, pred=last == 0)
            begun = _begin(following, zero_s, q_s, k_s, v_s, do_s, W, D_PARTS)
            dq_b, begun = warpgroup_mma_wait(BEGUN, deps=(dq_b, begun))
            mbarrier.arrive(ds_empty.index(before), count=1)
            _hand_over(dq_b, dq_s, dq_full, dq_empty, before, W, 1, ROUNDS)
        x = warpgroup_mma_wait(0, deps=(begun,))
        mbarrier.arrive(q_empty.index(following), count=1, pred=last == 0)
    else:
        if not FIRST:
            dq = _dq_product(ds_s.index(before), k_s, zero_b, W, 1, D_PARTS)
        sync_named(P_FULL, "256", 4)
        if not FIRST:
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(ds_empty.index(before), count=1)
            _hand_over(dq, dq_s, dq_full, dq_empty, before, W, 1, ROUNDS)
        p = fetched(p_s, S_L)
        arrive_named(P_EMPTY, "256")
        delta = delta_s.index(slot).reshape((TILE,)).load(columns)
        ds = (p * (x - gl.expand_dims(delta, 0))).to(dtype)
        mbarrier.wait(ds_empty.index(slot), parity ^ 1)
        ds_s.index(slot).store(ds)
        operand = gl.convert_layout(ds, A_L)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(slot), count=1)
        mbarrier.wait(q_full.index(slot), parity)
        acc = _add(acc, operand, q_s, slot, D_PARTS)
        dq_a = _dq_product(ds_s.index(slot), k_s, zero_a, W, 0, D_PARTS)
        acc, dq_a = _added(acc, dq_a, PARTS)
        mbarrier.arrive(q_empty.index(slot), count=1)
        next_do = following % DO_SLOTS
        next_parity = following_parity if DO_SLOTS == 2 else following
        mbarrier.wait(do_full.index(next_do), next_parity, pred=last == 0)
        begun = _begin(next_do, zero_s, q_s, k_s, v_s, do_s, W, D_PARTS)
        dq_a, begun = warpgroup_mma_wait(BEGUN, deps=(dq_a, begun))
        _hand_over(dq_a, dq_s, dq_full, dq_empty, slot, W, 0, ROUNDS)
        x = warpgroup_mma_wait(0, deps=(begun,))
        mbarrier.arrive(do_empty.index(next_do), count=1, pred=last == 0)
    return acc, x, following, following_parity


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
    out_ptr, q_s, k_s, v_s, do_s, shift_s, delta_s, p_s, ds_s, dq_s, item_s,
    item_full, item_empty, k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty,
    ds_full, ds_empty, dq_full, dq_empty,
    counter, places, sq, sk, left, right, key_tiles, query_tiles, head_block, kv_heads,
    stride_b, stride_s, stride_h, unit, scale,
    W: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, DO_SLOTS: gl.constexpr,
    ROUNDS: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    D_PARTS: gl.constexpr = q_s.shape[0] // PAIR
    PARTS: gl.constexpr = 1 if W == 0 else D_PARTS
    WIDTH: gl.constexpr = DV if W == 0 else D // D_PARTS
    B_COLUMNS: gl.constexpr = D // 2 - 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    )
    ACC_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    B_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, B_COLUMNS, 16]
    )
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC_L, k_width=2)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero_s = gl.zeros([64, TILE], gl.float32, S_L)
    zero_b = gl.zeros([64, B_COLUMNS], gl.float32, B_L)
    slot = 0
    parity = 0
    item_slot = 0
    item_parity = 0
    key_parity = 0
    tiles = key_tiles
    if PACKED:
        tiles = gl.load(counter + 2)
    if W == 1:
        arrive_named(P_EMPTY, "256")
    running = True
    while running:
        mbarrier.wait(item_full.index(item_slot), item_parity)
        item = gl.max(item_s.index(item_slot).load(one), 0)
        mbarrier.arrive(item_empty.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        running = item >= 0
        if running:
            place, head = item_at(item, tiles, head_block, BAND)
            n, _, queries, start_k, keys = place_of(places, place, sq, sk, PACKED)
            first, count = query_tiles_of(
                n, query_tiles, queries, keys, left, right, TILE, TILE, False, BAND
            )
            # Keys that no query sees meet a tile whose P is 0.
            count = gl.maximum(count, 1)
            mbarrier.wait(k_full, key_parity)
            if W == 0:
                mbarrier.wait(q_full.index(slot), parity)
                begun = _begin(slot, zero_s, q_s, k_s, v_s, do_s, W, D_PARTS)
                x = warpgroup_mma_wait(0, deps=(begun,))
                mbarrier.arrive(q_empty.index(slot), count=1)
            else:
                mbarrier.wait(v_full, key_parity)
                do_slot = slot % DO_SLOTS
                mbarrier.wait(do_full.index(do_slot), parity if DO_SLOTS == 2 else slot)
                begun = _begin(do_slot, zero_s, q_s, k_s, v_s, do_s, W, D_PARTS)
                x = warpgroup_mma_wait(0, deps=(begun,))
                mbarrier.arrive(do_empty.index(do_slot), count=1)
            key_parity ^= 1
            zero = gl.zeros([64, WIDTH], gl.float32, ACC_L)
            acc = (zero,) if PARTS == 1 else (zero, zero, zero)
            acc, x, slot, parity = _step(
                acc, x, slot, parity, first, n, gl.where(count * GROUP == 1, 1, 0),
                queries, keys, left, right, unit,
                q_s, k_s, v_s, do_s, shift_s, delta_s, p_s, ds_s, dq_s,
                ds_full, ds_empty, dq_full, dq_empty,
                q_full, q_empty, do_full, do_empty,
                zero_s, zero_s, zero_b, W, DO_SLOTS, ROUNDS, D_PARTS, BAND, True, S_L, A_L,
            )  # fmt: skip
            for u in range(1, count * GROUP):
                acc, x, slot, parity = _step(
                    acc, x, slot, parity, first + u % count, n,
                    gl.where(u + 1 == count * GROUP, 1, 0), queries, keys, left, right, unit,
                    q_s, k_s, v_s, do_s, shift_s, delta_s, p_s, ds_s, dq_s,
                    ds_full, ds_empty, dq_full, dq_empty,
                    q_full, q_empty, do_full, do_empty,
                    zero_s, zero_s, zero_b, W, DO_SLOTS, ROUNDS, D_PARTS, BAND, False, S_L, A_L,
                )  # fmt: skip
            if W == 0:
                before = slot ^ 1
                mbarrier.wait(ds_full.index(before), parity ^ before)
                dq_a = _dq_product(ds_s.index(before), k_s, zero_s, W, 0, D_PARTS)
                dq_b = _dq_product(ds_s.index(before), k_s, zero_b, W, 1, D_PARTS)
                dq_a, dq_b = warpgroup_mma_wait(0, deps=(dq_a, dq_b))
                mbarrier.arrive(ds_empty.index(before), count=1)
                mbarrier.arrive(k_empty, count=1)
                _hand_over(dq_a, dq_s, dq_full, dq_empty, before, W, 0, ROUNDS)
                _hand_over(dq_b, dq_s, dq_full, dq_empty, before, W, 1, ROUNDS)
            else:
                mbarrier.arrive(v_empty, count=1)
                before = slot ^ 1
                dq_b = _dq_product(ds_s.index(before), k_s, zero_b, W, 1, D_PARTS)
                dq_b = warpgroup_mma_wait(0, deps=(dq_b,))
                mbarrier.arrive(ds_empty.index(before), count=1)
                mbarrier.arrive(k_empty, count=1)
                _hand_over(dq_b, dq_s, dq_full, dq_empty, before, W, 1, ROUNDS)
            out = out_ptr + (head // kv_heads).to(gl.int64) * stride_b
            out += (head % kv_heads).to(gl.int64) * stride_h + start_k.to(gl.int64) * stride_s
            for part in gl.static_range(PARTS):
                y = acc[part]
                if W == 1:
                    y = y * scale
                _store(out, y, n * TILE, keys, stride_s, part * WIDTH)


@gluon.jit
def _send(
    sum_desc, dq_s, row, turn, W: gl.constexpr, ROUND: gl.constexpr, ROUNDS: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Store or add the columns that `_hand_over` left; `_dq_product` says which they are."""
    place: gl.constexpr = 2 * W + (4 * ROUND if ROUNDS == 2 else 0)
    wide: gl.constexpr = D == 256 or ROUND == 0
    column: gl.constexpr = 128 * W + 64 * ROUND if wide else 64 + 32 * W
    for piece in gl.static_range(2 if wide else 1):
        source = dq_s.index(place + piece)
        if turn == 0:
            tma.async_copy_shared_to_global(sum_desc, [row, column + PIECE * piece], source)
        elif turn > 0:  # not of keys that no query sees
            tma_add(sum_desc, [row, column + PIECE * piece], source)


@gluon.jit
def _writer(
    sum_desc, turns, counter, places, dq_s, item_s, item_full, item_empty, dq_full, dq_empty,
    sq, sk, left, right, key_tiles, query_tiles, head_block,
    W: gl.constexpr, D: gl.constexpr, ROUNDS: gl.constexpr, BAND: gl.constexpr,
    PACKED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Every second dQ tile, two rounds of columns: as the writer of `backward`."""
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
            t, head = item_at(item, key_tiles, head_block, BAND)
            n, _, queries, _, keys = place_of(places, t, sq, sk, PACKED)
            first_row = first_row_of(places, t, PACKED)
            first, seen = query_tiles_of(
                n, query_tiles, queries, keys, left, right, TILE, TILE, False, BAND
            )
            count = gl.maximum(seen, 1)
            for u in range((W + done) & 1, count * GROUP, 2):
                number = done + u
                m = first + u % count
                tile = (head * GROUP + u // count) * query_tiles + first_row + m
                turn = turn_of(m, n, queries, keys, right, TILE, TILE, False, BAND)
                if BAND:
                    turn = gl.where(seen > 0, turn, -1)
                wait_for_turn(turns + tile, turn)
                for r in gl.static_range(2):
                    full = (number & 1) * 2 + r
                    mbarrier.wait(dq_full.index(full), (number >> 1) & 1)
                    for w in gl.static_range(2):
                        _send(sum_desc, dq_s, tile * TILE, turn, w, r, ROUNDS, D)
                    tma.store_wait(0)
                    mbarrier.arrive(dq_empty.index(r if ROUNDS == 2 else 0), count=1)
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
def wide_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, dk_ptr, dv_ptr, sum_desc,
    turns, counter, places,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads, unit, scale,
    D: gl.constexpr, DV: gl.constexpr, DO_SLOTS: gl.constexpr, ROUNDS: gl.constexpr,
    BAND: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    COLUMNS: gl.constexpr = q_desc.block_type.shape[-1]
    PARTS: gl.constexpr = D // COLUMNS
    tile_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, COLUMNS], dtype)
    v_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, DV], dtype)
    ds_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TILE], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_s = gl.allocate_shared_memory(dtype, [PAIR * PARTS, TILE, COLUMNS], tile_l)
    do_s = gl.allocate_shared_memory(dtype, [DO_SLOTS, TILE, DV], v_l)
    k_s = gl.allocate_shared_memory(dtype, [PARTS, TILE, COLUMNS], tile_l)
    v_s = gl.allocate_shared_memory(dtype, [1, TILE, DV], v_l)
    k_tiles = k_s.index(0) if PARTS == 1 else k_s
    v_tile = v_s.index(0)
    shift_s = gl.allocate_shared_memory(gl.float32, [PAIR, 1, TILE], shift_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [PAIR, 1, TILE], delta_desc.layout)
    p_s = gl.allocate_shared_memory(gl.float32, [32, 128], flat)
    ds_s = gl.allocate_shared_memory(dtype, [PAIR, TILE, TILE], ds_l)
    dq_s = gl.allocate_shared_memory(gl.float32, [4 * ROUNDS, TILE, PIECE], sum_desc.layout)
    item_s = gl.allocate_shared_memory(gl.int32, [PAIR, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full, item_empty = new_barriers(1, PAIR), new_barriers(4, PAIR)
    k_full, k_empty = new_barriers(1, 1).index(0), new_barriers(2, 1).index(0)
    v_full, v_empty = new_barriers(1, 1).index(0), new_barriers(1, 1).index(0)
    q_full, q_empty = new_barriers(1, PAIR), new_barriers(2, PAIR)
    do_full, do_empty = new_barriers(1, DO_SLOTS), new_barriers(2, DO_SLOTS)
    ds_full, ds_empty = new_barriers(1, PAIR), new_barriers(2, PAIR)
    dq_full = new_barriers(2, 4)
    dq_empty = new_barriers(1, ROUNDS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                dv_ptr, q_s, k_s, v_s, do_s, shift_s, delta_s, p_s, ds_s, dq_s, item_s,
                item_full, item_empty, k_full, k_empty, v_full, v_empty,
                q_full, q_empty, do_full, do_empty,
                ds_full, ds_empty, dq_full, dq_empty,
                counter, places, sq, sk, left, right, key_tiles, query_tiles, head_block, kv_heads,
                stride_dvb, stride_dvs, stride_dvh, unit, scale,
                0, D, DV, DO_SLOTS, ROUNDS, BAND, PACKED, GROUP,
            )),
            (_consumer, (
                dk_ptr, q_s, k_s, v_s, do_s, shift_s, delta_s, p_s, ds_s, dq_s, item_s,
                item_full, item_empty, k_full, k_empty, v_full, v_empty,
                q_full, q_empty, do_full, do_empty,
                ds_full, ds_empty, dq_full, dq_empty,
                counter, places, sq, sk, left, right, key_tiles, query_tiles, head_block, kv_heads,
                stride_dkb, stride_dks, stride_dkh, unit, scale,
                1, D, DV, DO_SLOTS, ROUNDS, BAND, PACKED, GROUP,
            )),
            (backward_producer, (
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, counter, places,
                q_s, k_tiles, v_tile, do_s, shift_s, delta_s, item_s,
                item_full, item_empty, k_full, k_empty, v_full, v_empty,
                q_full, q_empty, do_full, do_empty,
                sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads,
                stride_qb, stride_qh, stride_kb, stride_kh,
                stride_vb, stride_vh, stride_gb, stride_gh,
                TILE, TILE, False, BAND, PACKED, GROUP, 1,
            )),
            (_writer, (
                sum_desc, turns, counter, places, dq_s, item_s, item_full, item_empty,
                dq_full, dq_empty, sq, sk, left, right, key_tiles, query_tiles, head_block,
                0, D, ROUNDS, BAND, PACKED, GROUP,
            )),
            (_writer, (
                sum_desc, turns, counter, places, dq_s, item_s, item_full, item_empty,
                dq_full, dq_empty, sq, sk, left, right, key_tiles, query_tiles, head_block,
                1, D, ROUNDS, BAND, PACKED, GROUP,
            )),
        ],
        [4, 1, 1, 1],
        [REGISTERS, 24, 24, 24],
    )  # fmt: skip


__all__ = ["wide_kernel"]

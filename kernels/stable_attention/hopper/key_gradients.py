"""dK and dV on sm_90 for head dims above 128, whose dQ is another kernel's (`query_gradient`).

Shape legend: D head dim of q and k, DV of v. An item is 64 keys of a key/value head, a tile 64
queries of one of its query heads; products are [64 keys, N queries], 64 or 32 of a tile's. shift
and delta are [B * H * query tiles, 64] float32 (`rows`); under PLANES a tile's shifts are followed
by the second plane of LSE.

Registers hold dK and dV of 64 keys and no more, so two consumers of 4 warps share an item: the
first makes P and adds to dV, the second makes dS and adds to dK. P passes from one to the other in
float32. The first has K in registers, the second V, so that products read shared memory once and
not twice, and all of it is left to tiles. While a consumer adds, its next product waits in line.

Q and K come through one ring, dO and V through another: the first entry of an item is the one of
its keys. Both consumers free every slot. A sum is one program's, in a fixed order.
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
    arrive_named,
    new_barriers,
    next_item,
    sync_named,
    warp_sync,
)
from stable_attention.hopper.producer import PAIR
from stable_attention.hopper.softmax import fetched, product_layout, put_away, store_rows
from stable_attention.hopper.tiles import (
    ONE_PLANE,
    first_row_of,
    item_at,
    load_parts,
    place_of,
    query_tiles_of,
    zeros_outside,
)

ROWS = gl.constexpr(64)
"""Queries and keys of a tile."""
PART = gl.constexpr(64)
"""Columns of a gradient that leave at once, and of 256 columns those that stay in shared memory."""
P_FULL, P_EMPTY = gl.constexpr(8), gl.constexpr(10)
"""Named barriers of P's two places."""


@gluon.jit
def _operand(ring, slot, own_s, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile as the left side of a product, a tuple of parts of its columns.

    Registers have no room for the last of 256, which goes to ``own_s``.
    """
    if ring.shape[2] == 4 * PART:
        tile = ring.index(slot)
        a = tile.slice(0, PART, dim=1).load(LAYOUT)
        b = tile.slice(PART, PART, dim=1).load(LAYOUT)
        c = tile.slice(2 * PART, PART, dim=1).load(LAYOUT)
        tma.store_wait(0)
        own_s.store(tile.slice(3 * PART, PART, dim=1).load(LAYOUT))
        fence_async_shared()
        return (a, b, c, own_s)
    else:
        a = ring.index(slot * PARTS).load(LAYOUT)
        if PARTS == 1:
            return (a,)
        else:
            b = ring.index(slot * PARTS + 1).load(LAYOUT)
            return (a, b, ring.index(slot * PARTS + 2).load(LAYOUT))


@gluon.jit
def _columns(ring, slot, C: gl.constexpr, N: gl.constexpr, PART_OF: gl.constexpr, IN: gl.constexpr):
    """The C-th N rows of a tile: columns that meet a part of `_operand`, of so many."""
    if ring.shape[2] == 4 * PART:
        return ring.index(slot).slice(C * N, N).slice(PART * PART_OF, PART, dim=1)
    else:
        return ring.index(slot * IN + PART_OF).slice(C * N, N)


@gluon.jit
def _product(x, ring, slot, zero, C: gl.constexpr):
    """Start x rows^T of the C-th so many rows of a tile."""
    N: gl.constexpr = zero.shape[1]
    rows = _columns(ring, slot, C, N, 0, len(x)).permute((1, 0))
    made = warpgroup_mma(x[0], rows, zero, use_acc=False, is_async=True)
    for part in gl.static_range(1, len(x)):
        rows = _columns(ring, slot, C, N, part, len(x)).permute((1, 0))
        made = warpgroup_mma(x[part], rows, made, is_async=True)
    return made


@gluon.jit
def _add(acc, operand, ring, slot, C: gl.constexpr):
    """Start acc + operand rows, a tuple of the parts of their columns."""
    N: gl.constexpr = operand.shape[1]
    first = slot * len(acc)
    a = warpgroup_mma(operand, ring.index(first).slice(C * N, N), acc[0], is_async=True)
    if len(acc) == 1:
        return (a,)
    else:
        b = warpgroup_mma(operand, ring.index(first + 1).slice(C * N, N), acc[1], is_async=True)
        c = warpgroup_mma(operand, ring.index(first + 2).slice(C * N, N), acc[2], is_async=True)
        return (a, b, c)


@gluon.jit
def _added(acc, made, BEHIND: gl.constexpr):
    """Await the parts of acc, after which as many products were started."""
    if len(acc) == 1:
        a, made = warpgroup_mma_wait(BEHIND, deps=(acc[0], made))
        return (a,), made
    else:
        a, b, c, made = warpgroup_mma_wait(BEHIND, deps=(acc[0], acc[1], acc[2], made))
        return (a, b, c), made


@gluon.jit
def _go_on(adding, x, ring, slot, zero, read, C: gl.constexpr, LAST: gl.constexpr):
    """Start the next product; (acc, the product) when both are there. LAST: of a tile, whose other
    side has been read when acc is there."""
    begun = _product(x, ring, slot, zero, C)
    acc, begun = _added(adding, begun, len(x))
    if LAST:
        mbarrier.arrive(read, count=1)
    return acc, warpgroup_mma_wait(0, deps=(begun,))


@gluon.jit
def _weights(
    s, shift, planes_s, unit, middle, end, place, p_s, items, FIRST: gl.constexpr, T: gl.constexpr
):
    """P of scores [64, N], left for the other consumer as well. middle: the first query against the
    first key."""
    x = s * unit - gl.expand_dims(shift, 0)
    if T.PLANES:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        if gl.max(planes_s.slice(ROWS, 1).load(one), 0) < ONE_PLANE:  # else one plane is enough
            rest = planes_s.slice(ROWS + FIRST, T.N).load(shift.type.layout)
            x = x - gl.expand_dims(rest, 0)
    p = gl.exp2(x)
    if T.BAND:
        to_right = middle + items.right
        to_left = middle - items.left
        if (gl.minimum(to_right, end) < ROWS - 1) | (to_left + s.shape[1] - 1 > 0):
            p = zeros_outside(p, to_right, to_left, end)
    sync_named(P_EMPTY + place, "256", 4)
    put_away(p_s.index(place), p)
    arrive_named(P_FULL + place, "256")
    return p


@gluon.jit
def _consumer(
    out, a, b, numbers_s, p_s, own_s, ring, items, group, factor,
    W: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """W 0: dV, from K and Q (ring a), dO (ring b) and shift; 1: dK, from V and dO (a), Q (b) and
    delta.

    ring: of items. factor: of scores in log2 units, or of dK.
    """
    A_PARTS: gl.constexpr = a.slots.shape[0] // T.SLOTS
    B_PARTS: gl.constexpr = b.slots.shape[0] // T.SLOTS
    WIDTH: gl.constexpr = b.slots.shape[2]
    CHUNKS: gl.constexpr = ROWS // T.N
    NUMBERS: gl.constexpr = 2 * ROWS if T.PLANES and W == 0 else ROWS
    dtype: gl.constexpr = a.slots.dtype
    S_L: gl.constexpr = product_layout(T.N)
    ACC_L: gl.constexpr = product_layout(WIDTH)
    X_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC_L, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, S_L)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero_s = gl.zeros([64, T.N], gl.float32, S_L)
    slot = 0
    parity = 0
    item_slot = 0
    item_parity = 0
    p_place = 0
    tiles = items.key_tiles
    if T.PACKED:
        tiles = gl.load(items.counter + 2)
    if W == 1:
        arrive_named(P_EMPTY, "256")
        arrive_named(P_EMPTY + 1, "256")
    running = True
    while running:
        mbarrier.wait(ring.full.index(item_slot), item_parity)
        item = gl.max(ring.slots.index(item_slot).load(one), 0)
        mbarrier.arrive(ring.empty.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        running = item >= 0
        if running:
            place, head = item_at(item, tiles, items.head_block, False)
            n, _, queries, start_k, keys = place_of(
                items.places, place, items.sq, items.sk, T.PACKED
            )
            first, count = query_tiles_of(
                n, items.query_tiles, queries, keys, items.left, items.right,
                ROWS, ROWS, False, T.BAND,
            )  # fmt: skip
            # Keys that no query sees meet a tile whose P is 0.
            count = gl.maximum(count, 1)
            middle = first * ROWS + (keys - queries) - n * ROWS
            behind = middle + count * ROWS
            end = keys - 1 - n * ROWS
            mbarrier.wait(a.full.index(slot), parity)
            x = _operand(a.slots, slot, own_s, A_PARTS, X_L)
            mbarrier.wait(b.full.index(slot), parity)
            mbarrier.arrive(b.empty.index(slot), count=1)
            of_keys = slot
            slot, parity = advance(slot, parity, T.SLOTS)
            zero = gl.zeros([64, WIDTH], gl.float32, ACC_L)
            acc = (zero,) if B_PARTS == 1 else (zero, zero, zero)
            mbarrier.wait(a.full.index(slot), parity)
            made = warpgroup_mma_wait(0, deps=(_product(x, a.slots, slot, zero_s, 0),))
            # Not before: a load to registers has read for certain when its result is used.
            mbarrier.arrive(a.empty.index(of_keys), count=1)
            total = count * group
            for u in range(0, total):
                following, following_parity = advance(slot, parity, T.SLOTS)
                read = b.empty.index(slot)
                for c in gl.static_range(CHUNKS):
                    of_tile = numbers_s.index(slot).reshape((NUMBERS,))
                    numbers = of_tile.slice(c * T.N, T.N).load(columns)
                    if W == 0:
                        p = _weights(
                            made, numbers, of_tile, factor, middle, end, p_place, p_s, items,
                            c * T.N, T,
                        )  # fmt: skip
                        middle += T.N
                        operand = gl.convert_layout(p.to(dtype), P_L)
                    else:
                        sync_named(P_FULL + p_place, "256", 4)
                        p = fetched(p_s.index(p_place), S_L)
                        ds = (p * (made - gl.expand_dims(numbers, 0))).to(dtype)
                        operand = gl.convert_layout(ds, P_L)
                    if c == 0:
                        mbarrier.wait(b.full.index(slot), parity)
                    adding = _add(acc, operand, b.slots, slot, c)
                    # After the use of P and the numbers, as above.
                    if W == 1:
                        arrive_named(P_EMPTY + p_place, "256")
                    p_place ^= 1
                    if c < CHUNKS - 1:
                        acc, made = _go_on(adding, x, a.slots, slot, zero_s, read, c + 1, False)
                    else:
                        mbarrier.arrive(a.empty.index(slot), count=1)
                        if T.SPARED:
                            if u + 1 < total:
                                mbarrier.wait(a.full.index(following), following_parity)
                                acc, made = _go_on(
                                    adding, x, a.slots, following, zero_s, read, 0, True
                                )
                            else:
                                acc, made = _added(adding, made, 0)
                                mbarrier.arrive(read, count=1)
                        else:
                            more = u + 1 < total
                            mbarrier.wait(a.full.index(following), following_parity, pred=more)
                            acc, made = _go_on(adding, x, a.slots, following, zero_s, read, 0, True)
                # Of the next query head.
                middle = gl.where(middle == behind, middle - count * ROWS, middle)
                slot = following
                parity = following_parity
            column = (head // items.heads) * out.stride_b + (head % items.heads) * out.stride_h
            for part in gl.static_range(B_PARTS):
                y = acc[part]
                if W == 1:
                    y = y * factor
                store_rows(
                    y, own_s, own_s, out.desc, out.desc, n * ROWS, column + part * WIDTH,
                    start_k, keys, False, T.PACKED,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _producer(inputs, q, do, shift_s, delta_s, ring, items, group, T: gl.constexpr):
    PARTS: gl.constexpr = q.slots.shape[0] // T.SLOTS
    q_in, k_in, v_in, do_in = inputs.q, inputs.k, inputs.v, inputs.do
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = 0
    parity = 0
    item_slot = 0
    item_parity = 0
    tiles = items.key_tiles
    if T.PACKED:
        tiles = gl.load(items.counter + 2)
    most = tiles * items.all_heads
    # Programs begin with their own number. As many are taken from the counter as there are items,
    # so it ends as it began.
    item = gl.program_id(0)
    running = True
    while running:
        running = item < most
        mbarrier.wait(ring.empty.index(item_slot), item_parity ^ 1)
        ring.slots.index(item_slot).store(gl.full([1], gl.where(running, item, -1), gl.int32, one))
        warp_sync(item)
        mbarrier.arrive(ring.full.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        if running:
            t, head = item_at(item, tiles, items.head_block, False)
            n, start_q, queries, start_k, keys = place_of(
                items.places, t, items.sq, items.sk, T.PACKED
            )
            b = head // items.heads
            hk = head % items.heads
            mbarrier.wait(q.empty.index(slot), parity ^ 1)
            mbarrier.expect(q.full.index(slot), PARTS * k_in.desc.block_type.nbytes)
            load_parts(
                k_in.desc, n * ROWS, b * k_in.stride_b + hk * k_in.stride_h, start_k, keys,
                q.full.index(slot), q.slots, slot, PARTS, T.PACKED,
            )  # fmt: skip
            mbarrier.wait(do.empty.index(slot), parity ^ 1)
            mbarrier.expect(do.full.index(slot), v_in.desc.block_type.nbytes)
            load_parts(
                v_in.desc, n * ROWS, b * v_in.stride_b + hk * v_in.stride_h, start_k, keys,
                do.full.index(slot), do.slots, slot, 1, T.PACKED,
            )  # fmt: skip
            slot, parity = advance(slot, parity, T.SLOTS)
            first, count = query_tiles_of(
                n, items.query_tiles, queries, keys, items.left, items.right,
                ROWS, ROWS, False, T.BAND,
            )  # fmt: skip
            first_row = first_row_of(items.places, t, T.PACKED)
            for g in range(0, group):
                h = hk * group + g
                row = (head * group + g) * items.query_tiles + first_row
                q_column = b * q_in.stride_b + h * q_in.stride_h
                do_column = b * do_in.stride_b + h * do_in.stride_h
                for m in range(first, first + gl.maximum(count, 1)):
                    mbarrier.wait(q.empty.index(slot), parity ^ 1)
                    mbarrier.expect(
                        q.full.index(slot),
                        PARTS * q_in.desc.block_type.nbytes + inputs.shift_desc.block_type.nbytes,
                    )
                    load_parts(
                        q_in.desc, m * ROWS, q_column, start_q, queries,
                        q.full.index(slot), q.slots, slot, PARTS, T.PACKED,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        inputs.shift_desc, [row + m, 0], q.full.index(slot), shift_s.index(slot)
                    )
                    mbarrier.wait(do.empty.index(slot), parity ^ 1)
                    mbarrier.expect(
                        do.full.index(slot),
                        do_in.desc.block_type.nbytes + inputs.delta_desc.block_type.nbytes,
                    )
                    load_parts(
                        do_in.desc, m * ROWS, do_column, start_q, queries,
                        do.full.index(slot), do.slots, slot, 1, T.PACKED,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        inputs.delta_desc, [row + m, 0], do.full.index(slot), delta_s.index(slot)
                    )
                    slot, parity = advance(slot, parity, T.SLOTS)
            item = gl.num_programs(0) + next_item(items.counter, most - 1)


@gluon.jit(
    do_not_specialize=[
        "sq", "sk", "left", "right", "all_heads", "key_tiles", "query_tiles", "head_block",
        "kv_heads", "group",
    ]
)  # fmt: skip
def key_gradients_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, dk_desc, dv_desc, counter, places,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    stride_dkb, stride_dkh, stride_dvb, stride_dvh,
    sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads, group,
    unit, scale,
    D: gl.constexpr, SLOTS: gl.constexpr, N: gl.constexpr, BAND: gl.constexpr,
    PACKED: gl.constexpr, SPARED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    COLUMNS: gl.constexpr = q_desc.block_type.shape[-1]
    DV: gl.constexpr = do_desc.block_type.shape[-1]
    PARTS: gl.constexpr = D // COLUMNS
    q_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    do_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DV], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_s = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, ROWS, COLUMNS], q_l)
    do_s = gl.allocate_shared_memory(dtype, [SLOTS, ROWS, DV], do_l)
    PLANES: gl.constexpr = shift_desc.block_type.shape[-1] // ROWS
    shift_s = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, PLANES * ROWS], shift_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, ROWS], delta_desc.layout)
    p_s = gl.allocate_shared_memory(gl.float32, [2, N // 2, 128], flat)
    own_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PART], dtype)
    own_s = gl.allocate_shared_memory(dtype, [2, ROWS, PART], own_l)
    item_s = gl.allocate_shared_memory(gl.int32, [PAIR, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = bundles.Ring(item_s, new_barriers(1, PAIR), new_barriers(2, PAIR))
    q = bundles.Ring(q_s, new_barriers(1, SLOTS), new_barriers(2, SLOTS))
    do = bundles.Ring(do_s, new_barriers(1, SLOTS), new_barriers(2, SLOTS))
    fence_async_shared()
    T: gl.constexpr = bundles.KeyTraits(SLOTS, N, BAND, PACKED, SPARED, PLANES > 1)
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
    dk = bundles.Tiled(dk_desc, stride_dkb, stride_dkh)
    dv = bundles.Tiled(dv_desc, stride_dvb, stride_dvh)
    own_v, own_k = own_s.index(0), own_s.index(1)
    gl.warp_specialize(
        [
            (_consumer, (dv, q, do, shift_s, p_s, own_v, ring, items, group, unit, 0, T)),
            (_consumer, (dk, do, q, delta_s, p_s, own_k, ring, items, group, scale, 1, T)),
            (_producer, (inputs, q, do, shift_s, delta_s, ring, items, group, T)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


__all__ = ["key_gradients_kernel"]

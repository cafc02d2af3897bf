"""The consumers of the forward pass on sm_90: softmax, products and epilogue of 64 queries a tile.

Block j's scores are issued together with the product P V of block j - 1, and the softmax of j runs
while that product does. Tiles are chained the same way: a tile's first scores are issued with the
last product of the tile before, whose epilogue follows the new tile's first softmax. Blocks go from
last to first: only the one that starts a tile looks at a mask, or those at the edges of a BAND
(`tiles`). The two consumers take turns in issuing.

Under SEGMENT the tensor cores accumulate so many blocks at most (`numerics`, on truncation); then
what they have joins a float32 total, rounded to nearest. Registers have room for 64 columns of it;
others lie in the shared memory through which O's low-order part leaves at the end. Where that has
no room either, all of the total lies in global memory, a place for each consumer.

A slot of a ring is freed through a named barrier: TURN, then slots of K, of V, and two of Q.

Shape legend: as in `forward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stable_attention.hopper.barriers import (
    advance,
    arrive_if,
    arrive_named,
    sync_named,
)
from stable_attention.hopper.producer import ALL, ITEM, ITEMS, SLOT_OF_K
from stable_attention.hopper.softmax import (
    LANES,
    NOTHING,
    add_kept,
    add_rounded_sum,
    add_weighted,
    by_lane,
    halves,
    hidden_after,
    hidden_outside,
    join_total,
    keep,
    log_sum_exp_planes,
    opaque_zeros,
    product_layout,
    put_away,
    softened,
    split,
    store_rows,
    whole,
)
from stable_attention.hopper.tiles import (
    TILE,
    at_edge,
    key_blocks_of,
    limits_of,
    place_of,
)
from stable_attention.numerics import LN2, LOG2E, OWN_SHIFT_BOUND

TURN = gl.constexpr(5)
"""The named barrier of the first consumer's turn."""


@gluon.jit
def announced(item_s, tile, Q_SLOTS: gl.constexpr, one: gl.constexpr):
    """(head counted over the batch or -1, tile, batch entry, head within it) of an item, of which
    this program has had ``tile`` before."""
    first = (tile & (ITEMS // Q_SLOTS - 1)) * ITEM
    return (
        gl.max(item_s.index(first).load(one), 0),
        gl.max(item_s.index(first + 1).load(one), 0),
        gl.max(item_s.index(first + 2).load(one), 0),
        gl.max(item_s.index(first + 3).load(one), 0),
    )


@gluon.jit
def _tile(t, items, W: gl.constexpr, T: gl.constexpr):
    """(its number in its sequence, blocks that it sees, `limits_of` the last) of query tile t."""
    m, _, queries, _, keys = place_of(items.places, t, items.sq, items.sk, T.PACKED)
    last, blocks = key_blocks_of(
        m, items.key_tiles, queries, keys, items.left, items.right, T.BN, T.CAUSAL, T.BAND
    )
    right, left, end = limits_of(m, last, queries, keys, items.left, items.right, W, T.BN)
    return m, blocks, right, left, end


@gluon.jit
def operand(q_s, place, PARTS: gl.constexpr, IN_REGISTERS: gl.constexpr, LAYOUT: gl.constexpr):
    """A consumer's queries, or their first columns, as the left side of a product."""
    if IN_REGISTERS:
        return q_s.index(place * PARTS).load(LAYOUT)
    else:
        return q_s.index(place * PARTS)


@gluon.jit
def scores(q, q_s, place, k_s, k, zero, PARTS: gl.constexpr):
    """Start a block's scores [64, N], of its first N keys; head dims in PARTS of their columns."""
    N: gl.constexpr = zero.shape[1]
    keys = k_s.index(k * PARTS).slice(0, N)
    s = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
    for part in gl.static_range(1, PARTS):
        keys = k_s.index(k * PARTS + part).slice(0, N)
        q = q_s.index(place * PARTS + part)
        s = warpgroup_mma(q, keys.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _first_scores(q, q_s, place, k_s, k, BN: gl.constexpr, PARTS: gl.constexpr, HALF: gl.constexpr):
    """Start the scores of the block that starts a row, or of its first 64 keys."""
    N: gl.constexpr = 64 if HALF else BN
    zero = gl.zeros([64, N], gl.float32, product_layout(N))
    return scores(q, q_s, place, k_s, k, zero, PARTS)


@gluon.jit
def _first_softmax(s, softmax, row, blocks, sk, limits, HALF: gl.constexpr, T: gl.constexpr):
    """(P [64, BN], shift) of the block that starts a row: its maximum is the shift.

    row: the first query. limits: `limits_of`.
    """
    LAYOUT: gl.constexpr = product_layout(T.BN)
    right, left, end = limits
    first_key = (blocks - 1) * T.BN
    s = softened(s, softmax.steepness, T.CAPPED)
    if T.BAND:
        s = hidden_outside(s, right, left, end)
    elif T.CAUSAL:
        s = hidden_after(s, row - first_key, True)
    elif not T.EVEN:
        s = hidden_after(s, sk - 1 - first_key, False)
    shift = gl.max(s, 1) * softmax.unit
    if T.BAND:
        shift = gl.maximum(shift, NOTHING)
    p = gl.exp2(s * softmax.unit - gl.expand_dims(shift, 1))
    if HALF:
        p = whole(p, opaque_zeros(p), LAYOUT)
    return p, gl.convert_layout(shift, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def forward_consumer(outputs, smem, items, softmax, W: gl.constexpr, T: gl.constexpr):
    # The first consumer sees only half of the keys of a diagonal block.
    HALF: gl.constexpr = T.CAUSAL and W == 0
    S_L: gl.constexpr = product_layout(T.BN)
    O_L: gl.constexpr = product_layout(T.DV)
    E_L: gl.constexpr = product_layout(8)
    Q_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=2)
    PE_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=E_L, k_width=2)
    RO: gl.constexpr = gl.SliceLayout(1, O_L)
    RE: gl.constexpr = gl.SliceLayout(1, E_L)
    RL: gl.constexpr = gl.SliceLayout(1, LANES)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SLOT_OF_V: gl.constexpr = SLOT_OF_K + T.SLOTS
    BUFFER_OF_Q: gl.constexpr = SLOT_OF_V + T.SLOTS
    # Products issued after the scores: two of P V, and one of the rounded sum for 32 keys.
    BEHIND: gl.constexpr = 2 + T.BN // 32 if T.ROUNDED else 2
    # Whether half of the segments' total is in shared memory: registers have no room for it.
    FAR: gl.constexpr = T.DV == 128 and T.BN == 128
    AWAY: gl.constexpr = outputs.total_ptr is not None  # all of it is in global memory
    # With the rounded sum ptxas would wait for P V before the exponentials; see below.
    FENCED: gl.constexpr = T.ROUNDED
    q_s, k_s, v_s, item_s = smem.q.slots, smem.k.slots, smem.v.slots, smem.item
    q_full, k_full, v_full = smem.q.full, smem.k.full, smem.v.full
    dtype: gl.constexpr = k_s.dtype
    zero_s = gl.zeros([64, T.BN], gl.float32, S_L)
    acc = gl.zeros([64, T.DV], gl.float32, O_L)
    l_rounded = gl.zeros([64, 8], gl.float32, E_L)
    l_lanes = gl.zeros([64, 4], gl.float32, LANES)
    far_s = smem.total
    if T.SEGMENT and FAR:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        far_s = smem.total.index(W)._reinterpret(gl.float32, [32, 128], flat)
    total_p = outputs.total_ptr
    if AWAY:
        total_p += (gl.program_id(0) * 2 + W) * 64 * T.DV
    k = 0
    k_parity = 0
    v = 0
    v_parity = 0
    tiles = 0
    if W == 1:
        arrive_named(TURN, "256")
    mbarrier.wait(q_full.index(0), 0)
    head, t, _, _ = announced(item_s, 0, T.Q_SLOTS, one)
    if T.PACKED:
        t = gl.where(head >= 0, t, 0)
    m, blocks, to_right, to_left, end = _tile(t, items, W, T)
    q = operand(q_s, W, T.PARTS, T.Q_IN_REGISTERS, Q_L)
    # Of packed sequences there may be fewer tiles than programs.
    mbarrier.wait(k_full.index(k), k_parity, pred=head >= 0)
    sync_named(TURN + W, "256", 4)
    first_made = _first_scores(q, q_s, W, k_s, k, T.BN, T.PARTS, HALF)
    arrive_named(TURN + 1 - W, "256")
    first_s = warpgroup_mma_wait(0, deps=(first_made,))
    arrive_named(SLOT_OF_K + k, ALL)
    k, k_parity = advance(k, k_parity, T.SLOTS)
    if T.Q_SLOTS == 1:
        arrive_if(BUFFER_OF_Q, (head >= 0) & (blocks == 1), ALL, False)
    p, shift = _first_softmax(
        first_s, softmax, m * TILE + W * 64, blocks, items.sk, (to_right, to_left, end),
        HALF, T,
    )  # fmt: skip
    top = shift
    if T.SUM:
        l_lanes = by_lane(p)
    p_rounded = p.to(dtype)
    while head >= 0:
        total_shift = shift
        l_total = gl.zeros([64], gl.float32, RE)
        total = 0
        if T.SEGMENT and not AWAY:
            near, _ = split(acc, FAR)
            near_l: gl.constexpr = near.type.layout
            total = gl.zeros([64, near.shape[1]], gl.float32, near_l)
        in_segment = 0  # blocks that acc has
        for begin in range(0, blocks - 1, T.SEGMENT if T.SEGMENT else 2**30):
            in_segment = blocks - 1 - begin
            if T.SEGMENT:
                in_segment = gl.minimum(in_segment, T.SEGMENT)
            if FENCED:
                mbarrier.wait(k_full.index(k), k_parity)
            for i in range(in_segment):
                if not FENCED:
                    mbarrier.wait(k_full.index(k), k_parity)
                sync_named(TURN + W, "256", 4)
                if not T.Q_IN_REGISTERS:
                    q = operand(
                        q_s, (tiles & (T.Q_SLOTS - 1)) * 2 + W, T.PARTS, T.Q_IN_REGISTERS, Q_L
                    )
                s_made = scores(q, q_s, (tiles & (T.Q_SLOTS - 1)) * 2 + W, k_s, k, zero_s, T.PARTS)
                mbarrier.wait(v_full.index(v), v_parity)
                if T.ROUNDED:
                    l_made = add_rounded_sum(p_rounded, smem.ones, l_rounded, i > 0, PE_L)
                made = add_weighted(p_rounded, v_s.index(v), acc, i > 0, P_L)
                arrive_named(TURN + 1 - W, "256")
                s = warpgroup_mma_wait(BEHIND, deps=(s_made,))
                arrive_named(SLOT_OF_K + k, ALL)
                k, k_parity = advance(k, k_parity, T.SLOTS)
                if T.Q_SLOTS == 1:
                    arrive_if(BUFFER_OF_Q, begin + i + 2 == blocks, ALL, False)
                s = softened(s, softmax.steepness, T.CAPPED)
                if T.BAND:
                    past = (begin + i + 1) * T.BN
                    if at_edge(to_right + past, to_left + past, end + past, T.BN):
                        s = hidden_outside(s, to_right + past, to_left + past, end + past)
                largest = gl.max(s, 1) * softmax.unit
                if T.BAND:
                    largest = gl.maximum(largest, NOTHING)
                top = gl.maximum(top, largest)
                new_shift = gl.maximum(largest, top - OWN_SHIFT_BOUND)
                alpha = gl.exp2(shift - new_shift)
                shift = new_shift
                x = s * softmax.unit - gl.expand_dims(shift, 1)
                released = (begin + i == 0) & (tiles > 0)
                if FENCED:
                    xa, xb = halves(x)
                    pa = gl.exp2(xa)
                    if T.Q_SLOTS == 2:
                        arrive_if(BUFFER_OF_Q + ((tiles & 1) ^ 1), released, ALL, True)
                    # A wait that is a loop: ptxas moves the wait for P V up to here at most.
                    mbarrier.wait(k_full.index(k), k_parity, pred=i + 1 < in_segment)
                    p = whole(pa, gl.exp2(xb), S_L)
                else:
                    p = gl.exp2(x)
                    if T.Q_SLOTS == 2:
                        arrive_if(BUFFER_OF_Q + ((tiles & 1) ^ 1), released, ALL, True)
                if T.SUM:
                    factor = gl.expand_dims(gl.convert_layout(alpha, RL), 1)
                    l_lanes = l_lanes * factor + by_lane(p)
                p_rounded = p.to(dtype)
                if T.ROUNDED:
                    l_done, done = warpgroup_mma_wait(0, deps=(l_made, made))
                    l_rounded = l_done * gl.expand_dims(gl.convert_layout(alpha, RE), 1)
                else:
                    done = warpgroup_mma_wait(0, deps=(made,))
                arrive_named(SLOT_OF_V + v, ALL)
                v, v_parity = advance(v, v_parity, T.SLOTS)
                acc = done * gl.expand_dims(gl.convert_layout(alpha, RO), 1)
            if T.SEGMENT and in_segment == T.SEGMENT:
                new_factor = gl.exp2(total_shift - shift)
                if AWAY:
                    if begin > 0:
                        acc = add_kept(total_p, acc, new_factor)
                    keep(total_p, acc)
                else:
                    total, rest = join_total(acc, total, far_s, begin > 0, new_factor, FAR)
                if FAR:
                    tma.store_wait(0)
                    put_away(far_s, rest)
                l_total = l_total * gl.convert_layout(new_factor, RE) + gl.max(l_rounded, 1)
                total_shift = shift
                in_segment = 0
        if T.Q_SLOTS == 2:
            arrive_if(BUFFER_OF_Q + ((tiles & 1) ^ 1), (blocks == 1) & (tiles > 0), ALL, True)
        # The last product of this tile, with the first scores of the next: after the last tile, of
        # what lies there, which nobody reads.
        out = (tiles & (T.Q_SLOTS - 1)) * 2 + W  # through Q's place if the next tile has another
        tiles += 1
        of_q = tiles & (T.Q_SLOTS - 1)
        mbarrier.wait(q_full.index(of_q), (tiles >> (T.Q_SLOTS - 1)) & 1)
        next_head, next_t, _, _ = announced(item_s, tiles, T.Q_SLOTS, one)
        more = next_head >= 0
        if T.PACKED:
            next_t = gl.where(more, next_t, 0)
        next_m, next_blocks, to_right, to_left, end = _tile(next_t, items, W, T)
        q = operand(q_s, of_q * 2 + W, T.PARTS, T.Q_IN_REGISTERS, Q_L)
        mbarrier.wait(k_full.index(k), k_parity, pred=more)
        sync_named(TURN + W, "256", 4)
        first_made = _first_scores(q, q_s, of_q * 2 + W, k_s, k, T.BN, T.PARTS, HALF)
        mbarrier.wait(v_full.index(v), v_parity)
        if T.ROUNDED:
            l_made = add_rounded_sum(p_rounded, smem.ones, l_rounded, in_segment > 0, PE_L)
        made = add_weighted(p_rounded, v_s.index(v), acc, in_segment > 0, P_L)
        arrive_named(TURN + 1 - W, "256")
        first_s = warpgroup_mma_wait(BEHIND, deps=(first_made,))
        arrive_if(SLOT_OF_K + k, more, ALL, False)
        if T.Q_SLOTS == 1:
            arrive_if(BUFFER_OF_Q, more & (next_blocks == 1), ALL, False)
        k, k_parity = advance(k, k_parity, T.SLOTS)
        row_shift = gl.convert_layout(shift, RO)
        row_top = gl.convert_layout(top, RO)
        l_sum = gl.convert_layout(gl.sum(l_lanes, 1), RO)
        total_factor = gl.exp2(total_shift - shift)
        p, shift = _first_softmax(
            first_s, softmax, next_m * TILE + W * 64, next_blocks, items.sk,
            (to_right, to_left, end), HALF, T,
        )  # fmt: skip
        top = shift
        if T.SUM:
            l_lanes = by_lane(p)
        p_rounded = p.to(dtype)
        if T.ROUNDED:
            l_rounded, acc = warpgroup_mma_wait(0, deps=(l_made, made))
        else:
            acc = warpgroup_mma_wait(0, deps=(made,))
        arrive_named(SLOT_OF_V + v, ALL)
        v, v_parity = advance(v, v_parity, T.SLOTS)
        l = l_sum
        if T.ROUNDED:
            part = gl.max(l_rounded, 1)
            if T.SEGMENT and blocks > T.SEGMENT:
                part = part + l_total * gl.convert_layout(total_factor, RE)
                if AWAY:
                    acc = add_kept(total_p, acc, total_factor)
                else:
                    near, rest = join_total(acc, total, far_s, True, total_factor, FAR)
                    acc = whole(near, rest, O_L) if FAR else near
            l = gl.convert_layout(part, RO)
        row = m * TILE + W * 64
        rows = row + gl.arange(0, 64, RO)
        _, t, b, h = announced(item_s, tiles - 1, T.Q_SLOTS, one)
        start = 0
        length = items.sq
        if T.PACKED:
            _, start, length, _, _ = place_of(items.places, t, items.sq, items.sk, True)
        if T.HAS_MAX:
            if T.BAND:
                row_top = gl.where(row_top > NOTHING, row_top, -float("inf"))
            seen = gl.where(rows < length, row_top, -float("inf"))
            gl.atomic_max(outputs.max_ptr + h, gl.max(seen, 0) * LN2, sem="relaxed")
        weight = gl.full([64], 1.0, gl.float32, RO)
        if T.HAS_SINK:
            sink = gl.load(softmax.sink_ptr + h).to(gl.float32) * LOG2E
            with_sink = gl.maximum(row_shift, sink)
            weight = gl.exp2(row_shift - with_sink)
            taken = gl.exp2(sink - with_sink)
            row_shift = with_sink
            l = l * weight + taken
            l_sum = l_sum * weight + taken
        place = head.to(gl.int64) * outputs.tq + start + rows
        if T.SUM:
            gl.store(
                outputs.lse_ptr + place, (row_shift + gl.log2(l_sum)) * LN2, mask=rows < length
            )
        if outputs.rest_ptr is not None:
            first, rest = log_sum_exp_planes(row_shift, l)
            gl.store(outputs.row_ptr + place, first, mask=rows < length)
            gl.store(outputs.rest_ptr + place, rest, mask=rows < length)
        elif outputs.row_ptr is not None:
            gl.store(outputs.row_ptr + place, (row_shift + gl.log2(l)) * LN2, mask=rows < length)
        share = weight * (1.0 / l)
        if T.BAND:
            share = gl.where(l > 0, share, 0.0)
        acc = acc * gl.expand_dims(share, 1)
        if outputs.part_ptr is None:
            store_rows(
                acc, smem.high.index(out), smem.low.index(W if T.HAS_LOW else 0),
                outputs.o_desc, outputs.low_desc, row,
                b * outputs.stride_b + h * outputs.stride_h, start, length, T.HAS_LOW, T.PACKED,
            )  # fmt: skip
        else:
            columns = gl.arange(0, T.DV, gl.SliceLayout(0, O_L))
            here = b.to(gl.int64) * outputs.stride_b + h.to(gl.int64) * outputs.stride_h
            here = gl.expand_dims(rows.to(gl.int64) * outputs.stride_s + here, 1)
            inside = gl.expand_dims(rows < length, 1)
            gl.store(outputs.part_ptr + here + gl.expand_dims(columns, 0), acc, mask=inside)
        head = next_head
        m = next_m
        blocks = next_blocks
    tma.store_wait(0)


__all__ = ["TURN", "announced", "forward_consumer", "operand", "scores"]

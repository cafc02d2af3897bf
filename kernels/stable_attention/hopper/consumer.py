"""The consumers of the forward pass on sm_90: softmax, products and epilogue of 64 queries a tile.

Block j's scores are issued together with the product P V of block j - 1, and the softmax of j runs
while that product does. Tiles are chained the same way: a tile's first scores are issued with the
last product of the tile before, whose epilogue follows the new tile's first softmax. Blocks go from
last to first: only the one that starts a tile looks at a mask, or those at the edges of a BAND
(`tiles`). The two consumers take turns in issuing.

Under SEGMENT the tensor cores accumulate so many blocks at most (`numerics`, on truncation); then
what they have joins a float32 total, rounded to nearest. Registers have room for 64 columns of it;
others lie in the shared memory through which O's low-order part leaves at the end.

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
    add_rounded_sum,
    add_weighted,
    by_lane,
    halves,
    hidden_after,
    hidden_outside,
    join_total,
    opaque_zeros,
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
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    zero = gl.zeros([64, N], gl.float32, layout)
    return scores(q, q_s, place, k_s, k, zero, PARTS)


@gluon.jit
def _first_softmax(
    s, unit, steepness, row, blocks, sk, right, left, end, BN: gl.constexpr, HALF: gl.constexpr,
    CAUSAL: gl.constexpr, CAPPED: gl.constexpr, BAND: gl.constexpr, EVEN: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """(P [64, BN], shift) of the block that starts a row: its maximum is the shift.

    row: the first query. right, left, end: `limits_of`.
    """
    first_key = (blocks - 1) * BN
    s = softened(s, steepness, CAPPED)
    if BAND:
        s = hidden_outside(s, right, left, end)
    elif CAUSAL:
        s = hidden_after(s, row - first_key, True)
    elif not EVEN:
        s = hidden_after(s, sk - 1 - first_key, False)
    shift = gl.max(s, 1) * unit
    if BAND:
        shift = gl.maximum(shift, NOTHING)
    p = gl.exp2(s * unit - gl.expand_dims(shift, 1))
    if HALF:
        p = whole(p, opaque_zeros(p), LAYOUT)
    return p, gl.convert_layout(shift, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def forward_consumer(
    o_desc, low_desc, part_ptr, lse_ptr, row_ptr, max_ptr, sink_ptr, places,
    q_s, k_s, v_s, high_s, low_s, total_s, ones_s, item_s, q_full, k_full, v_full,
    sq, sk, tq, left, right, key_blocks, stride_ob, stride_os, stride_oh, unit, steepness,
    W: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr,
    Q_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, CAPPED: gl.constexpr, BAND: gl.constexpr,
    PACKED: gl.constexpr, EVEN: gl.constexpr,
    SEGMENT: gl.constexpr, ROUNDED: gl.constexpr, SUM: gl.constexpr, HAS_LOW: gl.constexpr,
    HAS_MAX: gl.constexpr, HAS_SINK: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    # The first consumer sees only half of the keys of a diagonal block.
    HALF: gl.constexpr = CAUSAL and W == 0
    S_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    O_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16]
    )
    E_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16]
    )
    Q_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=2)
    PE_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=E_L, k_width=2)
    RO: gl.constexpr = gl.SliceLayout(1, O_L)
    RE: gl.constexpr = gl.SliceLayout(1, E_L)
    RL: gl.constexpr = gl.SliceLayout(1, LANES)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SLOT_OF_V: gl.constexpr = SLOT_OF_K + SLOTS
    BUFFER_OF_Q: gl.constexpr = SLOT_OF_V + SLOTS
    PARTS: gl.constexpr = k_s.shape[0] // SLOTS
    # Products issued after the scores: two of P V, and one of the rounded sum for 32 keys.
    BEHIND: gl.constexpr = 2 + BN // 32 if ROUNDED else 2
    # Whether half of the segments' total is in shared memory: registers have no room for it.
    FAR: gl.constexpr = DV == 128 and BN == 128
    # With the rounded sum ptxas would wait for P V before the exponentials; see below.
    FENCED: gl.constexpr = ROUNDED
    dtype: gl.constexpr = k_s.dtype
    zero_s = gl.zeros([64, BN], gl.float32, S_L)
    acc = gl.zeros([64, DV], gl.float32, O_L)
    l_rounded = gl.zeros([64, 8], gl.float32, E_L)
    l_lanes = gl.zeros([64, 4], gl.float32, LANES)
    far_s = total_s
    if SEGMENT and FAR:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        far_s = total_s.index(W)._reinterpret(gl.float32, [32, 128], flat)
    k = 0
    k_parity = 0
    v = 0
    v_parity = 0
    tiles = 0
    if W == 1:
        arrive_named(TURN, "256")
    mbarrier.wait(q_full.index(0), 0)
    head, t, _, _ = announced(item_s, 0, Q_SLOTS, one)
    if PACKED:
        t = gl.where(head >= 0, t, 0)
    m, _, queries, _, keys = place_of(places, t, sq, sk, PACKED)
    last, blocks = key_blocks_of(m, key_blocks, queries, keys, left, right, BN, CAUSAL, BAND)
    to_right, to_left, end = limits_of(m, last, queries, keys, left, right, W, BN)
    q = operand(q_s, W, PARTS, Q_IN_REGISTERS, Q_L)
    # Of packed sequences there may be fewer tiles than programs.
    mbarrier.wait(k_full.index(k), k_parity, pred=head >= 0)
    sync_named(TURN + W, "256", 4)
    first_made = _first_scores(q, q_s, W, k_s, k, BN, PARTS, HALF)
    arrive_named(TURN + 1 - W, "256")
    first_s = warpgroup_mma_wait(0, deps=(first_made,))
    arrive_named(SLOT_OF_K + k, ALL)
    k, k_parity = advance(k, k_parity, SLOTS)
    if Q_SLOTS == 1:
        arrive_if(BUFFER_OF_Q, (head >= 0) & (blocks == 1), ALL, False)
    p, shift = _first_softmax(
        first_s, unit, steepness, m * TILE + W * 64, blocks, sk, to_right, to_left, end,
        BN, HALF, CAUSAL, CAPPED, BAND, EVEN, S_L,
    )  # fmt: skip
    top = shift
    if SUM:
        l_lanes = by_lane(p)
    p_rounded = p.to(dtype)
    while head >= 0:
        total_shift = shift
        l_total = gl.zeros([64], gl.float32, RE)
        total = 0
        if SEGMENT:
            near, _ = split(acc, FAR)
            near_l: gl.constexpr = near.type.layout
            total = gl.zeros([64, near.shape[1]], gl.float32, near_l)
        in_segment = 0  # blocks that acc has
        for begin in range(0, blocks - 1, SEGMENT if SEGMENT else 2**30):
            in_segment = blocks - 1 - begin
            if SEGMENT:
                in_segment = gl.minimum(in_segment, SEGMENT)
            if FENCED:
                mbarrier.wait(k_full.index(k), k_parity)
            for i in range(in_segment):
                if not FENCED:
                    mbarrier.wait(k_full.index(k), k_parity)
                sync_named(TURN + W, "256", 4)
                if not Q_IN_REGISTERS:
                    q = operand(q_s, (tiles & (Q_SLOTS - 1)) * 2 + W, PARTS, Q_IN_REGISTERS, Q_L)
                s_made = scores(q, q_s, (tiles & (Q_SLOTS - 1)) * 2 + W, k_s, k, zero_s, PARTS)
                mbarrier.wait(v_full.index(v), v_parity)
                if ROUNDED:
                    l_made = add_rounded_sum(p_rounded, ones_s, l_rounded, i > 0, PE_L)
                made = add_weighted(p_rounded, v_s.index(v), acc, i > 0, P_L)
                arrive_named(TURN + 1 - W, "256")
                s = warpgroup_mma_wait(BEHIND, deps=(s_made,))
                arrive_named(SLOT_OF_K + k, ALL)
                k, k_parity = advance(k, k_parity, SLOTS)
                if Q_SLOTS == 1:
                    arrive_if(BUFFER_OF_Q, begin + i + 2 == blocks, ALL, False)
                s = softened(s, steepness, CAPPED)
                if BAND:
                    past = (begin + i + 1) * BN
                    if at_edge(to_right + past, to_left + past, end + past, BN):
                        s = hidden_outside(s, to_right + past, to_left + past, end + past)
                largest = gl.max(s, 1) * unit
                if BAND:
                    largest = gl.maximum(largest, NOTHING)
                top = gl.maximum(top, largest)
                new_shift = gl.maximum(largest, top - OWN_SHIFT_BOUND)
                alpha = gl.exp2(shift - new_shift)
                shift = new_shift
                x = s * unit - gl.expand_dims(shift, 1)
                released = (begin + i == 0) & (tiles > 0)
                if FENCED:
                    xa, xb = halves(x)
                    pa = gl.exp2(xa)
                    if Q_SLOTS == 2:
                        arrive_if(BUFFER_OF_Q + ((tiles & 1) ^ 1), released, ALL, True)
                    # A wait that is a loop: ptxas moves the wait for P V up to here at most.
                    mbarrier.wait(k_full.index(k), k_parity, pred=i + 1 < in_segment)
                    p = whole(pa, gl.exp2(xb), S_L)
                else:
                    p = gl.exp2(x)
                    if Q_SLOTS == 2:
                        arrive_if(BUFFER_OF_Q + ((tiles & 1) ^ 1), released, ALL, True)
                if SUM:
                    factor = gl.expand_dims(gl.convert_layout(alpha, RL), 1)
                    l_lanes = l_lanes * factor + by_lane(p)
                p_rounded = p.to(dtype)
                if ROUNDED:
                    l_done, done = warpgroup_mma_wait(0, deps=(l_made, made))
                    l_rounded = l_done * gl.expand_dims(gl.convert_layout(alpha, RE), 1)
                else:
                    done = warpgroup_mma_wait(0, deps=(made,))
                arrive_named(SLOT_OF_V + v, ALL)
                v, v_parity = advance(v, v_parity, SLOTS)
                acc = done * gl.expand_dims(gl.convert_layout(alpha, RO), 1)
            if SEGMENT and in_segment == SEGMENT:
                new_factor = gl.exp2(total_shift - shift)
                total, rest = join_total(acc, total, far_s, begin > 0, new_factor, FAR)
                if FAR:
                    tma.store_wait(0)
                    put_away(far_s, rest)
                l_total = l_total * gl.convert_layout(new_factor, RE) + gl.max(l_rounded, 1)
                total_shift = shift
                in_segment = 0
        if Q_SLOTS == 2:
            arrive_if(BUFFER_OF_Q + ((tiles & 1) ^ 1), (blocks == 1) & (tiles > 0), ALL, True)
        # The last product of this tile, with the first scores of the next: after the last tile, of
        # what lies there, which nobody reads.
        out = (tiles & (Q_SLOTS - 1)) * 2 + W  # through Q's place if the next tile has another
        tiles += 1
        of_q = tiles & (Q_SLOTS - 1)
        mbarrier.wait(q_full.index(of_q), (tiles >> (Q_SLOTS - 1)) & 1)
        next_head, next_t, _, _ = announced(item_s, tiles, Q_SLOTS, one)
        more = next_head >= 0
        if PACKED:
            next_t = gl.where(more, next_t, 0)
        next_m, _, next_queries, _, keys = place_of(places, next_t, sq, sk, PACKED)
        last, next_blocks = key_blocks_of(
            next_m, key_blocks, next_queries, keys, left, right, BN, CAUSAL, BAND
        )
        to_right, to_left, end = limits_of(next_m, last, next_queries, keys, left, right, W, BN)
        q = operand(q_s, of_q * 2 + W, PARTS, Q_IN_REGISTERS, Q_L)
        mbarrier.wait(k_full.index(k), k_parity, pred=more)
        sync_named(TURN + W, "256", 4)
        first_made = _first_scores(q, q_s, of_q * 2 + W, k_s, k, BN, PARTS, HALF)
        mbarrier.wait(v_full.index(v), v_parity)
        if ROUNDED:
            l_made = add_rounded_sum(p_rounded, ones_s, l_rounded, in_segment > 0, PE_L)
        made = add_weighted(p_rounded, v_s.index(v), acc, in_segment > 0, P_L)
        arrive_named(TURN + 1 - W, "256")
        first_s = warpgroup_mma_wait(BEHIND, deps=(first_made,))
        arrive_if(SLOT_OF_K + k, more, ALL, False)
        if Q_SLOTS == 1:
            arrive_if(BUFFER_OF_Q, more & (next_blocks == 1), ALL, False)
        k, k_parity = advance(k, k_parity, SLOTS)
        row_shift = gl.convert_layout(shift, RO)
        row_top = gl.convert_layout(top, RO)
        l_sum = gl.convert_layout(gl.sum(l_lanes, 1), RO)
        total_factor = gl.exp2(total_shift - shift)
        p, shift = _first_softmax(
            first_s, unit, steepness, next_m * TILE + W * 64, next_blocks, sk,
            to_right, to_left, end, BN, HALF, CAUSAL, CAPPED, BAND, EVEN, S_L,
        )  # fmt: skip
        top = shift
        if SUM:
            l_lanes = by_lane(p)
        p_rounded = p.to(dtype)
        if ROUNDED:
            l_rounded, acc = warpgroup_mma_wait(0, deps=(l_made, made))
        else:
            acc = warpgroup_mma_wait(0, deps=(made,))
        arrive_named(SLOT_OF_V + v, ALL)
        v, v_parity = advance(v, v_parity, SLOTS)
        l = l_sum
        if ROUNDED:
            part = gl.max(l_rounded, 1)
            if SEGMENT and blocks > SEGMENT:
                part = part + l_total * gl.convert_layout(total_factor, RE)
                near, rest = join_total(acc, total, far_s, True, total_factor, FAR)
                acc = whole(near, rest, O_L) if FAR else near
            l = gl.convert_layout(part, RO)
        row = m * TILE + W * 64
        rows = row + gl.arange(0, 64, RO)
        _, t, b, h = announced(item_s, tiles - 1, Q_SLOTS, one)
        start = 0
        length = sq
        if PACKED:
            _, start, length, _, _ = place_of(places, t, sq, sk, True)
        if HAS_MAX:
            if BAND:
                row_top = gl.where(row_top > NOTHING, row_top, -float("inf"))
            seen = gl.where(rows < length, row_top, -float("inf"))
            gl.atomic_max(max_ptr + h, gl.max(seen, 0) * LN2, sem="relaxed")
        weight = gl.full([64], 1.0, gl.float32, RO)
        if HAS_SINK:
            sink = gl.load(sink_ptr + h).to(gl.float32) * LOG2E
            with_sink = gl.maximum(row_shift, sink)
            weight = gl.exp2(row_shift - with_sink)
            taken = gl.exp2(sink - with_sink)
            row_shift = with_sink
            l = l * weight + taken
            l_sum = l_sum * weight + taken
        place = head.to(gl.int64) * tq + start + rows
        if SUM:
            gl.store(lse_ptr + place, (row_shift + gl.log2(l_sum)) * LN2, mask=rows < length)
        if row_ptr is not None:
            gl.store(row_ptr + place, (row_shift + gl.log2(l)) * LN2, mask=rows < length)
        share = weight * (1.0 / l)
        if BAND:
            share = gl.where(l > 0, share, 0.0)
        acc = acc * gl.expand_dims(share, 1)
        if part_ptr is None:
            store_rows(
                acc, high_s.index(out), low_s.index(W if HAS_LOW else 0),
                o_desc, low_desc, row, b * stride_ob + h * stride_oh, start, length,
                HAS_LOW, PACKED,
            )  # fmt: skip
        else:
            columns = gl.arange(0, DV, gl.SliceLayout(0, O_L))
            here = b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh
            here = gl.expand_dims(rows.to(gl.int64) * stride_os + here, 1)
            inside = gl.expand_dims(rows < length, 1)
            gl.store(part_ptr + here + gl.expand_dims(columns, 0), acc, mask=inside)
        head = next_head
        m = next_m
        blocks = next_blocks
    tma.store_wait(0)


__all__ = ["TURN", "announced", "forward_consumer", "operand", "scores"]

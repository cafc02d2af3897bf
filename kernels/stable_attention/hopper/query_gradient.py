"""dQ alone on sm_90, for head dims whose backward pass `backward` has no room for.

Shape legend: as in `forward`; dO is [queries, DV] as O is. shift and delta are of rows, float32.

The roles of `forward`: a producer, and two consumers with 64 queries of a tile each. Q and dO of a
tile stay in shared memory while blocks of K and V pass, the last block first. dQ of a block is
issued together with S and dP of the next one, so P is made while products run. In registers are dQ,
S, dP and the rounded dS, which is a left side.

Blocks that a consumer's queries do not see, at the diagonal and at the edges of windows, it passes
over. dQ is owned by one consumer and added up in the order of blocks: repeats are bitwise equal.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stable_attention.hopper.barriers import (
    advance,
    arrive_if,
    arrive_named,
    next_item,
    prefetch,
    sync_named,
    uniform,
)
from stable_attention.hopper.consumer import TURN, announced, operand, scores
from stable_attention.hopper.producer import ALL, ITEM, ITEMS, SLOT_OF_K, announce
from stable_attention.hopper.softmax import hidden_outside, rounded_pairs, store_pairs
from stable_attention.hopper.tiles import (
    TILE,
    at_edge,
    item_at,
    key_blocks_of,
    keys_of,
    limits_of,
    load_parts,
    load_tile,
    place_of,
)
from stable_attention.numerics import LOG2E


@gluon.jit
def _load_queries(
    desc, m, column, start, queries, full, ring, tiles, free, SLOTS: gl.constexpr,
    PARTS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile of Q or dO to its slot, once what was there is read."""
    slot = tiles & (SLOTS - 1)
    if tiles >= SLOTS:
        sync_named(free + slot, ALL, 1)
    mbarrier.expect(full.index(slot), 2 * PARTS * desc.block_type.nbytes)
    for w in gl.static_range(2):
        load_parts(
            desc, m * TILE + w * 64, column, start, queries, full.index(slot), ring,
            slot * 2 + w, PARTS, PACKED,
        )  # fmt: skip


@gluon.jit
def _prefetch_queries(
    q_ptr, do_ptr, item, places, query_tiles, head_block, heads, sq, sk,
    stride_qb, stride_qs, stride_qh, stride_gb, stride_gs, stride_gh,
    Q_BYTES: gl.constexpr, DO_BYTES: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Have an item's tiles of Q and dO in L2 when their places in shared memory get free: all
    programs change tiles at about one time."""
    t, head = item_at(item, query_tiles, head_block, CAUSAL)
    b = head // heads
    h = head % heads
    m, start, queries, _, _ = place_of(places, t, sq, sk, PACKED)
    left = queries - m * TILE
    token = (start + m * TILE).to(gl.int64)
    q_ptr += token * stride_qs + b * stride_qb + h * stride_qh
    do_ptr += token * stride_gs + b * stride_gb + h * stride_gh
    prefetch(q_ptr, left, stride_qs * 2, TILE, Q_BYTES)
    prefetch(do_ptr, left, stride_gs * 2, TILE, DO_BYTES)


@gluon.jit
def _producer(
    q_ptr, do_ptr, stride_qs, stride_gs,
    q_desc, do_desc, k_desc, v_desc, counter, places, q_s, do_s, k_s, v_s, item_s,
    q_full, do_full, k_full, v_full,
    sq, sk, left, right, query_tiles, key_blocks, head_block, all_heads, heads,
    stride_qb, stride_qh, stride_gb, stride_gh, stride_kb, stride_kh, stride_vb, stride_vh,
    GROUP: gl.constexpr, BN: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
    Q_SLOTS: gl.constexpr, PARTS: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr,
    PACKED: gl.constexpr, DO_IN_REGISTERS: gl.constexpr, AHEAD: gl.constexpr,
    Q_BYTES: gl.constexpr, DO_BYTES: gl.constexpr,
):  # fmt: skip
    SLOT_OF_V: gl.constexpr = SLOT_OF_K + K_SLOTS
    BUFFER_OF_Q: gl.constexpr = SLOT_OF_V + V_SLOTS
    k = 0
    v = 0
    copied = 0
    tiles = 0
    if PACKED:
        query_tiles = gl.load(counter + 1)
    items = query_tiles * all_heads
    item = gl.program_id(0)
    running = True
    while running:
        running = item < items
        t, head = item_at(item, query_tiles, head_block, CAUSAL)
        b = head // heads
        h = head % heads
        announce(item_s, tiles & (ITEMS - 1), gl.where(running, head, -1), t, b, h)
        if running:
            m, start_q, queries, start_k, keys = place_of(places, t, sq, sk, PACKED)
            hk = h // GROUP
            last, blocks = key_blocks_of(m, key_blocks, queries, keys, left, right, BN, False, BAND)
            q_column = b * stride_qb + h * stride_qh
            do_column = b * stride_gb + h * stride_gh
            if DO_IN_REGISTERS:
                # Its place is free for long.
                _load_queries(
                    do_desc, m, do_column, start_q, queries, do_full, do_s, tiles,
                    BUFFER_OF_Q + Q_SLOTS, 1, 1, PACKED,
                )  # fmt: skip
            _load_queries(
                q_desc, m, q_column, start_q, queries, q_full, q_s, tiles, BUFFER_OF_Q,
                Q_SLOTS, PARTS, PACKED,
            )  # fmt: skip
            k_column = b * stride_kb + hk * stride_kh
            v_column = b * stride_vb + hk * stride_vh
            for i in range(blocks):
                if copied >= K_SLOTS:
                    sync_named(SLOT_OF_K + k, ALL, 1)
                mbarrier.expect(k_full.index(k), PARTS * k_desc.block_type.nbytes)
                load_parts(
                    k_desc, (last - i) * BN, k_column, start_k, keys, k_full.index(k),
                    k_s, k, PARTS, PACKED,
                )  # fmt: skip
                k = gl.where(k + 1 == K_SLOTS, 0, k + 1)
                copied += 1
                if AHEAD and i == gl.minimum(1, blocks - 1):
                    # What some program is to take next.
                    other = item + gl.num_programs(0)
                    if other < items:
                        _prefetch_queries(
                            q_ptr, do_ptr, other, places, query_tiles, head_block, heads, sq, sk,
                            stride_qb, stride_qs, stride_qh, stride_gb, stride_gs, stride_gh,
                            Q_BYTES, DO_BYTES, CAUSAL, PACKED,
                        )  # fmt: skip
                if i == 0 and not DO_IN_REGISTERS:
                    _load_queries(
                        do_desc, m, do_column, start_q, queries, do_full, do_s, tiles,
                        BUFFER_OF_Q + Q_SLOTS, 1, 1, PACKED,
                    )  # fmt: skip
                if copied > V_SLOTS:
                    sync_named(SLOT_OF_V + v, ALL, 1)
                mbarrier.expect(v_full.index(v), v_desc.block_type.nbytes)
                load_tile(
                    v_desc, (last - i) * BN, v_column, start_k, keys, v_full.index(v),
                    v_s.index(v), PACKED,
                )  # fmt: skip
                v = gl.where(v + 1 == V_SLOTS, 0, v + 1)
            tiles += 1
            # As many numbers are taken as there are items, so the counter ends as it began.
            item = gl.num_programs(0) + next_item(counter, items - 1)
        else:
            slot = tiles & (Q_SLOTS - 1)
            if tiles >= Q_SLOTS:
                sync_named(BUFFER_OF_Q + slot, ALL, 1)
            mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def _place(item_s, tiles, places, sq, sk, PACKED: gl.constexpr):
    """(head counted over the batch or -1, batch entry, head, tile within its sequence, first query
    token, queries, keys) of an item."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    head, t, b, h = announced(item_s, tiles, 1, one)
    head = uniform(head)
    t = uniform(t)
    if PACKED:
        t = gl.where(head >= 0, t, 0)
    m, start, queries, _, keys = place_of(places, t, sq, sk, PACKED)
    if PACKED:
        m = uniform(m)
        start = uniform(start)
        queries = uniform(queries)
        keys = uniform(keys)
    return head, uniform(b), uniform(h), m, start, queries, keys


@gluon.jit
def _pass_over(
    n, k, k_parity, v, v_parity, k_full, v_full,
    W: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Free the slots of so many blocks unread, once they are full, as they would be twice else."""
    for _ in range(n):
        mbarrier.wait(k_full.index(k), k_parity)
        arrive_named(SLOT_OF_K + k, ALL)
        if TURNS:
            sync_named(TURN + W, "256", 4)
            arrive_named(TURN + 1 - W, "256")
        k, k_parity = advance(k, k_parity, K_SLOTS)
        mbarrier.wait(v_full.index(v), v_parity)
        arrive_named(SLOT_OF_K + K_SLOTS + v, ALL)
        v, v_parity = advance(v, v_parity, V_SLOTS)
    return k, k_parity, v, v_parity


@gluon.jit
def _add_keys(dq, ds, k_s, k, use_dq, PARTS: gl.constexpr):
    """Start dQ + dS K, a tuple of the parts of K's columns."""
    a = warpgroup_mma(ds, k_s.index(k * PARTS), dq[0], use_acc=use_dq, is_async=True)
    if PARTS == 1:
        return (a,)
    else:
        b = warpgroup_mma(ds, k_s.index(k * PARTS + 1), dq[1], use_acc=use_dq, is_async=True)
        c = warpgroup_mma(ds, k_s.index(k * PARTS + 2), dq[2], use_acc=use_dq, is_async=True)
        return (a, b, c)


@gluon.jit
def _await_keys(pending: gl.constexpr, dq, s, dp, PARTS: gl.constexpr):
    """Await dQ, after which S and dP were started, ``pending`` products."""
    if PARTS == 1:
        a, s, dp = warpgroup_mma_wait(pending, deps=(dq[0], s, dp))
        return (a,), s, dp
    else:
        a, b, c, s, dp = warpgroup_mma_wait(pending, deps=(dq[0], dq[1], dq[2], s, dp))
        return (a, b, c), s, dp


@gluon.jit
def _probabilities(s, shift, unit, right, left, end, past, BN: gl.constexpr, MASKED: gl.constexpr):
    """P [64, BN] float32 of the block that is ``past`` keys before the one of `limits_of`."""
    if MASKED:  # noqa: SIM102
        if at_edge(right + past, left + past, end + past, BN):
            s = hidden_outside(s, right + past, left + past, end + past)
    return gl.exp2(s * unit - gl.expand_dims(shift, 1))


@gluon.jit
def _store(
    dq_ptr, out, tiles, item_s, places, sq, sk, stride_b, stride_s, stride_h,
    W: gl.constexpr, PARTS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dQ of the item before number ``tiles``, if there is one."""
    N: gl.constexpr = out[0].shape[1]
    _, b, h, m, start, queries, _ = _place(item_s, gl.maximum(tiles - 1, 0), places, sq, sk, PACKED)
    row = m * TILE + W * 64
    here = dq_ptr + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    here += (start + row).to(gl.int64) * stride_s
    left = gl.where(tiles > 0, queries - row, 0)
    for part in gl.static_range(PARTS):
        store_pairs(here + part * N * 2, out[part], left, stride_s.to(gl.int64) * 2)


@gluon.jit
def _consumer(
    dq_ptr, lse_ptr, delta_ptr, places, q_s, do_s, k_s, v_s, item_s,
    q_full, do_full, k_full, v_full,
    sq, sk, left, right, key_blocks, stride_lb, stride_lh,
    stride_dqb, stride_dqs, stride_dqh, unit, scale,
    W: gl.constexpr, BN: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
    Q_SLOTS: gl.constexpr, PARTS: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr,
    MASKED: gl.constexpr, DO_IN_REGISTERS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    DQ: gl.constexpr = k_s.shape[2]
    S_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DQ, 16]
    )
    DO_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
    DS_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DQ_L, k_width=2)
    RS: gl.constexpr = gl.SliceLayout(1, S_L)
    SLOT_OF_V: gl.constexpr = SLOT_OF_K + K_SLOTS
    BUFFER_OF_Q: gl.constexpr = SLOT_OF_V + V_SLOTS
    dtype: gl.constexpr = k_s.dtype
    zero_s = gl.zeros([64, BN], gl.float32, S_L)
    zero_dq = gl.zeros([64, DQ], gl.float32, DQ_L)
    k = 0
    k_parity = 0
    v = 0
    v_parity = 0
    tiles = 0
    if TURNS and W == 1:
        arrive_named(TURN, "256")
    out = rounded_pairs(zero_dq, 0.0, dtype)
    out = (out,) if PARTS == 1 else (out, out, out)
    mbarrier.wait(q_full.index(0), 0)
    head, b, h, m, start, queries, keys = _place(item_s, 0, places, sq, sk, PACKED)
    while head >= 0:
        last, blocks = key_blocks_of(m, key_blocks, queries, keys, left, right, BN, False, BAND)
        own = last  # the last block that these 64 queries see
        after = 0
        if BAND:
            row = m * TILE + W * 64
            first_key, last_key = keys_of(
                row, gl.minimum(row + 64, queries) - 1, queries, keys, left, right
            )
            first = last + 1 - blocks
            own = gl.minimum(gl.maximum(gl.maximum(last_key, 0) // BN, first), last)
            own_first = gl.minimum(gl.maximum(first_key // BN, first), own)
            after = own_first - first
            blocks = own - own_first + 1
            k, k_parity, v, v_parity = _pass_over(
                last - own, k, k_parity, v, v_parity, k_full, v_full, W, K_SLOTS, V_SLOTS,
                TURNS,
            )  # fmt: skip
        to_right, to_left, end = limits_of(m, own, queries, keys, left, right, W, BN)
        rows = m * TILE + W * 64 + gl.arange(0, 64, RS)
        place = b.to(gl.int64) * stride_lb + h.to(gl.int64) * stride_lh + start
        lse = gl.load(lse_ptr + place + rows, mask=rows < queries, other=-float("inf"))
        delta = gl.load(delta_ptr + place + rows, mask=rows < queries, other=0.0)
        # `numerics.lse_to_shift`
        shift = gl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
        mbarrier.wait(k_full.index(k), k_parity)
        slot = tiles & (Q_SLOTS - 1)
        # Opaque, so that descriptors of Q and dO are not kept in registers.
        w = uniform(W)
        w_q = slot * 2 + w
        s_made = scores(q_s.index(w_q * PARTS), q_s, w_q, k_s, k, zero_s, PARTS)
        _store(
            dq_ptr, out, tiles, item_s, places, sq, sk, stride_dqb, stride_dqs, stride_dqh,
            W, PARTS, PACKED,
        )  # fmt: skip
        mbarrier.wait(do_full.index(0), tiles & 1)
        do = operand(do_s, w, 1, DO_IN_REGISTERS, DO_L)
        mbarrier.wait(v_full.index(v), v_parity)
        dp_made = scores(do, do_s, w, v_s, v, zero_s, 1)
        s, dp_made = warpgroup_mma_wait(1, deps=(s_made, dp_made))
        arrive_if(BUFFER_OF_Q + slot, blocks == 1, ALL, False)
        p = _probabilities(s, shift, unit, to_right, to_left, end, 0, BN, MASKED)
        mbarrier.wait(v_full.index(v), v_parity)  # see below
        dp = warpgroup_mma_wait(0, deps=(dp_made,))
        arrive_named(SLOT_OF_V + v, ALL)
        v, v_parity = advance(v, v_parity, V_SLOTS)
        if DO_IN_REGISTERS:
            arrive_named(BUFFER_OF_Q + Q_SLOTS, ALL)
        ds = gl.convert_layout((p * (dp - gl.expand_dims(delta, 1))).to(dtype), DS_L)
        dq = (zero_dq,) if PARTS == 1 else (zero_dq, zero_dq, zero_dq)
        for i in range(1, blocks):
            before = k
            k, k_parity = advance(k, k_parity, K_SLOTS)
            if TURNS:
                sync_named(TURN + W, "256", 4)
            dq = _add_keys(dq, ds, k_s, before, i > 1, PARTS)
            if TURNS == 1:
                arrive_named(TURN + 1 - W, "256")
            w = uniform(W)
            w_q = (tiles & (Q_SLOTS - 1)) * 2 + w
            mbarrier.wait(k_full.index(k), k_parity)
            s_begun = scores(q_s.index(w_q * PARTS), q_s, w_q, k_s, k, zero_s, PARTS)
            if TURNS == 2:
                arrive_named(TURN + 1 - W, "256")
            if not DO_IN_REGISTERS:
                do = operand(do_s, w, 1, False, DO_L)
            mbarrier.wait(v_full.index(v), v_parity)
            dp_begun = scores(do, do_s, w, v_s, v, zero_s, 1)
            if TURNS == 3:
                arrive_named(TURN + 1 - W, "256")
            dq, s, dp = _await_keys(PARTS + 1, dq, s_begun, dp_begun, PARTS)
            arrive_named(SLOT_OF_K + before, ALL)
            s, dp = warpgroup_mma_wait(1, deps=(s, dp))
            arrive_if(BUFFER_OF_Q + slot, i + 1 == blocks, ALL, False)
            p = _probabilities(s, shift, unit, to_right, to_left, end, i * BN, BN, MASKED)
            # A wait that is a loop, for what is there: else ptxas moves that for dP before the
            # exponentials.
            mbarrier.wait(v_full.index(v), v_parity)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            arrive_named(SLOT_OF_V + v, ALL)
            v, v_parity = advance(v, v_parity, V_SLOTS)
            ds = gl.convert_layout((p * (dp - gl.expand_dims(delta, 1))).to(dtype), DS_L)
        if not DO_IN_REGISTERS:
            arrive_named(BUFFER_OF_Q + Q_SLOTS, ALL)
        if TURNS:
            sync_named(TURN + W, "256", 4)
        dq = _add_keys(dq, ds, k_s, k, blocks > 1, PARTS)
        if TURNS:
            arrive_named(TURN + 1 - W, "256")
        if PARTS == 1:
            a = warpgroup_mma_wait(0, deps=(dq[0],))
            out = (rounded_pairs(a, scale, dtype),)
        else:
            a, bb, c = warpgroup_mma_wait(0, deps=(dq[0], dq[1], dq[2]))
            out = (
                rounded_pairs(a, scale, dtype),
                rounded_pairs(bb, scale, dtype),
                rounded_pairs(c, scale, dtype),
            )
        arrive_named(SLOT_OF_K + k, ALL)
        k, k_parity = advance(k, k_parity, K_SLOTS)
        if BAND:
            k, k_parity, v, v_parity = _pass_over(
                after, k, k_parity, v, v_parity, k_full, v_full, W, K_SLOTS, V_SLOTS,
                TURNS,
            )  # fmt: skip
        tiles += 1
        slot = tiles & (Q_SLOTS - 1)
        mbarrier.wait(q_full.index(slot), (tiles >> (Q_SLOTS - 1)) & 1)
        head, b, h, m, start, queries, keys = _place(item_s, tiles, places, sq, sk, PACKED)
    _store(
        dq_ptr, out, tiles, item_s, places, sq, sk, stride_dqb, stride_dqs, stride_dqh,
        W, PARTS, PACKED,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "sq", "sk", "left", "right", "query_tiles", "key_blocks", "head_block", "all_heads",
        "heads", "stride_lb", "stride_lh", "stride_qs", "stride_gs", "stride_dqb", "stride_dqs",
        "stride_dqh",
    ]
)  # fmt: skip
def query_kernel(
    q_ptr, do_ptr, q_desc, do_desc, k_desc, v_desc, dq_ptr, lse_ptr, delta_ptr, counter, places,
    stride_qb, stride_qh, stride_gb, stride_gh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_qs, stride_gs, stride_dqb, stride_dqs, stride_dqh, stride_lb, stride_lh,
    sq, sk, left, right, query_tiles, key_blocks, head_block, all_heads, heads, unit, scale,
    D: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr, BN: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
    BAND: gl.constexpr, PACKED: gl.constexpr, MASKED: gl.constexpr, DO_IN_REGISTERS: gl.constexpr,
    TURNS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    # A ragged descriptor's tile has two dimensions more.
    COLUMNS: gl.constexpr = q_desc.block_type.shape[-1]
    PARTS: gl.constexpr = D // COLUMNS
    Q_BYTES: gl.constexpr = "512" if D == 256 else "384"
    DO_BYTES: gl.constexpr = "512" if DV == 256 else "256"
    tile_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], dtype)
    v_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DV], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2 * Q_SLOTS * PARTS, 64, COLUMNS], tile_l)
    do_s = gl.allocate_shared_memory(dtype, [2, 64, DV], v_l)
    k_s = gl.allocate_shared_memory(dtype, [K_SLOTS * PARTS, BN, COLUMNS], tile_l)
    v_s = gl.allocate_shared_memory(dtype, [V_SLOTS, BN, DV], v_l)
    item_s = gl.allocate_shared_memory(
        gl.int32, [ITEMS * ITEM, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(do_full.index(0), count=1)
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    # Tuples are written where they are used, with literal functions: Gluon takes no other.
    gl.warp_specialize(
        [
            (_consumer, (
                dq_ptr, lse_ptr, delta_ptr, places, q_s, do_s, k_s, v_s, item_s,
                q_full, do_full, k_full, v_full,
                sq, sk, left, right, key_blocks, stride_lb, stride_lh,
                stride_dqb, stride_dqs, stride_dqh, unit, scale,
                0, BN, K_SLOTS, V_SLOTS, Q_SLOTS, PARTS, BAND, PACKED, MASKED, DO_IN_REGISTERS,
                TURNS,
            )),
            (_consumer, (
                dq_ptr, lse_ptr, delta_ptr, places, q_s, do_s, k_s, v_s, item_s,
                q_full, do_full, k_full, v_full,
                sq, sk, left, right, key_blocks, stride_lb, stride_lh,
                stride_dqb, stride_dqs, stride_dqh, unit, scale,
                1, BN, K_SLOTS, V_SLOTS, Q_SLOTS, PARTS, BAND, PACKED, MASKED, DO_IN_REGISTERS,
                TURNS,
            )),
            (_producer, (
                q_ptr, do_ptr, stride_qs, stride_gs,
                q_desc, do_desc, k_desc, v_desc, counter, places, q_s, do_s, k_s, v_s, item_s,
                q_full, do_full, k_full, v_full,
                sq, sk, left, right, query_tiles, key_blocks, head_block, all_heads, heads,
                stride_qb, stride_qh, stride_gb, stride_gh, stride_kb, stride_kh,
                stride_vb, stride_vh,
                GROUP, BN, K_SLOTS, V_SLOTS, Q_SLOTS, PARTS, CAUSAL, BAND, PACKED,
                DO_IN_REGISTERS, AHEAD, Q_BYTES, DO_BYTES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


__all__ = ["query_kernel"]

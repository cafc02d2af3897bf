"""dQ alone on sm_90, for head dims whose backward pass `backward` has no room for.

Shape legend: as in `forward`; dO is [queries, DV] as O is. shift and delta are float32, of
rows of S.

The roles of `forward`: a producer, and two consumers with 64 queries of a tile each. Q and dO of a
tile stay in shared memory while blocks of K and V pass, the last block first. dQ of a block is
issued together with S and dP of the next one, so P is made while products run. In registers are dQ,
S, dP and the rounded dS, which is a left side.

Blocks that a consumer's queries do not see, at the diagonal and at the edges of windows, it passes
over. dQ is owned by one consumer and added up in the order of the blocks.

Under PROJECT that consumer also has all of a row of dS, and takes out of dQ and delta what it sums
to too much, as `triton.projection` does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stable_attention.hopper import bundles
from stable_attention.hopper.barriers import (
    advance,
    arrive_if,
    arrive_named,
    next_item,
    sync_named,
    warp_sync,
)
from stable_attention.hopper.consumer import TURN, announced, operand, scores
from stable_attention.hopper.producer import ALL, ITEM, ITEMS, SLOT_OF_K
from stable_attention.hopper.projection import carriers, projected
from stable_attention.hopper.softmax import (
    LANES,
    by_lane,
    follow,
    hidden_outside,
    high_part,
    pinned,
    product_layout,
    widened,
)
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
def _producer(inputs, smem, items, T: gl.constexpr):
    q_in, k_in, v_in, do_in = inputs.q, inputs.k, inputs.v, inputs.do
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    SLOT_OF_V: gl.constexpr = SLOT_OF_K + T.K_SLOTS
    BUFFER_OF_Q: gl.constexpr = SLOT_OF_V + T.V_SLOTS
    k = 0
    v = 0
    copied = 0
    copied_v = 0  # as many as copied: one counter for both compiles to code that was not timed
    tiles = 0
    query_tiles = items.query_tiles
    if T.PACKED:
        query_tiles = gl.load(items.counter + 1)
    most = query_tiles * items.all_heads
    item = gl.program_id(0)
    running = True
    while running:
        running = item < most
        if tiles > 0:
            sync_named(BUFFER_OF_Q, ALL, 1)
        t, head = item_at(item, query_tiles, items.head_block, T.CAUSAL)
        b = head // items.heads
        h = head % items.heads
        told = (tiles & (ITEMS - 1)) * ITEM
        smem.item.index(told).store(gl.full([1], gl.where(running, head, -1), gl.int32, one))
        smem.item.index(told + 1).store(gl.full([1], t, gl.int32, one))
        smem.item.index(told + 2).store(gl.full([1], b, gl.int32, one))
        smem.item.index(told + 3).store(gl.full([1], h, gl.int32, one))
        warp_sync(item)
        if running:
            m, start_q, queries, start_k, keys = place_of(
                items.places, t, items.sq, items.sk, T.PACKED
            )
            hk = h // T.GROUP
            last, blocks = key_blocks_of(
                m, items.key_tiles, queries, keys, items.left, items.right, T.BN, False, T.BAND
            )
            mbarrier.expect(smem.q.full, 2 * T.PARTS * q_in.desc.block_type.nbytes)
            for w in gl.static_range(2):
                load_parts(
                    q_in.desc, m * TILE + w * 64, b * q_in.stride_b + h * q_in.stride_h, start_q,
                    queries, smem.q.full, smem.q.slots, w, T.PARTS, T.PACKED,
                )  # fmt: skip
            k_column = b * k_in.stride_b + hk * k_in.stride_h
            v_column = b * v_in.stride_b + hk * v_in.stride_h
            for i in range(blocks):
                if copied >= T.K_SLOTS:
                    sync_named(SLOT_OF_K + k, ALL, 1)
                mbarrier.expect(smem.k.full.index(k), T.PARTS * k_in.desc.block_type.nbytes)
                load_parts(
                    k_in.desc, (last - i) * T.BN, k_column, start_k, keys, smem.k.full.index(k),
                    smem.k.slots, k, T.PARTS, T.PACKED,
                )  # fmt: skip
                k = gl.where(k + 1 == T.K_SLOTS, 0, k + 1)
                if i == 0:
                    if tiles > 0:
                        sync_named(BUFFER_OF_Q + 1, ALL, 1)
                    mbarrier.expect(smem.do.full, 2 * do_in.desc.block_type.nbytes)
                    for w in gl.static_range(2):
                        load_parts(
                            do_in.desc, m * TILE + w * 64, b * do_in.stride_b + h * do_in.stride_h,
                            start_q, queries, smem.do.full, smem.do.slots, w, 1, T.PACKED,
                        )  # fmt: skip
                if copied_v >= T.V_SLOTS:
                    sync_named(SLOT_OF_V + v, ALL, 1)
                mbarrier.expect(smem.v.full.index(v), v_in.desc.block_type.nbytes)
                load_tile(
                    v_in.desc, (last - i) * T.BN, v_column, start_k, keys, smem.v.full.index(v),
                    smem.v.slots.index(v), T.PACKED,
                )  # fmt: skip
                v = gl.where(v + 1 == T.V_SLOTS, 0, v + 1)
                copied_v += 1
                copied += 1
            tiles += 1
            # As many numbers are taken as there are items, so the counter ends as it began.
            item = gl.num_programs(0) + next_item(items.counter, most - 1)
        else:
            mbarrier.arrive(smem.q.full, count=1)


@gluon.jit
def _uniform(x):
    """x, the same in all lanes, as a number of which ptxas knows that."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    y = gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;",
        "=r,r", [gl.full([1], x, gl.int32, one)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return gl.max(y, 0)


@gluon.jit
def _place(tiles, smem, items, T: gl.constexpr):
    """(head counted over the batch or -1, batch entry, head, tile within its sequence, first query
    token, queries, keys) of an item."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    head, t, b, h = announced(smem.item, tiles, 1, one)
    head = _uniform(head)
    t = _uniform(t)
    if T.PACKED:
        t = gl.where(head >= 0, t, 0)
    m, start, queries, _, keys = place_of(items.places, t, items.sq, items.sk, T.PACKED)
    if T.PACKED:
        m = _uniform(m)
        start = _uniform(start)
        queries = _uniform(queries)
        keys = _uniform(keys)
    return head, _uniform(b), _uniform(h), m, start, queries, keys


@gluon.jit
def _pass_over(n, k, k_parity, v, v_parity, smem, W: gl.constexpr, T: gl.constexpr):
    """Free the slots of so many blocks unread, once they are full, as they would be twice else."""
    for _ in range(n):
        mbarrier.wait(smem.k.full.index(k), k_parity)
        arrive_named(SLOT_OF_K + k, ALL)
        if T.TURNS:
            sync_named(TURN + W, "256", 4)
            arrive_named(TURN + 1 - W, "256")
        k, k_parity = advance(k, k_parity, T.K_SLOTS)
        mbarrier.wait(smem.v.full.index(v), v_parity)
        arrive_named(SLOT_OF_K + T.K_SLOTS + v, ALL)
        v, v_parity = advance(v, v_parity, T.V_SLOTS)
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
def _start_dp(do, v, v_parity, zero, smem):
    """Start dP [64, BN] of a block."""
    mbarrier.wait(smem.v.full.index(v), v_parity)
    return warpgroup_mma(
        do, smem.v.slots.index(v).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def _end_dp(dp, v, v_parity, smem, T: gl.constexpr):
    """(dP, next slot of V, its parity), the slot free."""
    # A wait that is a loop, and over long since: else ptxas moves that for dP before the
    # exponentials.
    mbarrier.wait(smem.v.full.index(v), v_parity)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    arrive_named(SLOT_OF_K + T.K_SLOTS + v, ALL)
    v, v_parity = advance(v, v_parity, T.V_SLOTS)
    return dp, v, v_parity


@gluon.jit
def _probabilities(s, shift, unit, right, left, end, past, BN: gl.constexpr, MASKED: gl.constexpr):
    """P [64, BN] float32 of the block that is ``past`` keys before the one of `limits_of`."""
    if MASKED:  # noqa: SIM102 (known when compiled, and not)
        if at_edge(right + past, left + past, end + past, BN):
            s = hidden_outside(s, right + past, left + past, end + past)
    return gl.exp2(s * unit - gl.expand_dims(shift, 1))


@gluon.jit
def _slopes(p, dp, delta, dtype: gl.constexpr, PROJECT: gl.constexpr):
    """dS [64, BN] as it multiplies K."""
    ds = p * (dp - gl.expand_dims(delta, 1))
    if PROJECT:
        return high_part(ds, dtype)
    else:
        return ds.to(dtype)


@gluon.jit
def _store(place, dq, stride_s, rows_left, COLUMN: gl.constexpr):
    """Rows of dQ [64, N], from column ``COLUMN`` on, of which so many are there."""
    like: gl.constexpr = dq.type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, like))
    columns = COLUMN + gl.arange(0, dq.shape[1], gl.SliceLayout(0, like))
    here = gl.expand_dims(rows.to(gl.int64) * stride_s, 1) + gl.expand_dims(columns, 0)
    gl.store(place + here, dq, mask=gl.expand_dims(rows < rows_left, 1))


@gluon.jit
def _consumer(out, numbers, key_rows, smem, items, unit, W: gl.constexpr, T: gl.constexpr):
    q_s, do_s, k_s = smem.q.slots, smem.do.slots, smem.k.slots
    DQ: gl.constexpr = k_s.shape[2]
    S_L: gl.constexpr = product_layout(T.BN)
    DQ_L: gl.constexpr = product_layout(DQ)
    DO_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_L, k_width=2)
    DS_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DQ_L, k_width=2)
    RS: gl.constexpr = gl.SliceLayout(1, S_L)
    SLOT_OF_V: gl.constexpr = SLOT_OF_K + T.K_SLOTS
    BUFFER_OF_Q: gl.constexpr = SLOT_OF_V + T.V_SLOTS
    dtype: gl.constexpr = k_s.dtype
    zero_s = gl.zeros([64, T.BN], gl.float32, S_L)
    zero_dq = gl.zeros([64, DQ], gl.float32, DQ_L)
    k = 0
    k_parity = 0
    v = 0
    v_parity = 0
    tiles = 0
    if T.TURNS and W == 1:
        arrive_named(TURN, "256")
    mbarrier.wait(smem.q.full, 0)
    head, b, h, m, start, queries, keys = _place(0, smem, items, T)
    while head >= 0:
        last, blocks = key_blocks_of(
            m, items.key_tiles, queries, keys, items.left, items.right, T.BN, False, T.BAND
        )
        own = last  # the last block that these 64 queries see
        after = 0
        if T.BAND:
            row = m * TILE + W * 64
            first_key, last_key = keys_of(
                row, gl.minimum(row + 64, queries) - 1, queries, keys, items.left, items.right
            )
            first = last + 1 - blocks
            own = gl.minimum(gl.maximum(gl.maximum(last_key, 0) // T.BN, first), last)
            own_first = gl.minimum(gl.maximum(first_key // T.BN, first), own)
            after = own_first - first
            blocks = own - own_first + 1
            k, k_parity, v, v_parity = _pass_over(last - own, k, k_parity, v, v_parity, smem, W, T)
        to_right, to_left, end = limits_of(m, own, queries, keys, items.left, items.right, W, T.BN)
        rows = m * TILE + W * 64 + gl.arange(0, 64, RS)
        place = b.to(gl.int64) * numbers.stride_b + h.to(gl.int64) * numbers.stride_h + start
        lse = gl.load(numbers.lse_ptr + place + rows, mask=rows < queries, other=-float("inf"))
        delta = gl.load(numbers.delta_ptr + place + rows, mask=rows < queries, other=0.0)
        if T.PROJECT:  # `numerics.lse_planes_to_shift`
            shift = gl.where(lse == -float("inf"), float("inf"), lse)
        else:  # `numerics.lse_to_shift`
            shift = gl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
        mbarrier.wait(smem.k.full.index(k), k_parity)
        s_made = scores(q_s.index(W * T.PARTS), q_s, W, k_s, k, zero_s, T.PARTS)
        mbarrier.wait(smem.do.full, tiles & 1)
        do = operand(do_s, W, 1, T.DO_IN_REGISTERS, DO_L)
        dp_made = _start_dp(do, v, v_parity, zero_s, smem)
        s, dp_made = warpgroup_mma_wait(1, deps=(s_made, dp_made))
        arrive_if(BUFFER_OF_Q, blocks == 1, ALL, False)
        p = _probabilities(s, shift, unit, to_right, to_left, end, 0, T.BN, T.MASKED)
        if T.PROJECT:
            rank = follow(gl.zeros([64, 4], gl.int32, LANES), p, 0, -16)
        dp, v, v_parity = _end_dp(dp_made, v, v_parity, smem, T)
        slopes = _slopes(p, dp, delta, dtype, T.PROJECT)
        if T.PROJECT:
            sums = by_lane(widened(slopes))
        ds = gl.convert_layout(slopes, DS_L)
        dq = (zero_dq,) if T.PARTS == 1 else (zero_dq, zero_dq, zero_dq)
        for i in range(1, blocks):
            before = k
            k, k_parity = advance(k, k_parity, T.K_SLOTS)
            if T.TURNS:
                sync_named(TURN + W, "256", 4)
            dq = _add_keys(dq, ds, k_s, before, i > 1, T.PARTS)
            # Opaque, so that descriptors of Q and dO are not kept in registers.
            w = _uniform(W)
            mbarrier.wait(smem.k.full.index(k), k_parity)
            s_begun = scores(q_s.index(w * T.PARTS), q_s, w, k_s, k, zero_s, T.PARTS)
            if T.TURNS:
                arrive_named(TURN + 1 - W, "256")
            if not T.DO_IN_REGISTERS:
                do = operand(do_s, w, 1, False, DO_L)
            of_v = v
            if T.PROJECT and T.V_SLOTS == 1:  # nor those of V, which has one place
                of_v = v + w - W
            dp_begun = _start_dp(do, of_v, v_parity, zero_s, smem)
            dq, s, dp = _await_keys(T.PARTS + 1, dq, s_begun, dp_begun, T.PARTS)
            arrive_named(SLOT_OF_K + before, ALL)
            s, dp = warpgroup_mma_wait(1, deps=(s, dp))
            arrive_if(BUFFER_OF_Q, i + 1 == blocks, ALL, False)
            p = _probabilities(s, shift, unit, to_right, to_left, end, i * T.BN, T.BN, T.MASKED)
            if T.PROJECT:
                rank = follow(rank, p, i, w - W - 16)
            dp, v, v_parity = _end_dp(dp, v, v_parity, smem, T)
            slopes = _slopes(p, dp, delta, dtype, T.PROJECT)
            if T.PROJECT:
                sums = pinned(sums + by_lane(widened(slopes)))
            ds = gl.convert_layout(slopes, DS_L)
        arrive_named(BUFFER_OF_Q + 1, ALL)
        if T.TURNS:
            sync_named(TURN + W, "256", 4)
        dq = _add_keys(dq, ds, k_s, k, blocks > 1, T.PARTS)
        if T.TURNS:
            arrive_named(TURN + 1 - W, "256")
        if T.PROJECT:
            DQ_ROWS: gl.constexpr = gl.SliceLayout(1, DQ_L)
            weight, excess, key_ptr, found = carriers(
                sums, rank, delta, own, tiles, numbers, key_rows, smem, items, W, T, DQ_ROWS
            )
        if T.PARTS == 1:
            dq = (warpgroup_mma_wait(0, deps=(dq[0],)),)
        else:
            dq = warpgroup_mma_wait(0, deps=(dq[0], dq[1], dq[2]))
        arrive_named(SLOT_OF_K + k, ALL)
        k, k_parity = advance(k, k_parity, T.K_SLOTS)
        if T.BAND:
            k, k_parity, v, v_parity = _pass_over(after, k, k_parity, v, v_parity, smem, W, T)
        _, b, h, m, start, queries, _ = _place(tiles, smem, items, T)
        row = m * TILE + W * 64
        rows_ptr = out.ptr + b.to(gl.int64) * out.stride_b + h.to(gl.int64) * out.stride_h
        rows_ptr += (start + row).to(gl.int64) * out.stride_s
        for part in gl.static_range(T.PARTS):
            x = dq[part]
            if T.PROJECT:
                x = projected(x, weight, excess, key_ptr, found, part * DQ)
            y = (x * out.scale).to(dtype)
            _store(rows_ptr, y, out.stride_s, queries - row, part * DQ)
        tiles += 1
        mbarrier.wait(smem.q.full, tiles & 1)
        head, b, h, m, start, queries, keys = _place(tiles, smem, items, T)


@gluon.jit(
    do_not_specialize=[
        "sq", "sk", "left", "right", "query_tiles", "key_blocks", "head_block", "all_heads",
        "heads", "stride_lb", "stride_lh", "plane",
    ]
)  # fmt: skip
def query_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_ptr, lse_ptr, delta_ptr, target_ptr, key_ptr,
    counter, places,
    stride_qb, stride_qh, stride_gb, stride_gh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_dqb, stride_dqs, stride_dqh, stride_ks, stride_lb, stride_lh, plane,
    sq, sk, left, right, query_tiles, key_blocks, head_block, all_heads, heads, unit, scale,
    D: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr, BN: gl.constexpr,
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr,
    PACKED: gl.constexpr, MASKED: gl.constexpr, DO_IN_REGISTERS: gl.constexpr,
    TURNS: gl.constexpr, PROJECT: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    # A ragged descriptor's tile has two dimensions more.
    COLUMNS: gl.constexpr = q_desc.block_type.shape[-1]
    PARTS: gl.constexpr = D // COLUMNS
    tile_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], dtype)
    v_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DV], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2 * PARTS, 64, COLUMNS], tile_l)
    do_s = gl.allocate_shared_memory(dtype, [2, 64, DV], v_l)
    k_s = gl.allocate_shared_memory(dtype, [K_SLOTS * PARTS, BN, COLUMNS], tile_l)
    v_s = gl.allocate_shared_memory(dtype, [V_SLOTS, BN, DV], v_l)
    item_s = gl.allocate_shared_memory(
        gl.int32, [ITEMS * ITEM, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(do_full, count=1)
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    T: gl.constexpr = bundles.QueryTraits(
        GROUP, BN, K_SLOTS, V_SLOTS, PARTS, CAUSAL, BAND, PACKED, MASKED,
        DO_IN_REGISTERS, TURNS, PROJECT,
    )  # fmt: skip
    smem = bundles.QueryMemory(
        item_s, bundles.Ring(q_s, q_full), bundles.Ring(do_s, do_full),
        bundles.Ring(k_s, k_full), bundles.Ring(v_s, v_full),
    )  # fmt: skip
    items = bundles.Items(
        counter, places, sq, sk, left, right,
        query_tiles, key_blocks, head_block, all_heads, heads,
    )  # fmt: skip
    inputs = bundles.Inputs(
        bundles.Tiled(q_desc, stride_qb, stride_qh),
        bundles.Tiled(k_desc, stride_kb, stride_kh),
        bundles.Tiled(v_desc, stride_vb, stride_vh),
        bundles.Tiled(do_desc, stride_gb, stride_gh),
    )
    out = bundles.QueryGradient(dq_ptr, stride_dqb, stride_dqs, stride_dqh, scale)
    rest_ptr = None
    if PROJECT:
        rest_ptr = lse_ptr + plane.to(gl.int64)
    numbers = bundles.RowNumbers(lse_ptr, delta_ptr, stride_lb, stride_lh, rest_ptr, target_ptr)
    key_rows = bundles.KeyRows(key_ptr, stride_kb, stride_ks, stride_kh)
    # Tuples are written where they are used, with literal functions: Gluon takes no other.
    gl.warp_specialize(
        [
            (_consumer, (out, numbers, key_rows, smem, items, unit, 0, T)),
            (_consumer, (out, numbers, key_rows, smem, items, unit, 1, T)),
            (_producer, (inputs, smem, items, T)),
        ],
        [4, 1],
        [240, 24],
    )


__all__ = ["query_kernel"]

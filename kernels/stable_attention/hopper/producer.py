"""The producers of both passes: one warp each, which takes work items and copies tiles of Q, K, V
and dO to shared memory by TMA, as far ahead as rings have room.

Shape legend: as in `forward` and `backward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from stable_attention.hopper.barriers import advance, next_item, sync_named, warp_sync
from stable_attention.hopper.tiles import (
    TILE,
    first_row_of,
    item_at,
    key_blocks_of,
    load_parts,
    load_tile,
    place_of,
    query_tiles_of,
)

SLOT_OF_K = gl.constexpr(7)
"""The named barrier of the first slot of K in the forward pass."""
ALL = gl.constexpr("288")
"""Threads of both consumers and the producer."""
PAIR = gl.constexpr(2)
"""Query tiles in shared memory, tiles of dS, and items announced in the backward pass: a ring of
two each."""
ITEMS = gl.constexpr(4)
"""Items that Q's slots share in announcements of the forward pass, a ring: a tile's epilogue, which
follows the first scores of the next tile, still reads its own, and Q with one slot is free for the
item after that by then."""
ITEM = gl.constexpr(4)
"""int32 numbers of an item announced in the forward pass: its head counted over the batch, or -1
after the last item; its tile; its batch entry; its head within that. The producer divides for
everyone, in time that it has."""


@gluon.jit
def forward_producer(inputs, smem, items, T: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    SLOT_OF_V: gl.constexpr = SLOT_OF_K + T.SLOTS
    BUFFER_OF_Q: gl.constexpr = SLOT_OF_V + T.SLOTS
    q_in, k_in, v_in, item_s = inputs.q, inputs.k, inputs.v, smem.item
    k = 0
    v = 0
    copied = 0  # blocks of K so far, and of V one less or as many
    copied_v = 0
    tiles = 0
    query_tiles = items.query_tiles
    if T.PACKED:
        query_tiles = gl.load(items.counter + 1)
    most = query_tiles * items.all_heads
    # Programs begin with their own number, and so do without the counter.
    item = gl.program_id(0)
    running = True
    while running:
        running = item < most
        buffer = tiles & (T.Q_SLOTS - 1)
        if tiles >= T.Q_SLOTS:
            sync_named(BUFFER_OF_Q + buffer, ALL, 1)
        t, head = item_at(item, query_tiles, items.head_block, T.CAUSAL or T.BAND)
        b = head // items.heads
        h = head % items.heads
        told = (tiles & (ITEMS // T.Q_SLOTS - 1)) * ITEM
        item_s.index(told).store(gl.full([1], gl.where(running, head, -1), gl.int32, one))
        item_s.index(told + 1).store(gl.full([1], t, gl.int32, one))
        item_s.index(told + 2).store(gl.full([1], b, gl.int32, one))
        item_s.index(told + 3).store(gl.full([1], h, gl.int32, one))
        warp_sync(item)
        tiles += 1
        if running:
            m, start_q, queries, start_k, keys = place_of(
                items.places, t, items.sq, items.sk, T.PACKED
            )
            hk = h // T.GROUP
            last, blocks = key_blocks_of(
                m, items.key_tiles, queries, keys, items.left, items.right,
                T.BN, T.CAUSAL, T.BAND,
            )  # fmt: skip
            full = smem.q.full.index(buffer)
            mbarrier.expect(full, 2 * T.PARTS * q_in.desc.block_type.nbytes)
            for w in gl.static_range(2):
                load_parts(
                    q_in.desc, m * TILE + w * 64, b * q_in.stride_b + h * q_in.stride_h, start_q,
                    queries, full, smem.q.slots, buffer * 2 + w, T.PARTS, T.PACKED,
                )  # fmt: skip
            k_column = b * k_in.stride_b + hk * k_in.stride_h
            v_column = b * v_in.stride_b + hk * v_in.stride_h
            for i in range(blocks + 1):  # K is a block ahead of V
                if i < blocks:
                    if copied >= T.SLOTS:
                        sync_named(SLOT_OF_K + k, ALL, 1)
                    full = smem.k.full.index(k)
                    mbarrier.expect(full, T.PARTS * k_in.desc.block_type.nbytes)
                    load_parts(
                        k_in.desc, (last - i) * T.BN, k_column, start_k, keys, full,
                        smem.k.slots, k, T.PARTS, T.PACKED,
                    )  # fmt: skip
                    k = gl.where(k + 1 == T.SLOTS, 0, k + 1)
                    copied += 1
                if i > 0:
                    if copied_v >= T.SLOTS:
                        sync_named(SLOT_OF_V + v, ALL, 1)
                    full = smem.v.full.index(v)
                    mbarrier.expect(full, v_in.desc.block_type.nbytes)
                    load_tile(
                        v_in.desc, (last + 1 - i) * T.BN, v_column, start_k, keys, full,
                        smem.v.slots.index(v), T.PACKED,
                    )  # fmt: skip
                    v = gl.where(v + 1 == T.SLOTS, 0, v + 1)
                    copied_v += 1
            # As many numbers are taken as there are items, so the counter ends as it began.
            item = gl.num_programs(0) + next_item(items.counter, most - 1)
        else:
            mbarrier.arrive(smem.q.full.index(buffer), count=1)


@gluon.jit
def backward_producer(inputs, smem, items, T: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    slot = 0
    parity = 0
    item_slot = 0
    item_parity = 0
    key_parity = 0
    tiles = items.key_tiles
    if T.PACKED:
        tiles = gl.load(items.counter + 2)
    item = next_item(items.counter, -1)
    running = True
    while running:
        running = item < tiles * items.all_heads
        mbarrier.wait(smem.item.empty.index(item_slot), item_parity ^ 1)
        smem.item.slots.index(item_slot).store(
            gl.full([1], gl.where(running, item, -1), gl.int32, one)
        )
        warp_sync(item)
        mbarrier.arrive(smem.item.full.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        if running:
            t, head = item_at(item, tiles, items.head_block, T.CAUSAL or T.BAND)
            n, start_q, queries, start_k, keys = place_of(
                items.places, t, items.sq, items.sk, T.PACKED
            )
            b = head // items.heads
            part = head % items.heads
            hk = part // T.SPLITS
            mbarrier.wait(smem.k.empty, key_parity ^ 1)
            mbarrier.expect(smem.k.full, k.desc.block_type.nbytes)
            column = b * k.stride_b + hk * k.stride_h
            load_tile(k.desc, n * T.BN, column, start_k, keys, smem.k.full, smem.k.slots, T.PACKED)
            mbarrier.wait(smem.v.empty, key_parity ^ 1)
            mbarrier.expect(smem.v.full, v.desc.block_type.nbytes)
            column = b * v.stride_b + hk * v.stride_h
            load_tile(v.desc, n * T.BN, column, start_k, keys, smem.v.full, smem.v.slots, T.PACKED)
            key_parity ^= 1
            first, count = query_tiles_of(
                n, items.query_tiles, queries, keys, items.left, items.right,
                T.BM, T.BN, T.CAUSAL, T.BAND,
            )  # fmt: skip
            first_row = first_row_of(items.places, t, T.PACKED)
            for g in range(0, T.GROUP):
                h = part * T.GROUP + g
                row = (head * T.GROUP + g) * items.query_tiles + first_row
                q_column = b * q.stride_b + h * q.stride_h
                do_column = b * do.stride_b + h * do.stride_h
                for m in range(first, first + gl.maximum(count, 1)):
                    mbarrier.wait(smem.q.empty.index(slot), parity ^ 1)
                    full = smem.q.full.index(slot)
                    mbarrier.expect(
                        full, q.desc.block_type.nbytes + inputs.shift_desc.block_type.nbytes
                    )
                    load_tile(
                        q.desc, m * T.BM, q_column, start_q, queries, full,
                        smem.q.slots.index(slot), T.PACKED,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        inputs.shift_desc, [row + m, 0], full, smem.shift.index(slot)
                    )
                    mbarrier.wait(smem.do.empty.index(slot), parity ^ 1)
                    full = smem.do.full.index(slot)
                    mbarrier.expect(
                        full, do.desc.block_type.nbytes + inputs.delta_desc.block_type.nbytes
                    )
                    load_tile(
                        do.desc, m * T.BM, do_column, start_q, queries, full,
                        smem.do.slots.index(slot), T.PACKED,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        inputs.delta_desc, [row + m, 0], full, smem.delta.index(slot)
                    )
                    slot, parity = advance(slot, parity, PAIR)
            item = next_item(items.counter, -1)


__all__ = ["ALL", "ITEM", "ITEMS", "PAIR", "SLOT_OF_K", "backward_producer", "forward_producer"]

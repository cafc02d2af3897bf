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
def announce(item_s, place, head, t, b, h):
    """Leave the numbers of an item (`ITEM`) at a place of the ring, for all lanes to see."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    told = place * ITEM
    item_s.index(told).store(gl.full([1], head, gl.int32, one))
    item_s.index(told + 1).store(gl.full([1], t, gl.int32, one))
    item_s.index(told + 2).store(gl.full([1], b, gl.int32, one))
    item_s.index(told + 3).store(gl.full([1], h, gl.int32, one))
    warp_sync(told)


@gluon.jit
def forward_producer(
    q_desc, k_desc, v_desc, counter, places, q_s, k_s, v_s, item_s, q_full, k_full, v_full,
    sq, sk, left, right, query_tiles, key_blocks, head_block, all_heads, heads,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    GROUP: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, BAND: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = k_s.shape[0] // SLOTS
    SLOT_OF_V: gl.constexpr = SLOT_OF_K + SLOTS
    BUFFER_OF_Q: gl.constexpr = SLOT_OF_V + SLOTS
    k = 0
    v = 0
    copied = 0  # blocks of K so far, and of V one less or as many
    copied_v = 0
    tiles = 0
    if PACKED:
        query_tiles = gl.load(counter + 1)
    items = query_tiles * all_heads
    # Programs begin with their own number, and so do without the counter.
    item = gl.program_id(0)
    running = True
    while running:
        running = item < items
        buffer = tiles & (Q_SLOTS - 1)
        if tiles >= Q_SLOTS:
            sync_named(BUFFER_OF_Q + buffer, ALL, 1)
        t, head = item_at(item, query_tiles, head_block, CAUSAL or BAND)
        b = head // heads
        h = head % heads
        place = tiles & (ITEMS // Q_SLOTS - 1)
        announce(item_s, place, gl.where(running, head, -1), t, b, h)
        tiles += 1
        if running:
            m, start_q, queries, start_k, keys = place_of(places, t, sq, sk, PACKED)
            hk = h // GROUP
            last, blocks = key_blocks_of(
                m, key_blocks, queries, keys, left, right, BN, CAUSAL, BAND
            )
            mbarrier.expect(q_full.index(buffer), 2 * PARTS * q_desc.block_type.nbytes)
            for w in gl.static_range(2):
                load_parts(
                    q_desc, m * TILE + w * 64, b * stride_qb + h * stride_qh, start_q, queries,
                    q_full.index(buffer), q_s, buffer * 2 + w, PARTS, PACKED,
                )  # fmt: skip
            k_column = b * stride_kb + hk * stride_kh
            v_column = b * stride_vb + hk * stride_vh
            for i in range(blocks + 1):  # K is a block ahead of V
                if i < blocks:
                    if copied >= SLOTS:
                        sync_named(SLOT_OF_K + k, ALL, 1)
                    mbarrier.expect(k_full.index(k), PARTS * k_desc.block_type.nbytes)
                    load_parts(
                        k_desc, (last - i) * BN, k_column, start_k, keys, k_full.index(k),
                        k_s, k, PARTS, PACKED,
                    )  # fmt: skip
                    k = gl.where(k + 1 == SLOTS, 0, k + 1)
                    copied += 1
                if i > 0:
                    if copied_v >= SLOTS:
                        sync_named(SLOT_OF_V + v, ALL, 1)
                    mbarrier.expect(v_full.index(v), v_desc.block_type.nbytes)
                    load_tile(
                        v_desc, (last + 1 - i) * BN, v_column, start_k, keys, v_full.index(v),
                        v_s.index(v), PACKED,
                    )  # fmt: skip
                    v = gl.where(v + 1 == SLOTS, 0, v + 1)
                    copied_v += 1
            # As many numbers are taken as there are items, so the counter ends as it began.
            item = gl.num_programs(0) + next_item(counter, items - 1)
        else:
            mbarrier.arrive(q_full.index(buffer), count=1)


@gluon.jit
def backward_producer(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, counter, places,
    q_s, k_s, v_s, do_s, shift_s, delta_s, item_s,
    item_full, item_empty, k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty,
    sq, sk, left, right, all_heads, key_tiles, query_tiles, head_block, kv_heads,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr,
    PACKED: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = 0
    parity = 0
    item_slot = 0
    item_parity = 0
    key_parity = 0
    tiles = key_tiles
    if PACKED:
        tiles = gl.load(counter + 2)
    item = next_item(counter, -1)
    running = True
    while running:
        running = item < tiles * all_heads
        mbarrier.wait(item_empty.index(item_slot), item_parity ^ 1)
        item_s.index(item_slot).store(gl.full([1], gl.where(running, item, -1), gl.int32, one))
        warp_sync(item)
        mbarrier.arrive(item_full.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        if running:
            t, head = item_at(item, tiles, head_block, CAUSAL or BAND)
            n, start_q, queries, start_k, keys = place_of(places, t, sq, sk, PACKED)
            b = head // kv_heads
            part = head % kv_heads
            hk = part // SPLITS
            mbarrier.wait(k_empty, key_parity ^ 1)
            mbarrier.expect(k_full, k_desc.block_type.nbytes)
            column = b * stride_kb + hk * stride_kh
            load_tile(k_desc, n * BN, column, start_k, keys, k_full, k_s, PACKED)
            mbarrier.wait(v_empty, key_parity ^ 1)
            mbarrier.expect(v_full, v_desc.block_type.nbytes)
            column = b * stride_vb + hk * stride_vh
            load_tile(v_desc, n * BN, column, start_k, keys, v_full, v_s, PACKED)
            key_parity ^= 1
            first, count = query_tiles_of(
                n, query_tiles, queries, keys, left, right, BM, BN, CAUSAL, BAND
            )
            first_row = first_row_of(places, t, PACKED)
            for g in range(0, GROUP):
                h = part * GROUP + g
                row = (head * GROUP + g) * query_tiles + first_row
                q_column = b * stride_qb + h * stride_qh
                do_column = b * stride_gb + h * stride_gh
                for m in range(first, first + gl.maximum(count, 1)):
                    mbarrier.wait(q_empty.index(slot), parity ^ 1)
                    mbarrier.expect(
                        q_full.index(slot),
                        q_desc.block_type.nbytes + shift_desc.block_type.nbytes,
                    )
                    load_tile(
                        q_desc, m * BM, q_column, start_q, queries, q_full.index(slot),
                        q_s.index(slot), PACKED,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        shift_desc, [row + m, 0], q_full.index(slot), shift_s.index(slot)
                    )
                    mbarrier.wait(do_empty.index(slot), parity ^ 1)
                    mbarrier.expect(
                        do_full.index(slot),
                        do_desc.block_type.nbytes + delta_desc.block_type.nbytes,
                    )
                    load_tile(
                        do_desc, m * BM, do_column, start_q, queries, do_full.index(slot),
                        do_s.index(slot), PACKED,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        delta_desc, [row + m, 0], do_full.index(slot), delta_s.index(slot)
                    )
                    slot, parity = advance(slot, parity, PAIR)
            item = next_item(counter, -1)


__all__ = [
    "ALL",
    "ITEM",
    "ITEMS",
    "PAIR",
    "SLOT_OF_K",
    "announce",
    "backward_producer",
    "forward_producer",
]

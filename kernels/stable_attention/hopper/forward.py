"""The forward pass on sm_90: O, its low-order part, LSE and largest logits, in a persistent kernel.

Shape legend: B batch, H query heads, HK key/value heads, GROUP = H / HK, D head dim of q and k, DV
of v; a tile has 128 queries (TILE), a block BN keys. LSE is [B, H, sq] float32, natural log.
A partial O goes to part_ptr in float32, without a descriptor.

Each role is a partition of warps. The `producer` copies tiles of Q and blocks of K and V to shared
smem. Two consumers of 4 warps (`consumer`) have 64 queries of a tile each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from stable_attention.hopper import bundles
from stable_attention.hopper.consumer import forward_consumer
from stable_attention.hopper.producer import ITEM, ITEMS, forward_producer


@gluon.jit(
    do_not_specialize=[
        "sq", "sk", "tq", "left", "right", "query_tiles", "key_blocks", "head_block", "all_heads",
        "heads",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, low_desc, part_ptr, lse_ptr, row_ptr, max_ptr, sink_ptr,
    rest_ptr, counter, places, total_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_ob, stride_oh,
    stride_os,
    sq, sk, tq, left, right, query_tiles, key_blocks, head_block, all_heads, heads, unit,
    steepness, D: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr, BN: gl.constexpr,
    SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, CAPPED: gl.constexpr,
    BAND: gl.constexpr, PACKED: gl.constexpr, EVEN: gl.constexpr, SEGMENT: gl.constexpr,
    ROUNDED: gl.constexpr, SUM: gl.constexpr, HAS_LOW: gl.constexpr, HAS_MAX: gl.constexpr,
    HAS_SINK: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    # A ragged descriptor's tile has two dimensions more.
    COLUMNS: gl.constexpr = q_desc.block_type.shape[-1]
    PARTS: gl.constexpr = D // COLUMNS
    OUT: gl.constexpr = DV if o_desc is None else o_desc.block_type.shape[-1]
    tile_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], dtype)
    v_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DV], dtype)
    out_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, OUT], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2 * Q_SLOTS * PARTS, 64, COLUMNS], tile_l)
    k_s = gl.allocate_shared_memory(dtype, [SLOTS * PARTS, BN, COLUMNS], tile_l)
    v_s = gl.allocate_shared_memory(dtype, [SLOTS, BN, DV], v_l)
    high_s = q_s
    if Q_SLOTS == 1:
        high_s = gl.allocate_shared_memory(dtype, [2, 64, OUT], out_l)
    low_s = high_s
    if HAS_LOW:
        low_s = gl.allocate_shared_memory(low_desc.dtype, [2, 64, OUT], out_l)
    total_s = low_s
    if SEGMENT and DV == 128 and BN == 128 and not HAS_LOW:
        # 16 KiB a consumer
        total_s = gl.allocate_shared_memory(dtype, [2, 64, OUT], out_l)
    ones_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 32], dtype)
    ones_s = gl.allocate_shared_memory(dtype, [8, 32], ones_layout)
    ones_s.store(gl.full([8, 32], 1.0, dtype, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])))
    item_s = gl.allocate_shared_memory(
        gl.int32, [ITEMS // Q_SLOTS * ITEM, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    smem = bundles.ForwardMemory(
        item_s, bundles.Ring(q_s, q_full), bundles.Ring(k_s, k_full), bundles.Ring(v_s, v_full),
        high_s, low_s, total_s, ones_s,
    )  # fmt: skip
    T: gl.constexpr = bundles.ForwardTraits(
        DV, BN, GROUP, PARTS, SLOTS, Q_SLOTS, Q_IN_REGISTERS, CAUSAL, BAND, PACKED, EVEN, CAPPED,
        SEGMENT, ROUNDED, SUM, HAS_LOW, HAS_MAX, HAS_SINK,
    )  # fmt: skip
    items = bundles.Items(
        counter, places, sq, sk, left, right,
        query_tiles, key_blocks, head_block, all_heads, heads,
    )  # fmt: skip
    inputs = bundles.Inputs(
        bundles.Tiled(q_desc, stride_qb, stride_qh),
        bundles.Tiled(k_desc, stride_kb, stride_kh),
        bundles.Tiled(v_desc, stride_vb, stride_vh),
    )
    outputs = bundles.Outputs(
        o_desc, low_desc, part_ptr, lse_ptr, row_ptr, max_ptr, stride_ob, stride_os, stride_oh, tq,
        rest_ptr, total_ptr,
    )  # fmt: skip
    softmax = bundles.Softmax(unit, steepness, sink_ptr)
    # Tuples are written where they are used, with literal functions: Gluon takes no other.
    gl.warp_specialize(
        [
            (forward_consumer, (outputs, smem, items, softmax, 0, T)),
            (forward_consumer, (outputs, smem, items, softmax, 1, T)),
            (forward_producer, (inputs, smem, items, T)),
        ],
        [4, 1],
        [240, 24],
    )


__all__ = ["forward_kernel"]

"""Of the rows of dS as it multiplies K: what they sum to, and a key of their largest.

One warp reads every tile of dS where the consumers of `backward` leave it, [keys, queries], as
fragments of tensor-core products. A product with ones is the sum, exact but for its float32
additions. A packed integer maximum over the same registers finds the key: of a dS it takes sign and
low bits off and puts the key's place in the tile there (`numerics.key_of_rank`), two dS an
instruction. So it costs two instructions for 64 dS beside the product.

Shape legend: as in `backward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from stable_attention.hopper.barriers import advance
from stable_attention.hopper.producer import PAIR
from stable_attention.hopper.softmax import halves
from stable_attention.hopper.tiles import first_row_of, item_at, place_of, query_tiles_of

ROWS = gl.constexpr(32)
"""Queries of a product."""
STEP = gl.constexpr(16)
"""Keys of a product."""
PRODUCT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
)


@gluon.jit
def _sized(x, place: gl.constexpr):
    """What orders as |x| does, to its exponent, with ``place`` in the low bits; 16-bit."""
    where = gl.full(x.shape, place, gl.int16, x.type.layout)
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x7f807f80, $2, 0xEA;", "=r,r,r", [x, where],
        dtype=gl.int16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _larger(x, y):
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int16, is_pure=True, pack=2
    )


@gluon.jit
def _rows_of(tiles, half, FIRST: gl.constexpr, STEPS: gl.constexpr):
    """(sums float32, sizes and places of the largest int32) [ROWS] of queries of a tile of dS, from
    FIRST on of 64."""
    dtype: gl.constexpr = tiles.dtype
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2)
    B_L: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=PRODUCT, k_width=2)
    ones = gl.full([STEP, 8], 1.0, dtype, B_L)
    total = gl.zeros([ROWS, 8], gl.float32, PRODUCT)
    for i in gl.static_range(STEPS):
        ds = tiles.index(half * STEPS + i).slice(FIRST, ROWS, dim=1)
        ds = ds.permute((1, 0)).load(A_L)
        total = mma_v2(ds, ones, total)
        a, b = halves(ds)
        here = _larger(_sized(a, STEP * i), _sized(b, STEP * i + 8))
        if i == 0:
            largest = here
        else:
            largest = _larger(largest, here)
    last: gl.constexpr = gl.SliceLayout(0, largest.type.layout)
    largest = largest.to(gl.int32) | gl.expand_dims(gl.arange(0, 8, last), 0)
    return gl.max(total, 1), gl.max(largest, 1)


@gluon.jit
def adder(excess, smem, items, T: gl.constexpr):
    """Sums of the rows of every dS tile for its writer, and ranks of their largest to memory."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    STEPS: gl.constexpr = T.BN // STEP
    ds_s = smem.ds.slots
    # Swizzled tiles are 64 columns wide, and their pattern comes again every 8 rows.
    part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, 64], ds_s.dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    key_tiles = items.key_tiles
    if T.PACKED:
        key_tiles = gl.load(items.counter + 2)
    slot = 0
    parity = 0
    item_slot = 0
    item_parity = 0
    running = True
    while running:
        mbarrier.wait(smem.item.full.index(item_slot), item_parity)
        number = gl.max(smem.item.slots.index(item_slot).load(one), 0)
        mbarrier.arrive(smem.item.empty.index(item_slot), count=1)
        item_slot, item_parity = advance(item_slot, item_parity, PAIR)
        running = number >= 0
        if running:
            t, head = item_at(number, key_tiles, items.head_block, T.CAUSAL or T.BAND)
            n, _, queries, _, keys = place_of(items.places, t, items.sq, items.sk, T.PACKED)
            first, seen = query_tiles_of(
                n, items.query_tiles, queries, keys, items.left, items.right,
                T.BM, T.BN, T.CAUSAL, T.BAND,
            )  # fmt: skip
            first += first_row_of(items.places, t, T.PACKED)
            count = gl.maximum(seen, 1)
            for g in range(0, T.GROUP):
                row = (head * T.GROUP + g) * items.query_tiles + first
                for m in range(row, row + count):
                    mbarrier.wait(smem.ds.full.index(slot), parity)
                    mbarrier.wait(excess.ring.empty.index(slot), parity ^ 1)
                    tiles = ds_s.index(slot)._reinterpret(
                        ds_s.dtype, [T.BM // 64 * STEPS, STEP, 64], part
                    )
                    excess_s = excess.ring.slots.index(slot)._reinterpret(
                        gl.float32, [T.BM // ROWS, ROWS], plain
                    )
                    for half in range(T.BM // 64):
                        for i in gl.static_range(64 // ROWS):
                            total, largest = _rows_of(tiles, half, i * ROWS, STEPS)
                            place = half * (64 // ROWS) + i
                            excess_s.index(place).store(total)
                            rows = place * ROWS + gl.arange(0, ROWS, largest.type.layout)
                            rank = (largest >> 7 << 23) | (n * T.BN + (largest & 127))
                            gl.atomic_max(excess.rank_ptr + m * T.BM + rows, rank, sem="relaxed")
                    mbarrier.arrive(smem.ds.empty.index(slot), count=1)
                    fence_async_shared()
                    mbarrier.arrive(excess.ring.full.index(slot), count=1)
                    slot, parity = advance(slot, parity, PAIR)


__all__ = ["adder"]

"""Of the rows of dS as it multiplies K: what they sum to, and a key of their largest.

Warps that have time read every tile of dS where the consumers of `backward` leave it, [keys,
queries], as fragments of tensor-core products. A product with ones is the sum, exact but for its
float32 additions. A packed integer maximum over the same registers finds the key: of a dS it takes
sign and low bits off and puts the key's place in the tile there (`numerics.key_of_rank`), two dS an
instruction.

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
"""Queries of a product: a lane's own row each, in the end."""
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
def _largest_of_rows(x):
    """x [ROWS, 8] int16 of a product with its column in the lowest bits, and the row's maximum in
    all columns. A lane has columns 2 t and 2 t + 1 of two rows, which share a register."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, t;
        prmt.b32 a, $2, $3, 0x5410;
        prmt.b32 b, $2, $3, 0x7632;
        or.b32 b, b, 0x00010001;
        max.u16x2 a, a, b;
        mov.u32 t, %laneid;
        and.b32 t, t, 3;
        mul.lo.u32 t, t, 0x00020002;
        or.b32 a, a, t;
        shfl.sync.bfly.b32 b, a, 1, 31, 0xffffffff;
        max.u16x2 a, a, b;
        shfl.sync.bfly.b32 b, a, 2, 31, 0xffffffff;
        max.u16x2 a, a, b;
        prmt.b32 $0, a, a, 0x1010;
        prmt.b32 $1, a, a, 0x3232;
        }""",
        "=&r,=&r,r,r", [x], dtype=gl.int16, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _own_row(x):
    """x [ROWS, 8] of a product with equal columns as [ROWS], a row a lane; lanes exchange nothing:
    each has four rows and takes one of them."""
    x, _ = gl.split(gl.reshape(x, [ROWS, 4, 2]))
    rows = gl.reshape(x, [4, 8, 4])
    like: gl.constexpr = rows.type.layout
    eights = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, like)))
    lanes = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, like)))
    eights = gl.expand_dims(gl.expand_dims(eights, 1), 2)
    lanes = gl.expand_dims(gl.expand_dims(lanes, 0), 1)
    own = gl.sum(gl.where(eights == lanes, rows, 0), 0)
    return gl.reshape(gl.permute(own, (1, 0)), [ROWS])


@gluon.jit
def _rows_of(tiles, half: gl.constexpr, FIRST: gl.constexpr, STEPS: gl.constexpr):
    """(sums float32, sizes and places of the largest int32) [ROWS] of queries of a tile of dS, from
    FIRST on of 64."""
    dtype: gl.constexpr = tiles.dtype
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2)
    B_L: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=PRODUCT, k_width=2)
    ones = gl.full([STEP, 8], 1.0, dtype, B_L)
    total = gl.zeros([ROWS, 8], gl.float32, PRODUCT)
    for i in gl.static_range(STEPS):
        ds = tiles.index(half * STEPS + i).slice(FIRST, ROWS, dim=1).permute((1, 0)).load(A_L)
        total = mma_v2(ds, ones, total)
        a, b = halves(ds)
        here = _larger(_sized(a, STEP * i), _sized(b, STEP * i + 8))
        if i == 0:
            largest = here
        else:
            largest = _larger(largest, here)
    return _own_row(total), _own_row(_largest_of_rows(largest)).to(gl.int32)


@gluon.jit
def sum_rows(slot, smem, excess, FIRST: gl.constexpr, COUNT: gl.constexpr, T: gl.constexpr):
    """Leave sums of COUNT times ROWS rows of a tile of dS in the ring of `bundles.Excess`, without
    a fence for TMA, and free dS. Returns sizes and places of the largest, COUNT tensors [ROWS]."""
    STEPS: gl.constexpr = T.BN // STEP
    ds_s, excess_s = smem.ds.slots, excess.ring.slots
    # Swizzled tiles are 64 columns wide, and their pattern comes again every 8 rows.
    part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, 64], ds_s.dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = ds_s.index(slot)._reinterpret(ds_s.dtype, [T.BM // 64 * STEPS, STEP, 64], part)
    sums = excess_s.index(slot)._reinterpret(gl.float32, [T.BM // ROWS, ROWS], plain)
    found = ()
    for i in gl.static_range(FIRST, FIRST + COUNT):
        total, largest = _rows_of(tiles, i * ROWS // 64, i * ROWS % 64, STEPS)
        sums.index(i).store(total)
        found = found + (largest,)  # type: ignore[assignment]
    mbarrier.arrive(smem.ds.empty.index(slot), count=1)
    return found


@gluon.jit
def follow_largest(
    found, tile, n, excess, FIRST: gl.constexpr, COUNT: gl.constexpr, T: gl.constexpr
):
    """Ranks in memory after what `sum_rows` returned, of query tile ``tile`` and key tile n.

    After the arrivals that others wait for: these would wait for this.
    """
    for i in gl.static_range(COUNT):
        largest = found[i]
        first = excess.rank_ptr + tile * T.BM + (FIRST + i) * ROWS
        rank = (largest >> 7 << 23) | (n * T.BN + (largest & 127))
        gl.atomic_max(first + gl.arange(0, ROWS, largest.type.layout), rank, sem="relaxed")


@gluon.jit
def adder(excess, smem, items, T: gl.constexpr):
    """The later half of the rows of every dS tile, for its writer, who has the other half."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    HALF: gl.constexpr = T.BM // ROWS // 2
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
                    found = sum_rows(slot, smem, excess, HALF, HALF, T)
                    fence_async_shared()
                    mbarrier.arrive(excess.ring.full.index(slot), count=1)
                    follow_largest(found, m, n, excess, HALF, HALF, T)
                    slot, parity = advance(slot, parity, PAIR)


__all__ = ["ROWS", "adder", "follow_largest", "sum_rows"]

"""Of the rows of dS as it multiplies K: what they sum to, and a key of their largest.

The consumers of `backward` make the sum beside dQ, a product with ones. A warp that has time reads
every tile of dS where they leave it, [keys, queries], as fragments of tensor-core products. A
packed integer maximum over them finds the key: of a dS it takes sign and low bits off and puts the
key's place in the tile there (`numerics.key_of_rank`), two dS an instruction.

Shape legend: as in `backward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from stable_attention.hopper.barriers import advance
from stable_attention.hopper.producer import PAIR
from stable_attention.hopper.softmax import halves, product_layout
from stable_attention.hopper.tiles import first_row_of, item_at, place_of, query_tiles_of

ROWS = gl.constexpr(32)
"""Queries of a product: a lane's own row each, in the end."""
STEP = gl.constexpr(16)
"""Keys of a product."""
ONES = gl.constexpr(16)
"""Keys of a product with ones."""
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
def row_sums(ds, ones, W: gl.constexpr, T: gl.constexpr):
    """Start the sums of this consumer's 64 rows of a tile of dS, in 8 equal columns, products with
    the same ones."""
    total = gl.zeros([64, 8], gl.float32, product_layout(8))
    FIRST: gl.constexpr = W * 64 if T.BM == 128 else 0
    KEYS: gl.constexpr = ones.shape[1]
    for i in gl.static_range(T.BN // KEYS):
        part = ds.slice(i * KEYS, KEYS).slice(FIRST, 64, dim=1).permute((1, 0))
        total = warpgroup_mma(part, ones.permute((1, 0)), total, use_acc=i > 0, is_async=True)
    return total


@gluon.jit
def _largest_of(tiles, half: gl.constexpr, FIRST: gl.constexpr, STEPS: gl.constexpr):
    """Sizes and places of the largest, int32 [ROWS], of queries of a tile of dS, from FIRST on of
    64."""
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PRODUCT, k_width=2)
    for i in gl.static_range(STEPS):
        ds = tiles.index(half * STEPS + i).slice(FIRST, ROWS, dim=1).permute((1, 0)).load(A_L)
        a, b = halves(ds)
        here = _larger(_sized(a, STEP * i), _sized(b, STEP * i + 8))
        if i == 0:
            largest = here
        else:
            largest = _larger(largest, here)
    return _own_row(_largest_of_rows(largest)).to(gl.int32)


@gluon.jit
def _follow(slot, tile, n, smem, excess, T: gl.constexpr):
    """Ranks of a tile of dS, of query tile ``tile`` and key tile n; frees dS."""
    STEPS: gl.constexpr = T.BN // STEP
    ds_s = smem.ds.slots
    # Swizzled tiles are 64 columns wide, and their pattern comes again every 8 rows.
    part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, 64], ds_s.dtype)
    tiles = ds_s.index(slot)._reinterpret(ds_s.dtype, [T.BM // 64 * STEPS, STEP, 64], part)
    found = ()
    for i in gl.static_range(T.BM // ROWS):
        largest = _largest_of(tiles, i * ROWS // 64, i * ROWS % 64, STEPS)
        found = found + (largest,)  # type: ignore[assignment]
    mbarrier.arrive(smem.ds.empty.index(slot), count=1)
    for i in gl.static_range(T.BM // ROWS):
        largest = found[i]
        place = excess.rank_ptr + tile * T.BM + i * ROWS
        rank = (largest >> 7 << 23) | (n * T.BN + (largest & 127))
        gl.atomic_max(place + gl.arange(0, ROWS, largest.type.layout), rank, sem="relaxed")


@gluon.jit
def follower(excess, smem, items, T: gl.constexpr):
    """The largest of the rows of every dS tile, for which nobody waits."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
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
                    _follow(slot, m, n, smem, excess, T)
                    slot, parity = advance(slot, parity, PAIR)


__all__ = ["ONES", "follower", "row_sums"]

"""Pieces of the forward pass's softmax and epilogue, for tiles in the registers of one warpgroup.

What they compute is defined in `stable_attention.numerics`, which Gluon cannot call; the tests hold
both against each other (tests/kernels/gpu/test_hopper.py). Here it is said in the form in which it
costs least on sm_90.

Shape legend: a tile of a product is [64, N] float32; a lane holds columns 2 c and 2 c + 1 modulo 8
of two rows of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
)

from stable_attention.hopper.tiles import store_tile

LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)
"""[64, 4]: one number a lane of each of its rows."""


PLACES = gl.constexpr(21)
"""Bits of `follow` that say where: 17 are a block's, of up to 2^23 keys."""
NOTHING = gl.constexpr(-3.0e38)
"""The largest score, in log2 units, of a row that has seen no key: -inf - -inf would be NaN."""


@gluon.constexpr_function
def product_layout(N):
    """Of a product [64, N] in the registers of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])


@gluon.jit
def softened(s, steepness, CAPPED: gl.constexpr):
    """`numerics.soften`; steepness: 2 log2 e times the scale over the cap.

    `dispatch` gives forward passes none: there it is slower than the portable kernels in windows.
    """
    if CAPPED:
        s = 1.0 - 2.0 / (gl.exp2(s * steepness) + 1.0)
    return s


@gluon.jit
def by_lane(p):
    """Row sums of what each lane holds of p [64, N], without an exchange; [64, 4] in `LANES`."""
    x = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.convert_layout(gl.sum(gl.sum(x, 3), 1), LANES, assert_trivial=True)


@gluon.jit
def widened(x):
    """16-bit x of a product [64, N] as float32; opaque, as `high_part` is."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=&r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def follow(rank, p, number):
    """rank [64, 4] in `LANES`, 0 before the first block, after the P [64, 64] of a block.

    One integer maximum finds a row's largest P and where that is. The upper 10 bits are those of P
    below its sign and its first exponent bit: P is 1 at most. Below them are the block's number and
    the place among the lane's 16 columns. P that agree to an eighth count as equal.
    """
    bits = _pairs(p.to(gl.int32, bitcast=True))
    like: gl.constexpr = bits.type.layout
    place = _columns(p.shape[1], like)
    bits = (bits & -16) | (place >> 2) | (place & 1)
    top = gl.convert_layout(gl.max(gl.max(bits, 3), 1), LANES, assert_trivial=True)
    new = ((top << 1) & -(1 << PLACES)) | (top & 15) | (number << 4)
    return pinned(gl.maximum(rank, new))


@gluon.jit
def largest_key(rank):
    """(block of a row's largest P [64], its column there, whether there is one)."""
    top = gl.max(rank, 1)
    lanes = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LANES)), 0)
    lane = gl.max(gl.where(rank == gl.expand_dims(top, 1), lanes, 0), 1)
    column = (top & 14) * 4 + 2 * lane + (top & 1)
    return (top & ((1 << PLACES) - 1)) >> 4, column, top >= (1 << PLACES)


@gluon.jit
def pinned(x):
    """32-bit x, computed where this stands: LLVM does not move an assembler statement."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
    )


@gluon.jit
def _pairs(s):
    """s [64, N] by lane: [64, N / 8, 4, 2]."""
    return gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])


@gluon.jit
def _lane_limits(last, PER_ROW: gl.constexpr, LAYOUT: gl.constexpr):
    """``last`` (+ row where PER_ROW) less a lane's first column, for comparison with `_columns`.

    The columns become constants of the comparisons: as registers they fill 32 through the whole
    loop, and compared early 64 predicates are packed into bits.
    """
    limit = last - 2 * gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LANES)), 0)
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LANES)), 1)
    limit = limit + (rows if PER_ROW else rows * 0)
    limit = gl.convert_layout(
        pinned(limit), gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)), assert_trivial=True
    )
    return gl.expand_dims(gl.expand_dims(limit, 1), 3)


@gluon.jit
def _columns(N: gl.constexpr, LAYOUT: gl.constexpr):
    """A lane's columns of a [64, N] less its first one, in the form of `_pairs`."""
    eights: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    ones: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    c8 = gl.arange(0, N // 8, eights)
    c1 = gl.arange(0, 2, ones)
    c8 = gl.expand_dims(gl.expand_dims(gl.expand_dims(c8, 0), 2), 3)
    c1 = gl.expand_dims(gl.expand_dims(gl.expand_dims(c1, 0), 1), 2)
    return c8 * 8 + c1


@gluon.jit
def hidden_after(s, last, PER_ROW: gl.constexpr):
    """s [64, N] with -inf in columns after ``last``, or after last + row where PER_ROW."""
    kept: gl.constexpr = s.type.layout
    x = _pairs(s)
    split: gl.constexpr = x.type.layout
    limit = _lane_limits(last, PER_ROW, split)
    x = gl.where(limit >= _columns(s.shape[1], split), x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [s.shape[0], s.shape[1]]), kept, assert_trivial=True)


@gluon.jit
def hidden_outside(s, right, left, end):
    """s [64, N] with -inf in columns after ``right`` + row or ``end``, or before ``left`` + row."""
    kept: gl.constexpr = s.type.layout
    x = _pairs(s)
    split: gl.constexpr = x.type.layout
    columns = _columns(s.shape[1], split)
    last = gl.minimum(_lane_limits(right, True, split), _lane_limits(end, False, split))
    seen = (last >= columns) & (_lane_limits(left, True, split) <= columns)
    x = gl.where(seen, x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [s.shape[0], s.shape[1]]), kept, assert_trivial=True)


@gluon.jit
def halves(p):
    """[M, N] as two [M, N / 2]: registers only."""
    return gl.split(gl.permute(gl.reshape(p, [p.shape[0], 2, p.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def whole(a, b, LAYOUT: gl.constexpr):
    """Two [M, N] side by side, the inverse of `halves`."""
    x = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [a.shape[0], a.shape[1] * 2])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def opaque_zeros(like):
    """Zeros in the form of ``like`` that LLVM does not see through: it would keep a P that is half
    zeros in float32 up to the loop."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [like], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _by_thread(x):
    """[64, N] of a product as [N / 2, 128]: register by thread."""
    # Row: warp, half of the lane's two rows, lane // 4. Column: eighth, lane % 4, neighbour.
    N: gl.constexpr = x.shape[1]
    y = gl.permute(gl.reshape(x, [4, 2, 8, N // 8, 4, 2]), (3, 1, 5, 0, 2, 4))
    return gl.reshape(y, [N // 2, 128])


@gluon.jit
def put_away(place, x):
    """Leave [64, N] of a product where each thread finds its own again, in 256 N bytes of shared
    memory; nobody waits for anybody."""
    place.store(_by_thread(x))


@gluon.jit
def fetched(place, LIKE: gl.constexpr):
    """What `put_away` left, in the layout LIKE of a [64, N]."""
    N: gl.constexpr = place.shape[0] * 2
    spread: gl.constexpr = _by_thread(gl.zeros([64, N], gl.float32, LIKE)).type.layout
    y = gl.permute(gl.reshape(place.load(spread), [N // 8, 2, 2, 4, 8, 4]), (3, 1, 4, 0, 5, 2))
    return gl.convert_layout(gl.reshape(y, [64, N]), LIKE, assert_trivial=True)


@gluon.jit
def _own_numbers(x):
    """[64, N] of a product as [N / 8, 128, 4]: a thread's registers, in fours of 16 bytes."""
    N: gl.constexpr = x.shape[1]
    y = gl.permute(gl.reshape(x, [4, 2, 8, N // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.reshape(y, [N // 8, 128, 4])


@gluon.jit
def _own_offsets(N: gl.constexpr, LAYOUT: gl.constexpr):
    """Of numbers in the form of `_own_numbers`, in 256 N bytes of memory."""
    eights: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    threads: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    ones: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    e = gl.expand_dims(gl.expand_dims(gl.arange(0, N // 8, eights), 1), 2)
    t = gl.expand_dims(gl.expand_dims(gl.arange(0, 128, threads), 0), 2)
    c = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, ones), 0), 1)
    return e * 512 + pinned(t) * 4 + c


@gluon.jit
def keep(ptr, x):
    """Leave [64, N] of a product in memory, where each thread finds its own again."""
    N: gl.constexpr = x.shape[1]
    y = _own_numbers(x)
    spread: gl.constexpr = y.type.layout
    gl.store(ptr + _own_offsets(N, spread), y)


@gluon.jit
def add_kept(ptr, x, factor):
    """x [64, N] plus what `keep` left, times ``factor`` [64]."""
    N: gl.constexpr = x.shape[1]
    like: gl.constexpr = x.type.layout
    spread: gl.constexpr = _own_numbers(x).type.layout
    y = gl.load(ptr + _own_offsets(N, spread))
    y = gl.permute(gl.reshape(y, [N // 8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    y = gl.convert_layout(gl.reshape(y, [64, N]), like, assert_trivial=True)
    return y * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, like)), 1) + x


@gluon.jit
def split(acc, FAR: gl.constexpr):
    """(columns whose total is in registers, the others: none of them unless FAR)."""
    if FAR:
        return halves(acc)
    else:
        return acc, acc


@gluon.jit
def join_total(acc, total, far_s, held, factor, FAR: gl.constexpr):
    """acc joined to the total whose shift needs ``factor`` [64], as in `split`.

    FAR: 64 columns of the total are in registers, the others in shared memory, if any are ``held``.
    """
    near, far = split(acc, FAR)
    like: gl.constexpr = near.type.layout
    by_row = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, like)), 1)
    if FAR:
        far += gl.where(held, fetched(far_s, like), 0.0) * by_row
    return total * by_row + near, far


@gluon.jit
def last_keys_first(p, LAYOUT: gl.constexpr):
    """[64, 64 or 128] as left sides [64, 32] of products: registers only."""
    a, b = halves(p)
    if p.shape[1] == 64:
        return gl.convert_layout(b, LAYOUT), gl.convert_layout(a, LAYOUT)
    else:
        a0, a1 = halves(a)
        b0, b1 = halves(b)
        return (
            gl.convert_layout(b1, LAYOUT),
            gl.convert_layout(b0, LAYOUT),
            gl.convert_layout(a1, LAYOUT),
            gl.convert_layout(a0, LAYOUT),
        )


@gluon.jit
def add_rounded_sum(p, ones, total, use_total, LAYOUT: gl.constexpr):
    """Start total + P 1, P [64, N] rounded, in products with the same ones [8, 32].

    One product with ones for all of P fills 16 uniform registers with descriptors, which spill.
    The last keys come first, as in `add_weighted`.
    """
    parts = last_keys_first(p, LAYOUT)
    column = ones.permute((1, 0))
    t = warpgroup_mma(parts[0], column, total, use_acc=use_total, is_async=True)
    for i in gl.static_range(1, p.shape[1] // 32):
        t = warpgroup_mma(parts[i], column, t, is_async=True)
    return t


@gluon.jit
def add_weighted(p, v, total, use_total, LAYOUT: gl.constexpr):
    """Start total + P V, P [64, N] rounded, in two products, the later keys first.

    Tensor cores truncate what they add to a sum. The largest weight of a row is often that of its
    first key, an attention sink, and what comes after it is truncated most: with one product the
    error of dQ under a saturated sink is three to four times as large.
    """
    a, b = halves(p)
    N: gl.constexpr = a.shape[1]
    later = gl.convert_layout(b, LAYOUT)
    t = warpgroup_mma(later, v.slice(N, N), total, use_acc=use_total, is_async=True)
    return warpgroup_mma(gl.convert_layout(a, LAYOUT), v.slice(0, N), t, is_async=True)


@gluon.jit
def log_sum_exp_planes(shift, l):
    """LSE in two planes, log2 units."""
    log = gl.log2(gl.where(l > 0, l, 1.0))
    base = gl.where(l > 0, shift, 0.0)
    first = base + log
    back = first - base
    return gl.where(l > 0, first, -float("inf")), (base - (first - back)) + (log - back)


@gluon.jit
def high_part(x, DTYPE: gl.constexpr):
    """x float32 rounded to DTYPE; opaque, or LLVM makes two scalar roundings of one used twice."""
    if DTYPE == gl.bfloat16:  # noqa: SIM300
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;",
            "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def low_part(x, high):
    """BF16 of x - high; high 16-bit."""
    if high.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shl.b32 a, $3, 16;
            and.b32 b, $3, 0xffff0000;
            sub.f32 a, $1, a;
            sub.f32 b, $2, b;
            cvt.rn.bf16x2.f32 $0, b, a;
            }""",
            "=r,r,r,r", [x, high], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (x - high.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def store_rows(
    acc, high_s, low_s, o_desc, low_desc, row, column, start, length,
    HAS_LOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """O and its low-order part, through shared memory that only this consumer uses, and as many
    columns at once as that has."""
    if acc.shape[1] > high_s.shape[1]:
        a, b = halves(acc)
        store_rows(a, high_s, low_s, o_desc, low_desc, row, column, start, length, HAS_LOW, PACKED)
        column += a.shape[1]
        store_rows(b, high_s, low_s, o_desc, low_desc, row, column, start, length, HAS_LOW, PACKED)
    else:
        high = high_part(acc, high_s.dtype)
        tma.store_wait(0)
        high_s.store(high)
        if HAS_LOW:
            low_s.store(low_part(acc, high))
        fence_async_shared()
        store_tile(o_desc, row, column, start, length, high_s, PACKED)
        if HAS_LOW:
            store_tile(low_desc, row, column, start, length, low_s, PACKED)


__all__ = [
    "LANES",
    "NOTHING",
    "add_kept",
    "add_rounded_sum",
    "add_weighted",
    "by_lane",
    "fetched",
    "follow",
    "halves",
    "hidden_after",
    "hidden_outside",
    "high_part",
    "join_total",
    "keep",
    "largest_key",
    "log_sum_exp_planes",
    "low_part",
    "opaque_zeros",
    "pinned",
    "product_layout",
    "put_away",
    "softened",
    "split",
    "store_rows",
    "whole",
    "widened",
]

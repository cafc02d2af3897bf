"""The numerics: softmax step, the two normalisers, O's low-order part, and delta. One home.

What is stabilised, and why (arXiv 2510.04212; docs/numerics.md):

* The backward pass needs delta_i = sum_c dO_ic O_ic, and dS_ij = P_ij (dP_ij - delta_i). An error
  e_i in delta_i is an error -e_i in the row sum of dS, multiplied by (P K)_i in dQ. Attention sinks
  make e_i the same number for every row, so that it does not average out over a batch.
* O stored in 16 bits is one source of e. "compensated" keeps O_lo = O - O_hi, and delta uses both.
* The other source: the tensor cores multiply V by P *rounded to 16 bits*, so O is a weighted mean
  only if it is divided by the sum of the same rounded P. Hence two sums:
      l_rounded   sum of rounded P           normalises O and the backward's P (but in two parts,
                                             where P is divided by its own: `triton.projection`)
      l_fp32      sum of unrounded P         gives LSE and the merge weights, where asked for
* A third, which grows with the key length: tensor cores truncate when they add to a large
  accumulator, a one-sided error of up to 2^-24 of it per 16 keys (`truncation`). "compensated" lets
  them accumulate inside a segment of SEGMENT keys only and adds the segments with rounding to
  nearest (`add_segment`); a segment of one tile costs nothing more than the rescaling (`add_late`).

Units: scores arrive unscaled in float32; ``unit`` turns them into log2 units (scale * log2 e), so
that one fused multiply-add and exp2 make a probability. Row statistics m (the shift that p and what
is accumulated have) and top (the largest score so far) are in log2 units.

Shape legend: BM query rows, BN key columns of a tile, DV value head dim.
"""

import triton
import triton.language as tl

from stable_attention import interpreter

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
if INTERPRETED.value:
    # Triton's own arithmetic of interpreted BF16 is that of bit patterns: wrong, and silent.
    interpreter.install()
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Largest distance, in log2 units, by which the dynamic maximum may exceed a row's true maximum: the
# largest P of the row stays >= 2^-bound. fp16 has no exponents below 2^-24, BF16 reaches 2^-126.
DYNAMIC_BOUND_BF16 = tl.constexpr(60.0)
DYNAMIC_BOUND_FP16 = tl.constexpr(4.0)


# How far, in log2 units, a tile's maximum may lie below the running one and still be its shift.
# Weights below 2^-8 of a row's largest do not show in the row's rounding; and what was accumulated,
# which then is up to 2^8 times what it would be, has room for that.
OWN_SHIFT_BOUND = tl.constexpr(8.0)


def truncation(keys: int) -> float:
    """Bound on the mean relative error of a tensor-core sum over so many keys.

    Each addition of 16 keys drops the bits below the sum's last one: half of that on average, at
    most 2^-24 of the sum. O is a quotient of two such sums, so its error is their difference. That
    of delta is at most sum |dO O| times this; and segments, which are added with rounding to
    nearest, have no mean error more than the worst of them.
    """
    return keys / 16 * 2.0**-24


@triton.jit
def soften(s, capped_scale, CAPPED: tl.constexpr):
    """Softcap: tanh(s * scale / cap); the caller's ``unit`` then holds cap * log2 e."""
    if CAPPED:
        # tanh from one exp2; saturates to +-1 without NaN because exp2 reaches inf or 0.
        s = 1.0 - 2.0 / (tl.exp2(s * (2.0 * capped_scale * LOG2E)) + 1.0)
    return s


@triton.jit
def round_scores(s, PAPER: tl.constexpr):
    """The failing emulation stores the scores in BF16; every other path keeps them."""
    if PAPER:
        s = s.to(tl.bfloat16).to(tl.float32)
    return s


@triton.jit
def row_shift(
    s, m, top, unit, beta, eps,
    DYNAMIC: tl.constexpr, PAPER: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """(shift of each row for a tile of scores, running maximum with it), in log2 units.

    The shift is the tile's own maximum, if that is within OWN_SHIFT_BOUND of the running maximum
    ``top``: the largest P of a row is exactly 1, and not rounded, in every tile and not only in the
    one that holds the row's maximum (docs/numerics.md). It may fall from tile to tile, and alpha
    then exceeds 1.

    Under DYNAMIC it is the dynamic maximum: Algorithm 1 of arXiv 2510.04212 moves the shift away
    from a maximum that repeats, so that no P is exactly 1. There it may underflow a whole row
    (l = 0, NaN); here it exceeds the true maximum by at most BOUND, the documented difference.
    Under PAPER, the running maximum of ordinary kernels.
    """
    r = tl.max(s, 1) * unit
    new_top = tl.maximum(top, r)
    if DYNAMIC:
        near = tl.sum((s * unit >= (r - eps * LOG2E)[:, None]).to(tl.int32), 1)
        moved = tl.where(r > 0, r * beta, 0.0)
        moved = tl.minimum(tl.maximum(moved, r), r + BOUND)
        r = tl.where((near > 1) & (r > -float("inf")), moved, r)
        return tl.maximum(m, r), new_top
    elif PAPER:
        return new_top, new_top
    else:
        return tl.maximum(r, top - OWN_SHIFT_BOUND), new_top


@triton.jit
def over_lanes(x):
    """x [BM] as [BM, 4]: one for each lane that holds part of a tensor-core tile's row. Costs
    nothing: the broadcast goes to the columns of such a tile, and each lane keeps one of its own.
    """
    wide = tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], 8]), [x.shape[0], 4, 2])
    return tl.max(wide, 2)


@triton.jit
def one_a_lane(x):
    """[BM, 4] of x [BM, 8 or 16], whose columns are equal: one register of those a lane holds."""
    BM: tl.constexpr = x.shape[0]
    if x.shape[1] == 16:
        x, _ = tl.split(tl.permute(tl.reshape(x, [BM, 2, 8]), [0, 2, 1]))
    x, _ = tl.split(tl.reshape(x, [BM, 4, 2]))
    return x


@triton.jit
def add_row_sum(total, alpha, p):
    """total * alpha + row sums of p [BM, BN], on the float32 pipes; alpha [BM].

    total is [BM], or [BM, 4]: the sums of columns 2 c, 2 c + 1 modulo 8, which are what one thread
    of a tensor-core tile holds, so that lanes exchange nothing until the end of the row.
    """
    if len(total.shape) == 2:
        BM: tl.constexpr = p.shape[0]
        lanes = tl.sum(tl.reshape(p, [BM, p.shape[1] // 8, 4, 2]), 3)
        total = total * over_lanes(alpha) + tl.sum(lanes, 1)
    else:
        total = total * alpha + tl.sum(p, 1)
    return total


@triton.jit
def softmax_step(
    s, m, l, top, unit, beta, eps,
    MASKED: tl.constexpr, SUM: tl.constexpr, DYNAMIC: tl.constexpr, PAPER: tl.constexpr,
    BOUND: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over a score tile.

    Args:
        s: [BM, BN] float32 scores (-inf where masked); m: [BM] shift so far; l: float32 sum
            as in `add_row_sum`, left alone unless SUM; top: [BM] running maximum.

    Returns:
        (p float32 [BM, BN], alpha [BM] that rescales what was accumulated, the new m, l and top).
    """
    m_new, top = row_shift(s, m, top, unit, beta, eps, DYNAMIC, PAPER, BOUND)
    # A row that has seen no key yet has m = -inf; -inf - -inf would be NaN.
    shift = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(s * unit - shift[:, None])
    alpha = tl.exp2(m - shift)
    if SUM:
        l = add_row_sum(l, alpha, p)
    if PAPER:
        l = l.to(tl.bfloat16).to(tl.float32)
    return p, alpha, m_new, l, top


@triton.jit
def accumulate(acc, alpha, p, v, PAPER: tl.constexpr):
    """acc * alpha + p @ v, [BM, DV] float32; p rounded to v's dtype.

    With a matrix of ones for v this is the sum of the *rounded* p, for free: the tensor cores read
    the very numbers that multiply V, and no instruction widens them back to float32.
    """
    if PAPER:
        acc = (acc * alpha[:, None]).to(tl.bfloat16).to(tl.float32)
        acc = (acc + tl.dot(p, v).to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    else:
        acc = tl.dot(p, v, acc * alpha[:, None])
    return acc


@triton.jit
def add_segment(total, part, m_before, m):
    """total rescaled from shift m_before to m, plus the part that has shift m; [BM, *] float32."""
    return total * tl.exp2(m_before - m)[:, None] + part


@triton.jit
def add_late(total, part, alpha):
    """total rescaled by a tile's alpha plus that tile's product; [BM, *] float32, rounded once."""
    return total * alpha[:, None] + part


@triton.jit
def add_late_sum(total, part, alpha):
    """`add_late` of row sums: total [BM, 4], part a product [BM, 8 or 16] of equal columns."""
    return total * over_lanes(alpha) + one_a_lane(part)


@triton.jit
def add_sink(sink, m, l, l_rounded):
    """Let a sink logit (natural log units) join the softmax: it takes weight and gives no value.

    Returns (factor that rescales acc, m, l, l_rounded). The sink may exceed every score, and one
    of -inf takes no weight.
    """
    sink2 = sink.to(tl.float32) * LOG2E  # learnable sinks may be 16-bit
    m_new = tl.maximum(m, sink2)
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # neither keys nor sink: not -inf - -inf
    alpha = tl.exp2(m - shift)
    weight = tl.exp2(sink2 - shift)
    return alpha, m_new, l * alpha + weight, l_rounded * alpha + weight


@triton.jit
def inverse(l):
    """1 / l, and 0 for rows without any key, so that their output is 0."""
    return tl.where(l > 0, 1.0 / tl.where(l > 0, l, 1.0), 0.0)


@triton.jit
def log_sum_exp(m, l):
    """Natural-log LSE from log2 statistics; -inf for rows without any key."""
    return tl.where(l > 0, (m + tl.log2(tl.where(l > 0, l, 1.0))) * LN2, -float("inf"))


@triton.jit
def log_sum_exp_planes(m, l):
    """LSE in log2 units as two float32 numbers, whose sum is m + log2 l without rounding; (-inf, 0)
    for rows without any key. One number is off by 3 % of P where logits reach 1e6."""
    log = tl.log2(tl.where(l > 0, l, 1.0))
    base = tl.where(l > 0, m, 0.0)
    hi = base + log
    back = hi - base
    lo = (base - (hi - back)) + (log - back)
    return tl.where(l > 0, hi, -float("inf")), lo


@triton.jit
def widen(x):
    """16-bit to float32, exact. For BF16 by its bits: a cast next to the rounding that made x keeps
    the compiler from packing two roundings into one instruction."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_and_widen(p, DTYPE: tl.constexpr):
    """(p rounded to DTYPE, the same as float32): one packed conversion and one unpacking each.

    In assembler, because the compiler takes a rounding whose bits are used twice for two scalar
    conversions, each at a sixteenth of the rate. The interpreter runs what it means.
    """
    if INTERPRETED:
        rounded = p.to(DTYPE)
        return rounded, widen(rounded)
    elif DTYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;",
            "=&r,=&r,=&r,r,r", [p], dtype=(tl.bfloat16, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.f16x2.f32 $0, $4, $3; mov.b32 {lo, hi}, $0;"
            " cvt.f32.f16 $1, lo; cvt.f32.f16 $2, hi; }",
            "=&r,=&r,=&r,r,r", [p], dtype=(tl.float16, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def pinned(x):
    """float32 x, computed where this stands.

    An assembler statement that compilers may not move. LLVM otherwise sinks a sum that a loop
    carries past the wait for V, where ptxas puts its additions between the products.
    """
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1
        )


@triton.jit
def half_ulp(hi, wide):
    """(half the spacing of hi's 16-bit format at hi, its reciprocal); wide is hi as float32.

    Powers of two made from hi's own exponent: nothing is stored, and no element costs a division.
    The low-order part of O lies within +-half_ulp(O_hi), so int8 spends all its codes there.
    """
    bits = wide.to(tl.int32, bitcast=True) & 0x7F800000
    if hi.dtype == tl.bfloat16:
        # 8 significand bits; the floor of 2^-112 keeps 127 / half_ulp finite.
        bits = tl.maximum(bits, 15 << 23)
        digits = 256.0
    else:
        # 11 significand bits; below 2^-14 fp16 spacing is constant.
        bits = tl.maximum(bits, 113 << 23)
        digits = 2048.0
    power = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return power * (1.0 / digits), inverse * digits


@triton.jit
def residual_encode(o, hi, wide, LOW_DTYPE: tl.constexpr):
    """Low-order part of o float32 left behind by its 16-bit rounding hi, as bf16 or int8 codes.

    wide is hi as float32: of `round_and_widen` where hi is also stored.
    """
    low = o - wide
    if LOW_DTYPE == tl.int8:  # noqa: SIM300
        _, inverse = half_ulp(hi, wide)
        # Added to 1.5 * 2^23, a code is rounded to nearest (a cast would truncate, a bias towards
        # zero) and lies in the lowest bits, in two's complement: no slow conversion, and no bound
        # needed, because |low| <= half_ulp. Where O overflows low is inf or NaN, and the code 0.
        code = low * (127.0 * inverse) + 12582912.0
        return code.to(tl.int32, bitcast=True).to(tl.int8)
    return low.to(LOW_DTYPE)


@triton.jit
def residual_decode(low, hi):
    """The float32 low-order part from its storage."""
    if low.dtype == tl.int8:
        half, _ = half_ulp(hi, widen(hi))
        return low.to(tl.float32) * (half * (1.0 / 127.0))
    return low.to(tl.float32)


@triton.jit
def row_delta(do, o):
    """delta [BM] = rowsum(dO * O) in float32; o is O_hi, or O_hi + O_lo under "compensated"."""
    return tl.sum(do.to(tl.float32) * o, 1)


@triton.jit
def lse_to_shift(lse):
    """LSE (natural log) to the backward's shift in log2 units; rows without keys: +inf, P = 0."""
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)


@triton.jit
def lse_planes_to_shift(hi):
    """The first plane of `log_sum_exp_planes` as the backward's shift; as `lse_to_shift`."""
    return tl.where(hi == -float("inf"), float("inf"), hi)


@triton.jit
def largest_start(BM: tl.constexpr):
    """(rank, first key of its tile) [BM, 4] of a row's largest P so far: none."""
    return tl.zeros([BM, 4], tl.int32), tl.zeros([BM, 4], tl.int32)


@triton.jit
def follow_largest(rank, tile, p, n):
    """`largest_start` after a tile p [BM, BN] of P whose first key is n.

    A rank is the bits of P, which order as P does, the last ones of which are the key's place in
    the tile: one integer maximum finds both. P that agree to 2^-16 count as equal.
    """
    BM: tl.constexpr = p.shape[0]
    BN: tl.constexpr = p.shape[1]
    bits = p.to(tl.int32, bitcast=True)
    # A P that is 0 has rank 0, of no key.
    bits = tl.where(bits >= BN, (bits & -BN) | tl.arange(0, BN)[None, :], 0)
    new = tl.max(tl.max(tl.reshape(bits, [BM, BN // 8, 4, 2]), 3), 1)
    return tl.maximum(rank, new), tl.where(new > rank, n, tile)


@triton.jit
def largest_key(rank, tile, BN: tl.constexpr):
    """(a row's key of the largest P [BM], whether it has one)."""
    top = tl.max(rank, 1)
    first = tl.max(tl.where(rank == top[:, None], tile, 0), 1)
    return first + (top & (BN - 1)), top > 0


@triton.jit
def key_of_rank(rank):
    """(key, whether there is one) of a row's largest dS: the last of those that are within a factor
    of two of it. The upper 8 of the 15 bits of |dS| are those of a rank, the key is in its lower
    23: one integer maximum finds both, in any order."""
    return rank & 0x7FFFFF, rank > 0x7FFFFF


@triton.jit
def score_slope(ds, s, CAPPED: tl.constexpr):
    """Chain rule through the softcap: s = tanh(.) here, whose derivative is 1 - s^2."""
    if CAPPED:
        ds = ds * (1.0 - s * s)
    return ds

"""Where sequences lie in memory, and which tiles of a sequence can be visible to each other.

Query row i (local) sees key j (local) iff
    i + shift - left <= j <= i + shift + right        (a bound exists only where its flag is set)
with shift = sk - sq for whole sequences (bottom-right alignment), and the difference of the global
positions of row 0 and key 0 for chunks of a sequence.

Shape legend: BM query rows, BN key columns of a tile.
"""

import triton
import triton.language as tl

# A step's MASKED argument beside False and True: masked where a scalar says so at run time.
AT_EDGE = tl.constexpr(2)


@triton.jit
def locate(cu, starts, b, total, length, VARLEN: tl.constexpr):
    """(first token in memory, length) of sequence b.

    Bad offsets on the device are clamped into [0, total], so the kernels stay memory-safe.
    """
    start = b * 0  # dense tensors reach their sequence through the batch stride
    if VARLEN:
        begin = tl.load(cu + b)
        n = tl.load(cu + b + 1) - begin
        start = tl.minimum(tl.maximum(tl.load(starts + b), 0), total)
        length = tl.minimum(tl.minimum(tl.maximum(n, 0), length), total - start)
    return start, length


@triton.jit
def align(
    sq, sk, b, q_pos, k_pos, q_pos_ptr, k_pos_ptr, CHUNKED: tl.constexpr, POS_PTR: tl.constexpr
):
    """(global position of row 0, of key 0, shift) of sequence b."""
    shift = sk - sq
    if CHUNKED:
        if POS_PTR:
            q_pos = tl.load(q_pos_ptr + b)
            k_pos = tl.load(k_pos_ptr + b)
        shift = q_pos - k_pos
    return q_pos, k_pos, shift


@triton.jit
def visible(rows, cols, sk, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Boolean tile of visible (row, key) pairs; rows and cols broadcast against each other.

    One comparison a bound: an edge tile costs every program its mask. Rows past the sequence count
    as rows; their queries, dO and delta are zeros, their P is 0 in the backward, and nobody stores
    what they get.
    """
    last = sk - 1
    if HAS_RIGHT:
        last = tl.minimum(rows + (shift + right), last)
    ok = cols <= last
    if HAS_LEFT:
        ok = ok & (cols >= rows + (shift - left))
    return ok


@triton.jit
def visible_transposed(
    rows, cols, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """`visible` for a tile of keys x queries: the bounds are a key's, which a thread has few of.

    Keys past the sequence count as keys: what they get is theirs, and nobody stores it.
    """
    first = cols * 0
    if HAS_RIGHT:
        first = cols - (shift + right)
    ok = rows >= first
    if HAS_LEFT:
        ok = ok & (rows <= cols - (shift - left))
    return ok


@triton.jit
def hide(x, rows, cols, mask, OTHER: tl.constexpr, T: tl.constexpr):
    """A tile x with OTHER where a query does not see a key; rows and cols as in `visible`.

    mask: `bundles.Mask` of queries.
    """
    ok = visible(
        rows, cols, mask.length, mask.shift, mask.left, mask.right, T.HAS_LEFT, T.HAS_RIGHT
    )
    return tl.where(ok, x, OTHER)


@triton.jit
def key_range(
    m0, sq, sk, shift, left, right,
    BM: tl.constexpr, BN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Key tiles a query tile needs: (lo, full_lo, full_hi, hi), multiples of BN.

    [full_lo, full_hi) needs no mask; [lo, full_lo) and [full_hi, hi) hold the edges of the band.
    """
    last = tl.minimum(m0 + BM, sq) - 1
    lo = 0
    hi = sk
    full_lo = 0
    full_hi = sk
    if HAS_RIGHT:
        hi = tl.minimum(hi, last + shift + right + 1)
        full_hi = tl.minimum(full_hi, m0 + shift + right + 1)
    if HAS_LEFT:
        lo = tl.maximum(lo, m0 + shift - left)
        full_lo = tl.maximum(full_lo, last + shift - left)
    hi = tl.maximum(hi, 0)
    lo = tl.minimum(lo, hi) // BN * BN
    hi = tl.cdiv(hi, BN) * BN
    full_lo = tl.minimum(tl.cdiv(full_lo, BN) * BN, hi)
    full_hi = tl.maximum(tl.maximum(full_hi, 0) // BN * BN, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_range(
    n0, sq, sk, shift, left, right,
    BM: tl.constexpr, BN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Query tiles a key tile needs: (lo, full_lo, full_hi, hi), multiples of BM."""
    last = tl.minimum(n0 + BN, sk) - 1
    lo = 0
    hi = sq
    full_lo = 0
    full_hi = sq
    if HAS_RIGHT:
        lo = tl.maximum(lo, n0 - shift - right)
        full_lo = tl.maximum(full_lo, last - shift - right)
    if HAS_LEFT:
        hi = tl.minimum(hi, last - shift + left + 1)
        full_hi = tl.minimum(full_hi, n0 - shift + left + 1)
    hi = tl.maximum(hi, 0)
    lo = tl.minimum(lo, hi) // BM * BM
    hi = tl.cdiv(hi, BM) * BM
    full_lo = tl.minimum(tl.cdiv(full_lo, BM) * BM, hi)
    full_hi = tl.maximum(tl.maximum(full_hi, 0) // BM * BM, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def edge_tile(t, lo, full_lo, full_hi, STEP: tl.constexpr):
    """Start of the t-th masked tile: those before the unmasked stretch, then those after it."""
    before = (full_lo - lo) // STEP
    return tl.where(t < before, lo + t * STEP, full_hi + (t - before) * STEP)


@triton.jit
def tile_and_head(pid, tiles, heads, HEAD_BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(tile, head) of a program in a grid of tiles * heads.

    HEAD_BLOCK neighbouring heads advance together, so that their keys and values stay in L2 while
    the long tiles of a causal mask (LAST_FIRST) start before the short ones.
    """
    span = tiles * HEAD_BLOCK
    block = pid // span
    in_block = tl.minimum(HEAD_BLOCK, heads - block * HEAD_BLOCK)
    r = pid - block * span
    tile = r // in_block
    head = block * HEAD_BLOCK + r % in_block
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, head

"""Rows of dS that sum to what they should, in the pass that makes dQ.

dS is rounded where it multiplies K, so that its row sum is off by an excess r_i, the error of delta
included; it shows in dQ_i as r_i times a mean of the keys (docs/numerics.md). What is followed over
the key tiles beside dQ takes it out again at the end of a row, along the key of the row's largest P
(KEY) or along P K (MEAN), and out of delta before the pass that makes dK. Chunks of a sequence keep
the sums and the key itself (KEY), and dK the delta it has.

Shape legend: BM query rows, BN key columns of a tile, BD padded head dim; the sums [BM, ONES] have
equal columns.
"""

import triton
import triton.language as tl

from stable_attention.numerics import follow_largest, largest_key, largest_start
from stable_attention.triton.parts import (
    add_dot_parts,
    add_rest,
    first_part,
    scale_parts,
    zero_parts,
)

# What a kernel's PROJECT argument says.
NONE, KEY, MEAN = (tl.constexpr(i) for i in range(3))
KINDS = {"": NONE.value, "key": KEY.value, "mean": MEAN.value}
ONES = tl.constexpr(8)


@triton.jit
def start(BM: tl.constexpr, BD: tl.constexpr, PROJECT: tl.constexpr, SPLIT: tl.constexpr):
    """What `follow` needs of the tiles before the first."""
    if PROJECT == KEY:
        rank, tile = largest_start(BM)
        total = tl.zeros([BM], tl.float32) if SPLIT else 0
        return tl.zeros([BM, ONES], tl.float32), rank, tile, total
    elif PROJECT == MEAN:
        return (
            tl.zeros([BM, ONES], tl.float32),
            tl.zeros([BM, ONES], tl.float32),
            zero_parts(BM, BD),
        )
    else:
        return 0, 0, 0


@triton.jit
def follow(state, ds, rounded, p, k, n, PROJECT: tl.constexpr, SPLIT: tl.constexpr):
    """`start` after a key tile from n on: ds, p [BM, BN] float32, ds ``rounded`` as it multiplies
    k, under SPLIT with its rest."""
    if PROJECT == NONE:
        return state
    else:
        # The sum of the very numbers that multiply K, and truncated as that product is.
        ones = tl.full([p.shape[1], ONES], 1.0, tl.float32).to(rounded.dtype)
        (excess,) = add_rest(ds, rounded, (ones,), (tl.dot(rounded, ones, state[0]),), SPLIT)
        if PROJECT == KEY:
            rank, tile = follow_largest(state[1], state[2], p, n)
            total = state[3] + tl.sum(p, 1) if SPLIT else state[3]
            return excess, rank, tile, total
        else:
            p = p.to(rounded.dtype)
            return excess, tl.dot(p, ones, state[1]), add_dot_parts(p, k, state[2])


@triton.jit
def _key_rows(ptr, stride, key, found, BD: tl.constexpr, D: tl.constexpr):
    """Row key[i] of K for each i, in parts and float32; zeros where none is found."""
    C1: tl.constexpr = first_part(BD)
    first = ptr + key.to(tl.int64)[:, None] * stride
    cols = tl.arange(0, C1)[None, :]
    head = tl.load(first + cols, mask=found[:, None] & (cols < D), other=0.0).to(tl.float32)
    if BD == C1:
        return (head,)
    else:
        cols = C1 + tl.arange(0, BD - C1)[None, :]
        tail = tl.load(first + cols, mask=found[:, None] & (cols < D), other=0.0).to(tl.float32)
        return head, tail


@triton.jit
def carry(
    state, excess_ptr, top_ptr, best_ptr, stride_best, rows, row_ok, key_ptr, stride_ks,
    BN: tl.constexpr, BD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add a chunk's share to what a row keeps between chunks; KEY alone.

    Args:
        excess_ptr, top_ptr: float32 at row 0: the sum of dS so far, and the largest P.
        best_ptr: at row 0, where the key of that P is kept; its chunk is gone by the end.
    """
    C1: tl.constexpr = first_part(BD)
    excess = tl.load(excess_ptr + rows, mask=row_ok, other=0.0) + tl.max(state[0], 1)
    tl.store(excess_ptr + rows, excess, mask=row_ok)
    key, found = largest_key(state[1], state[2], BN)
    # Without the key's place in its tile: equal P of two chunks stay with the first.
    top = (tl.max(state[1], 1) & -BN).to(tl.float32, bitcast=True)
    found &= row_ok & (top > tl.load(top_ptr + rows, mask=row_ok, other=float("inf")))
    tl.store(top_ptr + rows, top, mask=found)
    best = _key_rows(key_ptr, stride_ks, key, found, BD, D)
    to = best_ptr + rows.to(tl.int64)[:, None] * stride_best
    cols = tl.arange(0, C1)[None, :]
    dtype: tl.constexpr = best_ptr.dtype.element_ty
    tl.store(to + cols, best[0].to(dtype), mask=found[:, None] & (cols < D))
    if BD != C1:
        cols = C1 + tl.arange(0, BD - C1)[None, :]
        tl.store(to + cols, best[1].to(dtype), mask=found[:, None] & (cols < D))


@triton.jit
def finish(
    dq, state, rest, delta_ptr, delta_lo_ptr, plane, rows, row_ok, key_ptr, stride_ks,
    BN: tl.constexpr, BD: tl.constexpr, D: tl.constexpr,
    PROJECT: tl.constexpr, TARGET: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dq [BM, BD] without the excess; D' [BM] in memory is corrected by it, in two parts: where P
    is 1, dK is no larger than what one would round away. That helps as both passes see the same
    bits of dP, whatever their tiles (on a GPU tests/kernels/gpu/test_own_x2.py holds it).

    Args:
        rest: second plane of LSE: P is 2^-rest times what the tiles had.
        delta_ptr: D' of row 0, and with TARGET at ``plane`` and twice that what the row sums to and
            the sink's P.
        delta_lo_ptr: of row 0, what the corrected D' is rounded by; with SPLIT at ``plane`` the
            rest with which P sums to 1: that of the rounded sum is off by what two parts show.
        key_ptr: key 0 of the sequence, for KEY.
    """
    weight = tl.exp2(-rest)
    delta = tl.load(delta_ptr + rows, mask=row_ok, other=0.0)
    target = 0.0
    if TARGET:
        target = tl.load(delta_ptr + plane + rows, mask=row_ok, other=0.0)
    if SPLIT:
        if PROJECT == KEY:
            total = state[3] * weight
            if TARGET:
                p_sink = tl.load(delta_ptr + 2 * plane + rows, mask=row_ok, other=0.0)
                total += p_sink
            total = tl.where(total > 0, total, 1.0)
            if TARGET:
                target += (p_sink / total - p_sink) * delta
                tl.store(delta_ptr + 2 * plane + rows, p_sink / total, mask=row_ok)
            rest += tl.log2(total)
            weight /= total
        tl.store(delta_lo_ptr + plane + rows, rest, mask=row_ok)
    excess = tl.max(state[0], 1) * weight - target
    dq = scale_parts(dq, weight)
    if PROJECT == KEY:
        key, found = largest_key(state[1], state[2], BN)
        carrier = scale_parts(_key_rows(key_ptr, stride_ks, key, found, BD, D), excess)
    else:
        whole = tl.max(state[1], 1) * weight
        if TARGET:
            whole += tl.load(delta_ptr + 2 * plane + rows, mask=row_ok, other=0.0)
        share = tl.where(whole > 0, weight / tl.where(whole > 0, whole, 1.0), 0.0)
        carrier = scale_parts(state[2], excess * share)
    # Knuth's sum: either may be the larger.
    corrected = delta + excess
    back = corrected - delta
    tl.store(delta_ptr + rows, corrected, mask=row_ok)
    tl.store(delta_lo_ptr + rows, (delta - (corrected - back)) + (excess - back), mask=row_ok)
    if len(dq) == 1:
        return (dq[0] - carrier[0],)
    else:
        return dq[0] - carrier[0], dq[1] - carrier[1]

"""Tiles of a head dim that is one power of two, or the sum of two: 96 = 64 + 32, 192 = 128 + 64.

Triton's tiles have power-of-two extents. Padding 96 to 128 and 192 to 256 would waste a quarter of
every product, so those two widths are split along the head dim. A tile "in parts" is a tuple of
one or two tensors, ([R, C1],) or ([R, C1], [R, C2]); one part gives the unsplit kernel's code.

Shape legend: R rows, C columns (the head dim padded by `configs.tile_width`), WIDTH the head dim.
"""

import triton
import triton.language as tl

from stable_attention.numerics import accumulate, add_late, add_segment, pinned, widen
from stable_attention.triton.memory import load_tile, source, tile_offsets


@triton.constexpr_function
def first_part(C):
    """Columns of the first part: the largest power of two up to C."""
    return 1 << (C.bit_length() - 1)


@triton.jit
def part_offsets(stride, R: tl.constexpr, C: tl.constexpr):
    """Offsets inside each part; both start at 0."""
    C1: tl.constexpr = first_part(C)
    if C == C1:
        return (tile_offsets(stride, R, C),)
    else:
        return (tile_offsets(stride, R, C1), tile_offsets(stride, R, C - C1))


@triton.jit
def part_sources(ptr, tail, head, strides, C: tl.constexpr, TMA: tl.constexpr):
    """What `load_parts` reads from; ``tail`` is the second part's descriptor, if it has one."""
    first = source(ptr, head, strides, TMA)
    C1: tl.constexpr = first_part(C)
    if C == C1:
        return (first,)
    elif TMA:
        return (first, source(tail, head, strides, TMA))
    else:
        return (first, first)


@triton.jit
def load_parts(
    ptrs, offsets, row0, stride, rows,
    R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
    TMA: tl.constexpr = 0,
):  # fmt: skip
    """[R, C] tile from row0 on, in parts; zeros past ``rows`` (if RAGGED) and column WIDTH."""
    C1: tl.constexpr = first_part(C)
    if C == C1:
        return (load_tile(ptrs[0], offsets[0], row0, stride, rows, R, C, WIDTH, RAGGED, TMA),)
    else:
        return (
            load_tile(ptrs[0], offsets[0], row0, stride, rows, R, C1, C1, RAGGED, TMA),
            load_tile(
                ptrs[1], offsets[1], row0, stride, rows, R, C - C1, WIDTH - C1, RAGGED, TMA, C1
            ),
        )


@triton.jit
def read_parts(
    ptr, row0, stride, rows, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """`load_parts` of a tile that is read once, through plain pointers."""
    return load_parts((ptr, ptr), part_offsets(stride, R, C), row0, stride, rows, R, C, WIDTH, True)


@triton.jit
def zero_parts(R: tl.constexpr, C: tl.constexpr):
    """A float32 accumulator [R, C] in parts."""
    C1: tl.constexpr = first_part(C)
    if C == C1:
        return (tl.zeros([R, C], tl.float32),)
    else:
        return (tl.zeros([R, C1], tl.float32), tl.zeros([R, C - C1], tl.float32))


@triton.jit
def dot_over_parts(a, b):
    """a @ b^T [M, N] of a [M, C], b [N, C] in parts: both parts join one sum."""
    s = tl.dot(a[0], tl.trans(b[0]))
    if len(a) == 2:
        s = tl.dot(a[1], tl.trans(b[1]), s)
    return s


@triton.jit
def dot_parts(p, v):
    """p @ v of p [M, N] and v [N, C] in parts."""
    if len(v) == 1:
        return (tl.dot(p, v[0]),)
    else:
        return (tl.dot(p, v[0]), tl.dot(p, v[1]))


@triton.jit
def add_dot_parts(p, v, acc):
    """acc + p @ v."""
    if len(v) == 1:
        return (tl.dot(p, v[0], acc[0]),)
    else:
        return (tl.dot(p, v[0], acc[0]), tl.dot(p, v[1], acc[1]))


@triton.jit
def add_rest(p, rounded, v, acc, SPLIT: tl.constexpr):
    """acc + (float32 p less its rounding) @ v, itself rounded; acc without SPLIT.

    A 16-bit p has 8 or 11 significant bits, with its rest it has twice as many.
    """
    if SPLIT:
        return add_dot_parts((p - widen(rounded)).to(rounded.dtype), v, acc)
    else:
        return acc


@triton.jit
def accumulate_parts(acc, alpha, p, v, PAPER: tl.constexpr):
    """`numerics.accumulate` for each part."""
    if len(v) == 1:
        return (accumulate(acc[0], alpha, p, v[0], PAPER),)
    else:
        return (
            accumulate(acc[0], alpha, p, v[0], PAPER),
            accumulate(acc[1], alpha, p, v[1], PAPER),
        )


@triton.jit
def rescale_parts(acc, alpha):
    """acc [R, C] times alpha [R], `numerics.pinned`."""
    acc = scale_parts(acc, alpha)
    if len(acc) == 1:
        return (pinned(acc[0]),)
    else:
        return (pinned(acc[0]), pinned(acc[1]))


@triton.jit
def add_late_parts(total, part, alpha):
    """`numerics.add_late` for each part."""
    if len(total) == 1:
        return (add_late(total[0], part[0], alpha),)
    else:
        return (add_late(total[0], part[0], alpha), add_late(total[1], part[1], alpha))


@triton.jit
def add_segment_parts(total, part, m_before, m):
    """`numerics.add_segment` for each part."""
    if len(total) == 1:
        return (add_segment(total[0], part[0], m_before, m),)
    else:
        return (
            add_segment(total[0], part[0], m_before, m),
            add_segment(total[1], part[1], m_before, m),
        )


@triton.jit
def scale_parts(x, factor):
    """x [R, C] in parts times factor [R]."""
    if len(x) == 1:
        return (x[0] * factor[:, None],)
    else:
        return (x[0] * factor[:, None], x[1] * factor[:, None])

"""Tile loads: 64-bit where a tile starts, 32-bit inside it.

Shape legend: R rows (sequence positions), C columns (a power of two; else see `parts`).
"""

import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged

# How a kernel's TMA argument reads: pointers, a descriptor of [b, h, s, d], or a ragged one of
# packed sequences.
POINTERS, DENSE, PACKED = (tl.constexpr(i) for i in range(3))


@triton.jit
def tile_offsets(stride, R: tl.constexpr, C: tl.constexpr):
    """[R, C] element offsets inside a tile. R * stride stays below 2^31 for every legal stride."""
    return tl.arange(0, R)[:, None] * stride + tl.arange(0, C)[None, :]


@triton.jit
def source(ptr, b, h, start, rows, stride_b, stride_s, stride_h, TMA: tl.constexpr):
    """What `load_tile` reads a sequence's head from: a pointer, or a descriptor and where to look.

    ``start`` and ``rows`` are the sequence's first token and length (`geometry.locate`).
    """
    if TMA:
        return (ptr, b.to(tl.int32), h.to(tl.int32), start, rows)
    else:
        first = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        return ptr + first + start.to(tl.int64) * stride_s


@triton.jit
def load_tile(
    ptr, offsets, row0, stride, rows,
    R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
    TMA: tl.constexpr = 0, COLUMN: tl.constexpr = 0,
):  # fmt: skip
    """[R, C] tile from row0 and COLUMN on; zeros past ``rows`` (if RAGGED) and WIDTH columns.

    ``ptr`` is a pointer, or with TMA (`descriptors`) what `source` made of a descriptor, whose
    bounds give the zeros.
    """
    if TMA == PACKED:
        tile = load_ragged(ptr[0], ptr[3], ptr[4], [ptr[2], row0, COLUMN], 1)
        return tl.reshape(tile, [R, C])
    elif TMA:
        return tl.reshape(ptr[0].load([ptr[1], ptr[2], row0, COLUMN]), [R, C])
    else:
        p = ptr + row0.to(tl.int64) * stride + COLUMN + offsets
        if RAGGED:
            ok = (row0 + tl.arange(0, R) < rows)[:, None]
            if WIDTH != C:
                ok = ok & (tl.arange(0, C) < WIDTH)[None, :]
            return tl.load(p, mask=ok, other=0.0)
        else:
            if WIDTH != C:
                return tl.load(p, mask=(tl.arange(0, C) < WIDTH)[None, :], other=0.0)
            else:
                return tl.load(p)

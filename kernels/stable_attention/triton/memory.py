"""Tile loads: 64-bit where a tile starts, 32-bit inside it.

Shape legend: R rows (sequence positions), C columns (a power of two; else see `parts`).
"""

import triton
import triton.language as tl


@triton.jit
def tile_offsets(stride, R: tl.constexpr, C: tl.constexpr):
    """[R, C] element offsets inside a tile. R * stride stays below 2^31 for every legal stride."""
    return tl.arange(0, R)[:, None] * stride + tl.arange(0, C)[None, :]


@triton.jit
def source(
    ptr, stride, rows, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """What `load_tile` reads from: the pointer itself, or a TMA descriptor of [rows, WIDTH]."""
    if TMA:
        return tl.make_tensor_descriptor(ptr, [rows, WIDTH], [tl.cast(stride, tl.int64), 1], [R, C])
    else:
        return ptr


@triton.jit
def load_tile(
    ptr, offsets, row0, stride, rows,
    R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
    TMA: tl.constexpr = False, COLUMN: tl.constexpr = 0,
):  # fmt: skip
    """[R, C] tile from row0 and COLUMN on; zeros past ``rows`` (if RAGGED) and WIDTH columns."""
    if TMA:
        # The descriptor's bounds give the zeros.
        return ptr.load([row0, COLUMN])
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

"""Tile loads: 64-bit where a tile starts, 32-bit inside it.

Shape legend: R rows (sequence positions), C columns (head dim padded to a power of two).
"""

import triton
import triton.language as tl


@triton.jit
def tile_offsets(stride, R: tl.constexpr, C: tl.constexpr):
    """[R, C] element offsets inside a tile. R * stride stays below 2^31 for every legal stride."""
    return tl.arange(0, R)[:, None] * stride + tl.arange(0, C)[None, :]


@triton.jit
def load_tile(
    ptr, offsets, row0, stride, rows,
    R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """[R, C] tile from row0 on; zeros past ``rows`` (if RAGGED) and past column WIDTH."""
    p = ptr + row0.to(tl.int64) * stride + offsets
    if RAGGED:
        ok = (row0 + tl.arange(0, R) < rows)[:, None]
        if WIDTH != C:
            ok = ok & (tl.arange(0, C) < WIDTH)[None, :]
        return tl.load(p, mask=ok, other=0.0)
    if WIDTH != C:
        return tl.load(p, mask=(tl.arange(0, C) < WIDTH)[None, :], other=0.0)
    return tl.load(p)

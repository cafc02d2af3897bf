"""Tile loads and stores: 64-bit where a tile starts, 32-bit inside it.

Shape legend: R rows (sequence positions), C columns (a power of two; else see `parts`).
"""

import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged, to_ragged_indices

# What a kernel's TMA argument says: go through pointers; through a descriptor of [s, columns],
# where batch entry and head are offsets among the columns; of [b, h, s, d], whose bounds end at d
# too; or through their ragged forms, for packed sequences.
POINTERS, FLAT, DENSE, FLAT_PACKED, PACKED = (tl.constexpr(i) for i in range(5))


@triton.jit
def tile_offsets(stride, R: tl.constexpr, C: tl.constexpr):
    """[R, C] element offsets inside a tile, 32-bit: `problem.check_token_stride` refuses strides
    with which they would not fit."""
    return tl.arange(0, R)[:, None] * stride + tl.arange(0, C)[None, :]


@triton.jit
def source(ptr, head, strides, TMA: tl.constexpr):
    """Where `load_tile` and `store_tile` find a `bundles.Head`: pointer, or descriptor and place.

    strides: from one batch entry, token and head to the next.
    """
    b, h, start, rows = head
    stride_b, stride_s, stride_h = strides
    if TMA == FLAT:
        return (ptr, (b * stride_b + h * stride_h).to(tl.int32))
    elif TMA == FLAT_PACKED:
        return (ptr, (h * stride_h).to(tl.int32), start, rows)
    elif TMA:
        return (ptr, h.to(tl.int32), start, rows, b.to(tl.int32))
    else:
        first = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        return ptr + first + start.to(tl.int64) * stride_s


@triton.jit
def load_row(ptr, rows, length, other, MASKED: tl.constexpr):
    """A number for each of ``rows``; if MASKED, ``other`` from ``length`` on."""
    if MASKED:
        return tl.load(ptr + rows, mask=rows < length, other=other)
    else:
        return tl.load(ptr + rows)


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
    if TMA == FLAT:
        return ptr[0].load([row0, ptr[1] + COLUMN])
    elif TMA == FLAT_PACKED:
        return load_ragged(ptr[0], ptr[2], ptr[3], [row0, ptr[1] + COLUMN])
    elif TMA == PACKED:
        tile = load_ragged(ptr[0], ptr[2], ptr[3], [ptr[1], row0, COLUMN], 1)
        return tl.reshape(tile, [R, C])
    elif TMA:
        return tl.reshape(ptr[0].load([ptr[4], ptr[1], row0, COLUMN]), [R, C])
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


@triton.jit
def store_tile(
    ptr, tile, row0, stride, rows,
    R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    TMA: tl.constexpr = 0, COLUMN: tl.constexpr = 0,
):  # fmt: skip
    """Write a tile [R, C] from row0 and COLUMN on: WIDTH columns of it, and rows before ``rows``.

    ``ptr`` and TMA are as in `load_tile`.
    """
    tile = tile.to(ptr[0].dtype if TMA else ptr.dtype.element_ty)
    if TMA == FLAT:
        ptr[0].store([row0, ptr[1] + COLUMN], tile)
    elif TMA == FLAT_PACKED:
        # `store_ragged` itself does not run in the interpreter.
        far, end, row = to_ragged_indices(ptr[2], ptr[3], row0)
        ptr[0].store([far, end, row, ptr[1] + COLUMN], tl.reshape(tile, [1, 1, R, C]))
    elif TMA == PACKED:
        far, end, row = to_ragged_indices(ptr[2], ptr[3], row0)
        ptr[0].store([far, end, ptr[1], row, COLUMN], tl.reshape(tile, [1, 1, 1, R, C]))
    elif TMA:
        ptr[0].store([ptr[4], ptr[1], row0, COLUMN], tl.reshape(tile, [1, 1, R, C]))
    else:
        p = ptr + row0.to(tl.int64) * stride + COLUMN + tile_offsets(stride, R, C)
        ok = (row0 + tl.arange(0, R) < rows)[:, None] & (tl.arange(0, C) < WIDTH)[None, :]
        tl.store(p, tile, mask=ok)

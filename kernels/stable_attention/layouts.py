"""How q, k, v and O lie in memory: the order of their dimensions, and what kernels can address.

Shape legend: b batch, s length, h heads, d head dim, t packed tokens. Layouts: bshd [b, s, h, d],
sbhd [s, b, h, d], bhsd [b, h, s, d], thd [t, h, d].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LAYOUTS = ("bshd", "sbhd", "bhsd", "thd")
MAX_HEAD_DIM = 256

# Offsets inside a tile are 32-bit: rows of the tallest one, and how far apart its first and last
# may start, a head dim before the end.
MAX_TILE_ROWS = 256
MAX_TILE_EXTENT = 2**31 - MAX_HEAD_DIM


def extents(size: Sequence[int], layout: str) -> tuple[int, int, int, int]:
    """(batch, sequence, heads, head dim) of a shape; ``thd`` counts as batch 1."""
    if layout == "bshd":
        return size[0], size[1], size[2], size[3]
    if layout == "sbhd":
        return size[1], size[0], size[2], size[3]
    if layout == "bhsd":
        return size[0], size[2], size[1], size[3]
    return 1, size[0], size[1], size[2]


def dims(x: torch.Tensor, layout: str) -> tuple[int, int, int, int]:
    """`extents` of a tensor."""
    return extents(x.shape, layout)


def row_shape(layout: str, x: torch.Tensor) -> tuple[int, ...]:
    """The shape of what has one number a query row and head (LSE, delta) of x in a layout."""
    b, s, h, _ = dims(x, layout)
    return (h, s) if layout == "thd" else (b, h, s)


def strides(x: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """(batch, sequence, head) strides in elements; a packed tensor has batch stride 0."""
    s = x.stride()
    if layout == "bshd":
        return s[0], s[1], s[2]
    if layout == "sbhd":
        return s[1], s[0], s[2]
    if layout == "bhsd":
        return s[0], s[2], s[1]
    return 0, s[0], s[1]


def shape(layout: str, *, batch: int, length: int, heads: int, d: int) -> tuple[int, ...]:
    """The shape of a tensor in a layout, the inverse of `dims`."""
    return {
        "bshd": (batch, length, heads, d),
        "sbhd": (length, batch, heads, d),
        "bhsd": (batch, heads, length, d),
        "thd": (length, heads, d),
    }[layout]


def reached(step: int, length: int) -> bool:
    """Whether 32-bit offsets inside a tile reach all its rows (where it starts is 64-bit)."""
    return step * MAX_TILE_ROWS < MAX_TILE_EXTENT or step * (length - 1) < MAX_TILE_EXTENT


def tokens_are_close(x: torch.Tensor, layout: str) -> bool:
    """`reached` of a tensor's tokens."""
    return reached(strides(x, layout)[1], dims(x, layout)[1])


def overlaps(x: torch.Tensor) -> bool:
    """Whether elements of x share memory, as an expanded tensor's do: nobody may write it.

    Also true of strides that interleave, which no slice or permutation has.
    """
    end = 0
    for step, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1:
            if step <= end:
                return x.numel() > 0
            end += step * (n - 1)
    return False


def readable(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x, or a copy where kernels could not address it: autograd's dO has any strides, and may be a
    view that negates."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 and tokens_are_close(x, layout) else x.contiguous()

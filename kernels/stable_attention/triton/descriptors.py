"""How kernels reach the tensors they read and write in tiles: through descriptors, or pointers.

A descriptor says where a tensor lies and how its tiles look. The host makes it and passes it by
value. Made in the kernel, each costs its program two round trips to memory before the first tile
(docs/kernels.md). Everything but the address follows from shape, strides and type, which repeat
from call to call, so that is worked out once (`_plan`): a forward and a backward pass have a dozen
descriptors (docs/kernels.md, "Host time").

Shape legend: as in `forward`.
"""

from __future__ import annotations

import functools

import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from stable_attention.configs import Tile, tile_width
from stable_attention.layouts import dims, strides
from stable_attention.problem import Problem
from stable_attention.triton.memory import DENSE, FLAT, FLAT_PACKED, PACKED, POINTERS
from stable_attention.triton.parts import first_part

# Rows a ragged descriptor can tell apart.
MAX_DESCRIBED = 2**30
# Sets of tensors remembered; packed batches have new lengths at every step.
PLANS = 256

_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, int]
"""Shape, strides, type and rows of a tile."""


def descriptors(
    problem: Problem, tile: Tile, *tiled: tuple[torch.Tensor | None, int]
) -> tuple[int, tuple[object, ...]]:
    """How a kernel reads and writes tensors, each in tiles of so many rows, and what it is given.

    Returns the kernel's TMA argument (`memory`) and, for each tensor, a pair: the tensor and None,
    or descriptors of its head dim's first and second part (`parts`).

    The hardware wants 16-byte aligned rows; other strides take the pointer path of the same kernel.
    """
    plan = None
    if tile.tma and all(x is None or _aligned(x) for x, _ in tiled):
        kinds = (
            (x.shape, x.stride(), x.dtype, rows) if x is not None else None for x, rows in tiled
        )
        plan = _plan(problem.layout, tuple(kinds))
    if plan is None:
        return POINTERS.value, tuple(part for x, _ in tiled for part in (x, None))
    mode, templates = plan
    return mode, tuple(
        None if template is None else at(x, template)
        for (x, _), both in zip(tiled, templates, strict=True)
        for template in both
    )


def _aligned(x: torch.Tensor) -> bool:
    return x.device.type == "meta" or x.data_ptr() % 16 == 0


def at(x: object, template: TensorDescriptor) -> TensorDescriptor:
    """The descriptor of x, or of what has its address: the checked template but for that."""
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(template.__dict__)
    found.base = x
    return found


@functools.lru_cache(maxsize=PLANS)
def _plan(
    layout: str, kinds: tuple[_Kind | None, ...]
) -> tuple[int, tuple[tuple[TensorDescriptor | None, TensorDescriptor | None], ...]] | None:
    """(TMA argument, a pair of descriptors without address for each tensor); None: by pointers."""
    tensors = [
        None if kind is None else torch.empty_strided(*kind[:2], dtype=kind[2], device="meta")
        for kind in kinds
    ]
    present = [x for x in tensors if x is not None]
    if not all(describable(x, layout) for x in present):
        return None
    flat = all(flat_columns(x, layout) for x in present)
    if layout == "thd":
        mode = FLAT_PACKED if flat else PACKED
    else:
        mode = FLAT if flat else DENSE
    return mode.value, tuple(
        (None, None) if x is None or kind is None else _describe(x, layout, kind[3], flat)
        for x, kind in zip(tensors, kinds, strict=True)
    )


def describable(x: torch.Tensor, layout: str) -> bool:
    step = 16 // x.element_size()
    shape, row = dims(x, layout), strides(x, layout)
    legal = all(s > 0 and s % step == 0 for n, s in zip(shape[:3], row, strict=True) if n > 1)
    # The hardware writes a row in pieces of 16 bytes, past the end of one that is not a multiple.
    legal = legal and shape[3] % step == 0
    return legal and x.numel() > 0 and max(shape) <= MAX_DESCRIBED


def flat_columns(x: torch.Tensor, layout: str) -> int:
    """Columns of x as [s, columns], each head of each batch entry at an offset among them, or 0.

    0 where a tile's unused columns would belong to the next head, or an offset exceeds int32.
    """
    b, _, h, d = dims(x, layout)
    step_b, _, step_h = strides(x, layout)
    columns = (b - 1) * step_b + (h - 1) * step_h + d
    return columns if d == tile_width(d) and columns < 2**31 else 0


def _describe(
    x: torch.Tensor, layout: str, rows: int, flat: bool
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Descriptors of tiles of ``rows`` tokens of one head, for each part of the head dim.

    Sequence and head dim, along which a tile extends, come last, whatever their order in memory.
    """
    b, s, h, d = dims(x, layout)
    step_b, step_s, step_h = (
        # An extent of 1 may come with any stride.
        step if n > 1 else 16
        for n, step in zip((b, s, h), strides(x, layout), strict=True)
    )
    width = tile_width(d)
    first = first_part.fn(width)
    found: list[TensorDescriptor | None] = []
    for columns in (first, width - first):
        if columns == 0:
            found.append(None)
        elif flat and layout == "thd":
            flat_x = x.as_strided((s, flat_columns(x, layout)), (step_s, 1))
            found.append(create_ragged_descriptor(flat_x, [rows, columns]))
        elif flat:
            shape = [s, flat_columns(x, layout)]
            found.append(TensorDescriptor(x, shape, [step_s, 1], [rows, columns]))
        elif layout == "thd":
            heads_first = x.as_strided((h, s, d), (step_h, step_s, 1))
            found.append(create_ragged_descriptor(heads_first, [1, rows, columns], 1))
        else:
            steps = [step_b, step_h, step_s, 1]
            found.append(TensorDescriptor(x, [b, h, s, d], steps, [1, 1, rows, columns]))
    return found[0], found[1]

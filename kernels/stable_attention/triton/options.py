"""What every launcher passes to its kernel besides the tensors it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from stable_attention.configs import Tile, tile_width
from stable_attention.problem import UNLIMITED, Problem, dims, strides
from stable_attention.triton.memory import DENSE, FLAT, FLAT_PACKED, PACKED, POINTERS
from stable_attention.triton.parts import first_part

LOG2E = 1.4426950408889634

# Lengths and positions change from step to step; specialising on them would recompile.
NO_SPECIALIZE = (
    "sq", "sk", "tq", "tk", "heads", "tiles", "left", "right", "pos_q", "pos_k",
    "batch_offset", "head_offset", "threshold", "stride_lb", "stride_lh",
)  # fmt: skip

# Rows a ragged descriptor can tell apart.
MAX_DESCRIBED = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """Optional tensors and scalars of a call."""

    sinks: torch.Tensor | None = None
    """[h] sink logits, natural-log units."""
    seed: torch.Tensor | None = None
    """int64 scalar on the device."""
    cu_q: torch.Tensor | None = None
    """int32 [b + 1] token offsets of packed sequences."""
    cu_k: torch.Tensor | None = None
    start_q: torch.Tensor | None = None
    """int32 [b] where sequences start in memory, if not at ``cu_q``."""
    start_k: torch.Tensor | None = None
    chunked: bool = False
    """Positions are global (chunks of a longer sequence), not bottom-right aligned."""
    pos_q: int = 0
    """Global position of query row 0 (and of key 0 in ``pos_k``)."""
    pos_k: int = 0
    pos_q_tensor: torch.Tensor | None = None
    """int32 [b] global positions, one a packed sequence; replaces ``pos_q``."""
    pos_k_tensor: torch.Tensor | None = None
    batch_offset: int = 0
    head_offset: int = 0
    beta: float = 2.0
    eps: float = 1e-3

    def pointers(self) -> tuple[torch.Tensor | None, ...]:
        """cu, start and position tensors in kernel order."""
        return (
            self.cu_q,
            self.cu_k,
            self.cu_q if self.start_q is None else self.start_q,
            self.cu_k if self.start_k is None else self.start_k,
            self.pos_q_tensor,
            self.pos_k_tensor,
        )


def padded(d: int) -> int:
    """Head dim as the extent of an undivided tile, for kernels without products over it."""
    return max(16, triton.next_power_of_2(d))


def common_arguments(problem: Problem, extras: Extras) -> dict[str, object]:
    """Keyword arguments that the forward and the backward kernels share."""
    capped = problem.softcap > 0
    return {
        "sq": problem.sq,
        "sk": problem.sk,
        "tq": problem.tq,
        "tk": problem.tk,
        "heads": problem.heads,
        "left": problem.window_left,
        "right": problem.window_right,
        "pos_q": extras.pos_q,
        "pos_k": extras.pos_k,
        "batch_offset": extras.batch_offset,
        "head_offset": extras.head_offset,
        "threshold": min(int(problem.dropout_p * 2**32), 2**32 - 1),
        "unit": (problem.softcap if capped else problem.scale) * LOG2E,
        "capped_scale": problem.scale / problem.softcap if capped else 0.0,
        "GROUP": problem.group,
        "D": problem.d,
        "DV": problem.dv,
        "BD": tile_width(problem.d),
        "BDV": tile_width(problem.dv),
        "VARLEN": problem.varlen,
        "HAS_LEFT": problem.window_left != UNLIMITED,
        "HAS_RIGHT": problem.window_right != UNLIMITED,
        "CAPPED": capped,
        "DROPOUT": problem.dropout_p > 0,
        "CHUNKED": extras.chunked,
        "POS_PTR": extras.pos_q_tensor is not None,
    }


def descriptors(
    problem: Problem, tile: Tile, *tiled: tuple[torch.Tensor | None, int]
) -> tuple[int, tuple[object, ...]]:
    """How a kernel reads and writes tensors, each in tiles of so many rows, and what it is given.

    Returns the kernel's TMA argument (`memory`) and, for each tensor, a pair: the tensor and None,
    or descriptors of its head dim's first and second part (`parts`). Descriptors are made here and
    passed by value. Made in the kernel, each costs its program two round trips to memory before the
    first tile (docs/kernels.md).

    The hardware wants 16-byte aligned rows; other strides take the pointer path of the same kernel.
    """
    present = [x for x, _ in tiled if x is not None]
    if not tile.tma or not all(_describable(x, problem) for x in present):
        return POINTERS.value, tuple(part for x, _ in tiled for part in (x, None))
    flat = all(_columns(x, problem.layout) for x in present)
    if problem.varlen:
        mode = FLAT_PACKED if flat else PACKED
    else:
        mode = FLAT if flat else DENSE
    parts = (
        (None, None) if x is None else _describe(x, problem.layout, rows, flat) for x, rows in tiled
    )
    return mode.value, tuple(part for both in parts for part in both)


def _describable(x: torch.Tensor, problem: Problem) -> bool:
    step = 16 // x.element_size()
    shape, row = dims(x, problem.layout), strides(x, problem.layout)
    legal = all(s > 0 and s % step == 0 for n, s in zip(shape[:3], row, strict=True) if n > 1)
    # The hardware writes a row in pieces of 16 bytes, past the end of one that is not a multiple.
    legal = legal and shape[3] % step == 0
    aligned = x.device.type == "meta" or x.data_ptr() % 16 == 0
    return legal and aligned and x.numel() > 0 and max(shape) <= MAX_DESCRIBED


def _columns(x: torch.Tensor, layout: str) -> int:
    """Columns of x as [s, columns], each head of each batch entry at an offset among them, or 0.

    0 where a tile's unused columns would belong to the next head, or an offset exceeds int32.
    """
    b, _, h, d = dims(x, layout)
    step_b, _, step_h = strides(x, layout)
    columns = (b - 1) * step_b + (h - 1) * step_h + d
    return columns if d == tile_width(d) and columns < 2**31 else 0


def _describe(x: torch.Tensor, layout: str, rows: int, flat: bool) -> tuple[object, object]:
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
    found: list[object] = []
    for columns in (first, width - first):
        if columns == 0:
            found.append(None)
        elif flat and layout == "thd":
            flat_x = x.as_strided((s, _columns(x, layout)), (step_s, 1))
            found.append(create_ragged_descriptor(flat_x, [rows, columns]))
        elif flat:
            shape = [s, _columns(x, layout)]
            found.append(TensorDescriptor(x, shape, [step_s, 1], [rows, columns]))
        elif layout == "thd":
            heads_first = x.as_strided((h, s, d), (step_h, step_s, 1))
            found.append(create_ragged_descriptor(heads_first, [1, rows, columns], 1))
        else:
            steps = [step_b, step_h, step_s, 1]
            found.append(TensorDescriptor(x, [b, h, s, d], steps, [1, 1, rows, columns]))
    return found[0], found[1]

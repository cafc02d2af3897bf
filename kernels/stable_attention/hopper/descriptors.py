"""TMA descriptors of the kernels of this package, whether tensors have them, and counters.

A descriptor has two dimensions, tokens and columns, heads and batch being columns; for packed
sequences it is ragged, as `triton.tools.ragged_tma` says.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language import bfloat16 as BF16
from triton.experimental.gluon.language import float16 as FP16
from triton.experimental.gluon.language import float32 as FP32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stable_attention.layouts import dims, strides
from stable_attention.problem import Problem
from stable_attention.triton.descriptors import describable, flat_columns
from stable_attention.triton.launches import KEPT

_TYPES = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
ROW = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
"""Of a tile of numbers of rows."""
_MOST = 0x7FFF0000
_ROWS = 2**30
"""Rows of a sequence in a ragged descriptor, of which its own are the last."""


def entries(problem: Problem) -> int:
    """Batch entries of the tensors: packed sequences lie in one."""
    return 1 if problem.varlen else problem.batch


def room(problem: Problem, tensors: tuple[torch.Tensor, ...]) -> int:
    """Sequences of the batch that descriptors of all these tensors have room for: 0 where one has
    for none, and 1 where all packed ones fit."""
    if problem.batch == 0 or any(x.data_ptr() % 16 for x in tensors):
        return 0
    kinds = tuple((x.shape, x.stride(), x.dtype) for x in tensors)
    return _room_for(problem.layout, entries(problem), kinds)


@functools.lru_cache(maxsize=KEPT)
def _room_for(
    layout: str, n: int, kinds: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
) -> int:
    tensors = [torch.empty_strided(*kind[:2], dtype=kind[2], device="meta") for kind in kinds]
    if not all(describable(x, layout) for x in tensors):
        return 0
    while not all(flat_columns(narrow(layout, 0, n, x), layout) for x in tensors):
        if n == 1:
            return 0
        n = -(-n // 2)
    return n


def narrow(layout: str, first: int, n: int, x: torch.Tensor) -> torch.Tensor:
    """``n`` sequences of a batch; those of LSE come first in every layout."""
    return x.narrow(1 if layout == "sbhd" else 0, first, n)


def tiled(x: torch.Tensor, layout: str, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Tiles of so many tokens and columns (None: all) of one head, heads and batch being columns.

    For packed sequences as `triton.tools.ragged_tma` describes them. Where a head has fewer columns
    than a tile, one dimension more goes in steps of 16 bytes to the head's first column, and what
    is behind its last one reads as zeros.
    """
    step, columns = strides(x, layout)[1], columns or x.shape[-1]
    shape = [dims(x, layout)[1], flat_columns(x, layout)]
    if layout == "thd":
        step = step if shape[0] > 1 else 16
        shape, steps = [_MOST, _MOST, _ROWS, shape[1]], [2**34 - step, step, step, 1]
        if columns > x.shape[-1]:
            shape[2:], steps[2:] = [-(-shape[3] // 8), _ROWS, x.shape[-1]], [8, step, 1]
        return described(x, shape, steps, [1] * (len(shape) - 2) + [rows, columns])
    # An extent of 1 may come with any stride.
    step = step if shape[0] > 1 else 16
    if columns > x.shape[-1]:
        shape = [-(-shape[1] // 8), shape[0], x.shape[-1]]
        return described(x, shape, [8, step, 1], [1, rows, columns])
    return described(x, shape, [step, 1], [rows, columns])


def steps(x: torch.Tensor, layout: str) -> tuple[int, int]:
    """Columns from one batch entry to the next and from one head to the next.

    0 where there is no next: an extent of 1 may come with any stride, and columns are int32.
    """
    batch, _, heads, _ = dims(x, layout)
    step_b, _, step_h = strides(x, layout)
    return step_b if batch > 1 else 0, step_h if heads > 1 else 0


def described(
    x: torch.Tensor, shape: list[int], steps: list[int], block: list[int]
) -> TensorDescriptor:
    layout = NVMMASharedLayout.get_default_for(block, _TYPES[x.dtype])
    return TensorDescriptor(x, shape, steps, block, layout)


def of_rows(x: torch.Tensor) -> TensorDescriptor:
    """Numbers of the rows of query tiles [tiles, BM]."""
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [1, x.shape[1]], ROW)


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # an H100 that is not there: the launch is only compiled (`aot`)
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_counter(device: torch.device) -> torch.Tensor:
    """A counter of items, 0; the forward kernel leaves it as it was.

    Launches of one stream follow each other and share one. A captured graph runs on any stream and
    has its own.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(4, dtype=torch.int32, device=device)
    return found


_counters: dict[tuple[int | None, int], torch.Tensor] = {}
"""By device and stream."""


__all__ = [
    "described",
    "entries",
    "narrow",
    "of_rows",
    "processors",
    "room",
    "shared_counter",
    "steps",
    "tiled",
]

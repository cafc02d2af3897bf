"""Launches on sm_90; `forward` and `backward` have the signatures of the portable ones.

Tensors that a descriptor cannot describe (rows not 16-byte aligned, a stride of 0) and calls
without queries or keys take the portable kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language import bfloat16 as BF16
from triton.experimental.gluon.language import float16 as FP16
from triton.experimental.gluon.language import float32 as FP32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stable_attention import configs
from stable_attention.hopper import forward as forward_pass
from stable_attention.hopper.backward import backward_kernel
from stable_attention.hopper.forward import forward_kernel
from stable_attention.hopper.rows import dq_kernel, rows_kernel
from stable_attention.layouts import dims, strides
from stable_attention.problem import Extras, Problem
from stable_attention.triton import backward as portable_backward
from stable_attention.triton import forward as portable_forward
from stable_attention.triton.descriptors import describable, flat_columns
from stable_attention.triton.launches import Arguments, launch
from stable_attention.triton.options import LOG2E
from stable_attention.triton.results import ForwardResult, allocate, new_gradients

BN = 128
"""Keys of a tile: 64 for each of the two consumers."""
QUERIES = {64: 128, 128: 64}
"""Head dim -> queries of a tile: what shared memory and registers hold."""
ROW = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_TYPES = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
L2_BYTES = {True: 12 * 2**20, False: 24 * 2**20}
"""Causal or not -> bytes of Q, K, V and dO that a group of heads may have in the backward pass.
Without a mask all key tiles of a head start at its first query tile, one after the other: more
heads, less waiting."""
L2_FORWARD = {True: 32 * 2**20, False: 8 * 2**20}
"""The same of the K and V that a group of query heads reads in the forward pass."""
SEGMENT = 1024
"""Keys that the tensor cores add up before "compensated" adds in float32 (`numerics`)."""


def _divisor(heads: int, most: int) -> int:
    """The largest group, of ``most`` heads and of 1 at least, into which all heads divide."""
    return next(n for n in range(max(1, min(heads, most)), 0, -1) if heads % n == 0)


def head_block(problem: Problem) -> int:
    """Key/value heads of a group in the backward pass, counted over the batch."""
    one = 4 * problem.d * (problem.sk + problem.group * problem.sq)
    most = L2_BYTES[problem.window_right == 0] // one
    return _divisor(problem.batch * problem.kv_heads, most)


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    extras: Extras,
    out_dtype: torch.dtype | None = None,
    with_max_logits: bool = False,
    with_lse: bool = True,
    config: configs.Tile | None = None,
) -> ForwardResult:
    """As `stable_attention.triton.forward.forward`, whose arguments these are."""
    assert out_dtype in (None, q.dtype) and config is None, "partial outputs are the portable set's"
    result = allocate(
        problem, q.device, out_dtype=q.dtype, with_max_logits=with_max_logits, with_lse=with_lse
    )
    low = result.low if result.low.numel() else None
    described = (q, k, v, result.out) if low is None else (q, k, v, result.out, low)
    if not all(x.numel() and _describable(x, problem.layout) for x in described):
        return portable_forward.forward(
            problem, q, k, v,
            extras=extras, with_max_logits=with_max_logits, with_lse=with_lse,
        )  # fmt: skip
    lse, row = (x if x.numel() else None for x in (result.lse, result.row_lse))
    sinks = extras.sinks if problem.has_sinks else None
    for part, cut in _parts(problem, described):
        counter = torch.zeros(4, dtype=torch.int32, device=q.device)
        launch(
            forward_kernel,
            (part,),
            (
                *(cut(x, True) for x in (q, k, v, result.out, low)),
                cut(lse), cut(row), result.max_logits if with_max_logits else None, sinks,
                counter,
            ),
            functools.partial(_forward_arguments, part),
        )  # fmt: skip
    return result


def _programs(problem: Problem, device: torch.device) -> int:
    tiles = triton.cdiv(problem.sq, forward_pass.BM.value)
    return min(problem.batch * problem.heads * tiles, _processors(device))


def backward(
    problem: Problem,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lse: torch.Tensor,
    delta: torch.Tensor,
    extras: Extras,
    accumulators: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) as `stable_attention.triton.backward.backward`, whose arguments these are."""
    assert accumulators is None, "chunks are the portable kernels' (`dispatch`)"
    dq, dk, dv = gradients or new_gradients(problem, q, k, v)[1]
    described = (q, k, v, dout, dk, dv)
    if not all(x.numel() and _describable(x, problem.layout) for x in described):
        return portable_backward.backward(
            problem, dout, q, k, v, lse=lse, delta=delta, extras=extras, gradients=(dq, dk, dv)
        )
    for part, cut in _parts(problem, described):
        _launch(
            part,
            *(cut(x, True) for x in (q, k, v, dout, dq, dk, dv)),
            lse=cut(lse),
            delta=cut(delta),
        )
    return dq, dk, dv


def _parts(
    problem: Problem, described: tuple[torch.Tensor, ...]
) -> Iterator[tuple[Problem, Callable[..., Any]]]:
    """(Problem of some sequences of the batch, what cuts tensors to them) for all of it.

    A sequence has the bits that it has alone, so what is too large for a descriptor is cut and not
    handed over.
    """
    if all(flat_columns(x, problem.layout) for x in described):
        yield problem, lambda x, tiled=False: x
        return
    most = _sequences(problem, described)
    for first in range(0, problem.batch, most):
        n = min(most, problem.batch - first)

        def cut(
            x: torch.Tensor | None, tiled: bool = False, first: int = first, n: int = n
        ) -> torch.Tensor | None:
            return None if x is None else _narrow(problem.layout if tiled else "", first, n, x)

        yield replace(problem, batch=n), cut


def _launch(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> None:
    bm = QUERIES[problem.d]
    tiles = problem.batch * problem.heads * triton.cdiv(problem.sq, bm)
    new = functools.partial(torch.empty, device=q.device)
    sums = new((tiles * bm, problem.d), dtype=torch.float32)
    shift, padded = new((2, tiles, bm), dtype=torch.float32).unbind()
    turns = new(tiles, dtype=torch.int32)
    # In a tensor of its own: its address must be a multiple of 16.
    counter = new(4, dtype=torch.int32)
    launch(
        rows_kernel,
        (problem,),
        (lse, delta, shift, padded, turns, counter),
        functools.partial(_rows_arguments, problem, tiles),
    )
    launch(
        backward_kernel,
        (problem,),
        (q, k, v, dout, shift, padded, dk, dv, sums, turns, counter),
        functools.partial(_backward_arguments, problem),
    )
    launch(
        dq_kernel,
        (problem,),
        (sums, dq),
        functools.partial(_dq_arguments, problem, tiles),
    )


def _describable(x: torch.Tensor, layout: str) -> bool:
    """Whether a descriptor has room for one sequence of x at least."""
    if x.data_ptr() % 16 or not describable(x, layout):
        return False
    return bool(flat_columns(x, layout) or flat_columns(_narrow(layout, 0, 1, x), layout))


def _sequences(problem: Problem, described: tuple[torch.Tensor, ...]) -> int:
    """The most sequences of the batch that descriptors of all these tensors have room for."""
    n = problem.batch
    while not all(
        flat_columns(_narrow(problem.layout, 0, n, x), problem.layout) for x in described
    ):
        n = -(-n // 2)
    return n


def _narrow(layout: str, first: int, n: int, x: torch.Tensor) -> torch.Tensor:
    """``n`` sequences of a batch; those of LSE come first in every layout."""
    return x.narrow(1 if layout == "sbhd" else 0, first, n)


def _rows_arguments(
    problem: Problem, tiles: int, lse: torch.Tensor, *tensors: torch.Tensor
) -> Arguments:
    query_tiles = tiles // (problem.batch * problem.heads)
    positional = (
        lse, *tensors, lse.stride(0), lse.stride(1), problem.sq, problem.heads, query_tiles,
    )  # fmt: skip
    return (tiles,), positional, {"BM": QUERIES[problem.d], "num_warps": 2}


def _dq_arguments(problem: Problem, tiles: int, sums: torch.Tensor, dq: torch.Tensor) -> Arguments:
    positional = (
        sums, dq, *strides(dq, problem.layout), problem.sq, problem.heads,
        tiles // (problem.batch * problem.heads), problem.scale,
    )  # fmt: skip
    return (tiles,), positional, {"BM": QUERIES[problem.d], "D": problem.d, "num_warps": 4}


def _tiled(x: torch.Tensor, layout: str, rows: int) -> TensorDescriptor:
    """Tiles of so many tokens of one head, heads and batch being columns."""
    step = strides(x, layout)[1]
    shape = [dims(x, layout)[1], flat_columns(x, layout)]
    # An extent of 1 may come with any stride.
    return _described(x, shape, [step if shape[0] > 1 else 16, 1], [rows, x.shape[-1]])


def _steps(x: torch.Tensor, layout: str) -> tuple[int, int]:
    """Columns from one batch entry to the next and from one head to the next.

    0 where there is no next: an extent of 1 may come with any stride, and columns are int32.
    """
    batch, _, heads, _ = dims(x, layout)
    step_b, _, step_h = strides(x, layout)
    return step_b if batch > 1 else 0, step_h if heads > 1 else 0


def _forward_arguments(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    low: torch.Tensor | None,
    lse: torch.Tensor | None,
    row: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    sinks: torch.Tensor | None,
    counter: torch.Tensor,
) -> Arguments:
    d, layout = problem.d, problem.layout
    bm, bn = forward_pass.BM.value, forward_pass.BN.value
    query_tiles, key_blocks = triton.cdiv(problem.sq, bm), triton.cdiv(problem.sk, bn)
    causal = problem.window_right == 0
    heads = problem.batch * problem.heads
    positional = (
        _tiled(q, layout, 64), _tiled(k, layout, bn), _tiled(v, layout, bn),
        _tiled(out, layout, 64), None if low is None else _tiled(low, layout, 64),
        lse, row, max_logits, sinks, counter,
        *(s for x in (q, k, v, out) for s in _steps(x, layout)),
        problem.sq, problem.sk, heads * query_tiles, query_tiles, key_blocks,
        _divisor(heads, L2_FORWARD[causal] // (4 * d * problem.sk)), problem.heads,
        problem.scale * LOG2E,
    )  # fmt: skip
    named: dict[str, object] = {
        "D": d, "GROUP": problem.group, "CAUSAL": causal, "EVEN": problem.sk % bn == 0,
        "SLOTS": 2 if d == 128 else 3,
        "SEGMENT": SEGMENT // bn if row is not None and problem.sk > SEGMENT else 0,
        "ROUNDED": row is not None, "SUM": lse is not None, "HAS_LOW": low is not None,
        "HAS_MAX": max_logits is not None, "HAS_SINK": sinks is not None,
        # At d = 128 there is no room for them.
        "Q_IN_REGISTERS": d == 64,
        "REGISTERS": 240, "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    return (_programs(problem, q.device),), positional, named


def _backward_arguments(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    sums: torch.Tensor,
    *small: torch.Tensor,
) -> Arguments:
    d, bm, layout = problem.d, QUERIES[problem.d], problem.layout
    key_tiles, query_tiles = triton.cdiv(problem.sk, BN), triton.cdiv(problem.sq, bm)
    items = problem.batch * problem.kv_heads * key_tiles

    def of_rows(x: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), [bm, 1], [1, bm], ROW)

    positional = (
        _tiled(q, layout, bm), _tiled(k, layout, BN), _tiled(v, layout, BN),
        _tiled(dout, layout, bm), of_rows(shift), of_rows(delta),
        _tiled(dk, layout, 64), _tiled(dv, layout, 64),
        _described(sums, list(sums.shape), [d, 1], [64, d if bm == 128 else d // 2]),
        *small,
        *(s for x in (q, k, v, dout, dk, dv) for s in _steps(x, layout)),
        problem.sk, items, key_tiles, query_tiles, head_block(problem), problem.kv_heads,
        problem.scale * LOG2E, problem.scale,
    )  # fmt: skip
    named: dict[str, object] = {
        "BM": bm, "BN": BN, "D": d,
        "CAUSAL": problem.window_right == 0, "EVEN": problem.sk % BN == 0,
        "GROUP": problem.group,
        # At d = 64 the scores of the next tile have no registers left.
        "AHEAD": d == 128,
        # Of a consumer; what the kernel starts with leaves these to it.
        "REGISTERS": 240, "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    grid: tuple[int, ...] = (min(items, _processors(q.device)),)
    return grid, positional, named


def _described(
    x: torch.Tensor, shape: list[int], steps: list[int], block: list[int]
) -> TensorDescriptor:
    layout = NVMMASharedLayout.get_default_for(block, _TYPES[x.dtype])
    return TensorDescriptor(x, shape, steps, block, layout)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # an H100 that is not there: the launch is only compiled (`aot`)
    return torch.cuda.get_device_properties(device).multi_processor_count


__all__ = ["backward", "forward"]

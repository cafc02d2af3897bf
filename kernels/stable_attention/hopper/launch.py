"""Launches of the backward pass on sm_90; `backward` has the signature of the portable one."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language import bfloat16 as BF16
from triton.experimental.gluon.language import float16 as FP16
from triton.experimental.gluon.language import float32 as FP32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stable_attention.hopper.backward import backward_kernel
from stable_attention.hopper.rows import dq_kernel, rows_kernel
from stable_attention.layouts import dims, strides
from stable_attention.problem import Extras, Problem
from stable_attention.triton import backward as portable
from stable_attention.triton.descriptors import describable, flat_columns
from stable_attention.triton.launches import Arguments, launch
from stable_attention.triton.options import LOG2E
from stable_attention.triton.results import new_gradients

BN = 128
"""Keys of a tile: 64 for each of the two consumers."""
QUERIES = {64: 128, 128: 64}
"""Head dim -> queries of a tile: what shared memory and registers hold."""
ROW = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_TYPES = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
L2_BYTES = {True: 12 * 2**20, False: 24 * 2**20}
"""Causal or not -> bytes of Q, K, V and dO that a group of heads may have. Without a mask all key
tiles of a head start at its first query tile, one after the other: more heads, less waiting."""


def head_block(problem: Problem) -> int:
    """Key/value heads of a group, a divisor of all of them over the batch."""
    heads = problem.batch * problem.kv_heads
    one = 4 * problem.d * (problem.sk + problem.group * problem.sq)
    block = min(heads, max(1, L2_BYTES[problem.window_right == 0] // one))
    return next(n for n in range(block, 0, -1) if heads % n == 0)


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
    """(dQ, dK, dV) as `stable_attention.triton.backward.backward`, whose arguments these are.

    Tensors that a descriptor cannot describe (rows not 16-byte aligned, a stride of 0) and calls
    without queries or keys take the portable kernels.
    """
    assert accumulators is None, "chunks are the portable kernels' (`dispatch`)"
    dq, dk, dv = gradients or new_gradients(problem, q, k, v)[1]
    described = (q, k, v, dout, dk, dv)
    if not all(x.numel() and _describable(x, problem.layout) for x in described):
        return portable.backward(
            problem, dout, q, k, v, lse=lse, delta=delta, extras=extras, gradients=(dq, dk, dv)
        )
    if all(flat_columns(x, problem.layout) for x in described):
        _launch(problem, q, k, v, dout, dq, dk, dv, lse=lse, delta=delta)
        return dq, dk, dv
    # A sequence has the bits that it has alone, so what is too large is cut, not handed over.
    most = _sequences(problem, described)
    for first in range(0, problem.batch, most):
        n = min(most, problem.batch - first)
        part = functools.partial(_narrow, problem.layout, first, n)
        _launch(
            replace(problem, batch=n),
            *map(part, (q, k, v, dout, dq, dk, dv)),
            lse=lse[first : first + n],
            delta=delta[first : first + n],
        )
    return dq, dk, dv


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
    """``n`` sequences of a batch."""
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

    def tiled(x: torch.Tensor, rows: int) -> TensorDescriptor:
        step = strides(x, layout)[1]
        shape = [dims(x, layout)[1], flat_columns(x, layout)]
        # An extent of 1 may come with any stride.
        return _described(x, shape, [step if shape[0] > 1 else 16, 1], [rows, d])

    def of_rows(x: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), [bm, 1], [1, bm], ROW)

    positional = (
        tiled(q, bm), tiled(k, BN), tiled(v, BN), tiled(dout, bm), of_rows(shift), of_rows(delta),
        tiled(dk, 64), tiled(dv, 64),
        _described(sums, list(sums.shape), [d, 1], [64, d if bm == 128 else d // 2]),
        *small,
        *(s for x in (q, k, v, dout, dk, dv) for s in strides(x, layout)[::2]),
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


__all__ = ["backward"]

"""INT8 codes and scales of Q, K, V and dO, and the means that are subtracted first.

Shape legend: [B, S, H, D] in any layout; codes int8 [B, H, S, D] or packed [H, T, D], scales
float32 laid out like LSE, the same number for all tokens of a block. Blocks begin with their
sequence.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from stable_attention.int8.settings import BLOCK, CODES, SMALLEST
from stable_attention.layouts import strides
from stable_attention.problem import Problem
from stable_attention.triton.geometry import locate
from stable_attention.triton.launches import launch
from stable_attention.triton.memory import load_tile, store_tile, tile_offsets

CHUNK = 1024
"""Tokens of one partial sum of the mean of K."""
# What a kernel's CENTER argument says: nothing, the sequence's mean (from partial sums), or the
# block's own, which is stored.
NONE, SEQUENCE, OWN = (tl.constexpr(i) for i in range(3))
TOP = tl.constexpr(CODES)
LEAST = tl.constexpr(SMALLEST)
# Added to a number below 2^22 in magnitude, it leaves the nearest integer (ties to even) in the low
# bits: a conversion instruction would share the slow pipe of the exponentials.
MAGIC = tl.constexpr(12582912.0)


@triton.jit
def nearest(x):
    """float32 in -127..127 as the nearest int8."""
    return (x + MAGIC).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def inverse_of(largest):
    """(127 / largest, largest / 127), of no less than `SMALLEST`; NaN stays NaN."""
    largest = tl.where(largest < LEAST, LEAST, largest)
    return tl.div_rn(TOP, largest), tl.div_rn(largest, TOP)


@triton.jit(do_not_specialize=("s", "t", "chunks"))
def mean_kernel(
    x_ptr, part_ptr, cu_ptr, start_ptr, stride_b, stride_s, stride_h, s, t, heads, chunks,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Sum of the tokens of a chunk, float32 [B, H, chunks, D]."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    start, n = locate(cu_ptr, start_ptr, b, t, s, VARLEN)
    x_ptr += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + start.to(tl.int64) * stride_s
    off = tile_offsets(stride_s, BLOCK, D)
    total = tl.zeros([D], tl.float32)
    first = chunk * CHUNK
    for i in range(0, tl.cdiv(tl.maximum(tl.minimum(n - first, CHUNK), 0), BLOCK)):
        x = load_tile(x_ptr, off, first + i * BLOCK, stride_s, n, BLOCK, D, D, True)
        total += tl.sum(x.to(tl.float32), 0)
    place = ((b.to(tl.int64) * heads + h) * chunks + chunk) * D
    tl.store(part_ptr + place + tl.arange(0, D), total)


@triton.jit(do_not_specialize=("s", "t", "chunks", "tiles", "stride_rb", "stride_rh"))
def quantise_kernel(
    x_ptr, code_ptr, scale_ptr, part_ptr, mu_ptr, cu_ptr, start_ptr,
    stride_b, stride_s, stride_h, stride_rb, stride_rh, s, t, heads, tiles, chunks,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, VARLEN: tl.constexpr,
    CENTER: tl.constexpr,
):  # fmt: skip
    """Codes and scale of one block of a head."""
    tile = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    start, n = locate(cu_ptr, start_ptr, b, t, s, VARLEN)
    m0 = tile * BLOCK
    if m0 >= n:
        return
    x_ptr += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + start.to(tl.int64) * stride_s
    off = tile_offsets(stride_s, BLOCK, D)
    # [BLOCK, D]
    x = load_tile(x_ptr, off, m0, stride_s, n, BLOCK, D, D, True).to(tl.float32)
    rows = m0 + tl.arange(0, BLOCK)
    head = b.to(tl.int64) * heads + h
    if CENTER != NONE:
        if CENTER == SEQUENCE:
            mean = tl.zeros([D], tl.float32)
            for i in range(0, tl.cdiv(n, CHUNK)):
                mean += tl.load(part_ptr + (head * chunks + i) * D + tl.arange(0, D))
            mean = tl.div_rn(mean, n.to(tl.float32))
        else:
            count = tl.minimum(n - m0, BLOCK).to(tl.float32)
            mean = tl.div_rn(tl.sum(x, 0), count)
            tl.store(mu_ptr + (head * tiles + tile) * D + tl.arange(0, D), mean)
        x = tl.where((rows < n)[:, None], x - mean[None, :], 0.0)
    # A maximum drops NaN. x - x is 0, or NaN where x is not finite: then so is all of the block.
    largest = tl.max(tl.max(tl.abs(x), 1), 0) + tl.sum(tl.sum(x - x, 1), 0)
    largest = tl.where(largest < LEAST, LEAST, largest)
    codes = tl.minimum(tl.maximum(x * tl.div_rn(TOP, largest), -TOP), TOP)
    row = b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + start
    scale = tl.zeros([BLOCK], tl.float32) + tl.div_rn(largest, TOP)
    tl.store(scale_ptr + row + rows, scale, mask=rows < n)
    store_tile(code_ptr + row * D, nearest(codes), m0, D, n, BLOCK, D, D)


@triton.jit
def first_block(cu, b, t, s, total, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """Index of sequence b's first block among the ``total`` of a head; bad offsets are clamped."""
    first = b * tl.cdiv(s, BLOCK)
    if VARLEN:
        begin = tl.minimum(tl.maximum(tl.load(cu + b), 0), t)
        n = tl.minimum(tl.minimum(tl.maximum(tl.load(cu + b + 1) - begin, 0), s), t - begin)
        first = tl.minimum(begin // BLOCK + b, total - tl.cdiv(n, BLOCK))
    return first


@triton.jit
def load_block(ptr, block, BLOCK: tl.constexpr, D: tl.constexpr):
    """Block [BLOCK, D] of a head's codes as `turned` stores them: asynchronous, without a mask."""
    first = block.to(tl.int64) * (D * BLOCK)
    return tl.trans(tl.load(ptr + first + tile_offsets(BLOCK, D, BLOCK)))


@triton.jit(do_not_specialize=("s", "t", "total", "stride_rb", "stride_rh"))
def turn_kernel(
    code_ptr, turned_ptr, cu_ptr, start_ptr, stride_rb, stride_rh, s, t, total,
    D: tl.constexpr, BLOCK: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    first = first_block(cu_ptr, b, t, s, total, BLOCK, VARLEN)
    start, n = locate(cu_ptr, start_ptr, b, t, s, VARLEN)
    m0 = tile * BLOCK
    if m0 >= n:
        return
    row = b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + start
    x = load_tile(code_ptr + row * D, tile_offsets(D, BLOCK, D), m0, D, n, BLOCK, D, D, True)
    place = (h.to(tl.int64) * total + first + tile) * (D * BLOCK)
    tl.store(turned_ptr + place + tile_offsets(BLOCK, D, BLOCK), tl.trans(x))


class Codes(NamedTuple):
    """An operand in INT8."""

    codes: torch.Tensor
    scale: torch.Tensor
    mu: torch.Tensor
    """Mean of each block [B, H, blocks, D] where it was subtracted, else empty."""


class Side(NamedTuple):
    """Lengths and offsets of queries or of keys."""

    length: int
    tokens: int
    heads: int
    cu: torch.Tensor | None
    start: torch.Tensor | None


def row_steps(side: Side, varlen: bool) -> tuple[int, int]:
    """Strides (batch, head) of what has one number a token, as LSE."""
    return (0, side.tokens) if varlen else (side.heads * side.length, side.length)


def _mean_arguments(problem: Problem, side: Side, x: Any, part: Any, cu: Any, start: Any) -> Any:
    chunks = part.shape[2]
    positional = (
        x, part, cu, start, *strides(x, problem.layout), side.length, side.tokens, side.heads,
        chunks,
    )  # fmt: skip
    named = {
        "D": problem.d, "BLOCK": BLOCK, "CHUNK": CHUNK, "VARLEN": problem.varlen, "num_warps": 4,
    }  # fmt: skip
    return (chunks, side.heads, problem.batch), positional, named


def _arguments(problem: Problem, side: Side, center: int, *tensors: Any) -> Any:
    x = tensors[0]
    tiles = triton.cdiv(side.length, BLOCK)
    positional = (
        *tensors, *strides(x, problem.layout), *row_steps(side, problem.varlen),
        side.length, side.tokens, side.heads, tiles, triton.cdiv(side.length, CHUNK),
    )  # fmt: skip
    named = {
        "D": problem.d, "BLOCK": BLOCK, "CHUNK": CHUNK, "VARLEN": problem.varlen,
        "CENTER": center, "num_warps": 4,
    }  # fmt: skip
    return (tiles, side.heads, problem.batch), positional, named


def quantise(problem: Problem, x: torch.Tensor, side: Side, center: tl.constexpr = NONE) -> Codes:
    """Codes and scales of x, in the problem's layout with any strides."""
    rows = (side.heads, side.tokens)
    if not problem.varlen:
        rows = (problem.batch, side.heads, side.length)  # type: ignore[assignment]
    codes = torch.empty((*rows, problem.d), dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    part = mu = None
    size = (problem.batch, side.heads)
    if center.value == SEQUENCE.value:
        part = scale.new_empty((*size, triton.cdiv(side.length, CHUNK), problem.d))
        if x.numel() and problem.batch:
            launch(
            mean_kernel, (problem, side[:3]), (x, part, side.cu, side.start),
            functools.partial(_mean_arguments, problem, side),
        )  # fmt: skip
    elif center.value == OWN.value:
        mu = scale.new_empty((*size, triton.cdiv(side.length, BLOCK), problem.d))
    if x.numel() and problem.batch:
        launch(
        quantise_kernel, (problem, side[:3], center.value),
        (x, codes, scale, part, mu, side.cu, side.start),
        functools.partial(_arguments, problem, side, center.value),
    )  # fmt: skip
    return Codes(codes, scale, scale.new_empty(0) if mu is None else mu)


def block_count(problem: Problem, side: Side) -> int:
    """Blocks of a head of `turned`: a packed sequence may fill its last one in part."""
    if problem.varlen:
        return side.tokens // BLOCK + problem.batch + 1
    return problem.batch * triton.cdiv(side.length, BLOCK)


def _turn_arguments(problem: Problem, side: Side, *tensors: Any) -> Any:
    tiles = triton.cdiv(side.length, BLOCK)
    positional = (
        *tensors, *row_steps(side, problem.varlen), side.length, side.tokens,
        block_count(problem, side),
    )  # fmt: skip
    named = {"D": problem.d, "BLOCK": BLOCK, "VARLEN": problem.varlen, "num_warps": 4}
    return (tiles, side.heads, problem.batch), positional, named


def turned(problem: Problem, codes: torch.Tensor, side: Side) -> torch.Tensor:
    """Codes as [H, blocks, D, BLOCK]: products over tokens read them along the tokens.

    8-bit tensor cores take no transposed operand; turned in registers, a tile is loaded late.
    """
    size = (side.heads, block_count(problem, side), problem.d, BLOCK)
    found = torch.empty(size, dtype=torch.int8, device=codes.device)
    if codes.numel() and problem.batch:
        launch(
            turn_kernel,
            (problem, side[:3]),
            (codes, found, side.cu, side.start),
            functools.partial(_turn_arguments, problem, side),
        )
    return found

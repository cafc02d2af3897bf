"""Before the backward pass: D' = delta - dLSE of every row, and the gradient of the sinks.

Shape legend: as in `forward`. delta is laid out like LSE: [B, H, sq], or [H, T] packed, float32.

dL/dS_ij = P_ij (dP_ij - delta_i) from O, plus P_ij dLSE_i from the LSE output, so both passes need
delta_i - dLSE_i alone. The sink is one more logit of the row with value 0 (dP = 0), hence
dSink = -sum_i P_sink,i D'_i.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from stable_attention.layouts import strides
from stable_attention.numerics import LOG2E, residual_decode, row_delta
from stable_attention.problem import Extras, Problem
from stable_attention.triton.geometry import locate
from stable_attention.triton.launches import launch
from stable_attention.triton.memory import load_tile, tile_offsets
from stable_attention.triton.options import padded

BLOCK_M = 64


@triton.jit(do_not_specialize=("sq", "tq", "tiles", "heads", "stride_lb", "stride_lh"))
def preprocess_kernel(
    o_ptr, low_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, sink_ptr, dsink_ptr, cu_ptr, start_ptr,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, stride_lb, stride_lh,
    sq, tq, heads, tiles,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, VARLEN: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_SINK: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    start, n = locate(cu_ptr, start_ptr, b, tq, sq, VARLEN)
    m0 = tile * BM
    if m0 >= n:
        return
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    o_row = b64 * stride_ob + h64 * stride_oh + start.to(tl.int64) * stride_os
    g_row = b64 * stride_gb + h64 * stride_gh + start.to(tl.int64) * stride_gs
    row = b64 * stride_lb + h64 * stride_lh + start
    off_o = tile_offsets(stride_os, BM, BDV)
    off_g = tile_offsets(stride_gs, BM, BDV)
    # [BM, BDV]
    hi = load_tile(o_ptr + o_row, off_o, m0, stride_os, n, BM, BDV, DV, True)
    do = load_tile(do_ptr + g_row, off_g, m0, stride_gs, n, BM, BDV, DV, True)
    o = hi.to(tl.float32)
    if HAS_LOW:
        low = load_tile(low_ptr + o_row, off_o, m0, stride_os, n, BM, BDV, DV, True)
        o += residual_decode(low, hi)
    rows = m0 + tl.arange(0, BM)
    ok = rows < n
    delta = row_delta(do, o)
    if HAS_DLSE or HAS_SINK:
        lse = tl.load(lse_ptr + row + rows, mask=ok, other=float("inf"))
        empty = lse == -float("inf")
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row + rows, mask=ok, other=0.0)
        # Without keys P is 0, but 0 times the infinite dLSE of an infinite LSE is not.
        delta = tl.where(empty, 0.0, delta)
    tl.store(delta_ptr + row + rows, delta, mask=ok)
    if PLANES and (HAS_DLSE or HAS_SINK):
        # What the rows of dS sum to, and the sink's P: see `preprocess`.
        plane = heads.to(tl.int64) * tq
        target = tl.zeros([BM], tl.float32)
        p_sink = tl.zeros([BM], tl.float32)
        if HAS_DLSE:
            target += tl.load(dlse_ptr + row + rows, mask=ok, other=0.0)
        if HAS_SINK:
            rest = tl.load(lse_ptr + plane + row + rows, mask=ok, other=0.0)
            p_sink = tl.exp2(tl.load(sink_ptr + h).to(tl.float32) * LOG2E - lse - rest)
            p_sink = tl.where(empty, 0.0, p_sink)
            target += p_sink * delta
        tl.store(delta_ptr + plane + row + rows, tl.where(empty, 0.0, target), mask=ok)
        tl.store(delta_ptr + 2 * plane + row + rows, p_sink, mask=ok)
    elif HAS_SINK:
        # Without keys a sink of -inf has an LSE of -inf: no weight, instead of -inf - -inf.
        lse = tl.where(empty, float("inf"), lse)
        p_sink = tl.exp2((tl.load(sink_ptr + h) - lse) * LOG2E)
        part = (b64 * tiles + tile) * heads + h
        tl.store(dsink_ptr + part, -tl.sum(p_sink * delta, 0))


def _arguments(problem, out, low, dout, lse, dlse, delta, sinks, parts, cu_q, starts):
    tiles = triton.cdiv(problem.sq, BLOCK_M)
    planes = problem.planes > 1
    steps = lse.stride()[planes:]
    positional = (
        out, low, dout, lse, dlse, delta, sinks, parts, cu_q, starts,
        *strides(out, problem.layout), *strides(dout, problem.layout),
        *((0, steps[0]) if problem.varlen else steps[:2]),
        problem.sq, problem.tq, problem.heads, tiles,
    )  # fmt: skip
    named = {
        "DV": problem.dv, "BDV": padded(problem.dv), "BM": BLOCK_M, "VARLEN": problem.varlen,
        "HAS_LOW": low is not None, "HAS_DLSE": dlse is not None, "HAS_SINK": sinks is not None,
        "PLANES": planes, "num_warps": 4,
    }  # fmt: skip
    return (tiles, problem.heads, problem.batch), positional, named


def preprocess(
    problem: Problem,
    dout: torch.Tensor,
    out: torch.Tensor,
    *,
    low: torch.Tensor | None,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    extras: Extras,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(D' = delta - dLSE like ``lse``, dSink [h] float32 or None).

    Under a projecting stabilizer D' has the shape of one plane of ``lse``. With sinks or dLSE there
    are three planes: D', what a row of dS sums to over the keys, dLSE + P_sink D', and P_sink; no
    dSink, which `sink_gradient` makes of them once the backward has corrected D'.

    Args:
        dout, out: in the problem's layout; dout of any strides with a contiguous last dimension.
        low: O's low-order part (None or empty: delta from ``out`` alone).
        dlse: gradient of LSE, laid out like ``lse``, or None.
    """
    tiles = triton.cdiv(problem.sq, BLOCK_M)
    sinks = extras.sinks if problem.has_sinks else None
    parts = None
    planes = problem.planes > 1
    if planes and (sinks is not None or dlse is not None):
        delta = lse.new_zeros((3, *lse.shape[1:]))
    else:
        delta = torch.empty_like(lse[0] if planes else lse)
    if sinks is not None and not planes:
        # Zeros, because tiles past a packed sequence's end write nothing.
        parts = torch.zeros(
            (problem.batch * tiles, problem.heads), dtype=torch.float32, device=out.device
        )
    if out.numel() and problem.batch:
        starts = extras.cu_q if extras.start_q is None else extras.start_q
        low = low if low is not None and low.numel() > 0 else None
        launch(
            preprocess_kernel,
            (problem,),
            (out, low, dout, lse, dlse, delta, sinks, parts, extras.cu_q, starts),
            functools.partial(_arguments, problem),
        )
    return delta, None if parts is None else parts.sum(0)


def sink_gradient(problem: Problem, delta: torch.Tensor) -> torch.Tensor:
    """dSink [h] float32 from the three planes that `preprocess` left, D' corrected by now."""
    rows = -delta[2] * delta[0]
    return rows.sum(-1) if problem.varlen else rows.sum((0, 2))

"""Scores and dropout mask written out in full: for FlashAttention's S_dmask and for tests only.

Shape legend: scores [B, H, SQ, SK] float32, keep [B, H, SQ, SK] int8; SQ and SK are maxima.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stable_attention.layouts import strides
from stable_attention.numerics import LN2, soften
from stable_attention.philox import keep_mask
from stable_attention.problem import Extras, Problem
from stable_attention.triton.geometry import align, locate, visible
from stable_attention.triton.options import NO_SPECIALIZE, common_arguments
from stable_attention.triton.parts import dot_over_parts, read_parts

BLOCK = 64


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def scores_kernel(
    q_ptr, k_ptr, s_ptr, keep_ptr, seed_ptr,
    cu_q_ptr, cu_k_ptr, start_q_ptr, start_k_ptr, pos_q_ptr, pos_k_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    sq, sk, tq, tk, heads, left, right, pos_q, pos_k, batch_offset, head_offset, threshold,
    unit, capped_scale, max_q, max_k,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    DROPOUT: tl.constexpr, CHUNKED: tl.constexpr, POS_PTR: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0) * BM
    n0 = tl.program_id(1) * BN
    b = tl.program_id(2) // heads
    h = tl.program_id(2) % heads
    start_q, sq = locate(cu_q_ptr, start_q_ptr, b, tq, sq, VARLEN)
    start_k, sk = locate(cu_k_ptr, start_k_ptr, b, tk, sk, VARLEN)
    q_pos, k_pos, shift = align(sq, sk, b, pos_q, pos_k, pos_q_ptr, pos_k_ptr, CHUNKED, POS_PTR)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    q_ptr += b64 * stride_qb + h64 * stride_qh + start_q.to(tl.int64) * stride_qs
    k_ptr += b64 * stride_kb + (h64 // GROUP) * stride_kh + start_k.to(tl.int64) * stride_ks
    q = read_parts(q_ptr, m0, stride_qs, sq, BM, BD, D)
    k = read_parts(k_ptr, n0, stride_ks, sk, BN, BD, D)
    s = soften(dot_over_parts(q, k), capped_scale, CAPPED) * (unit * LN2)
    rows = m0 + tl.arange(0, BM)
    cols = n0 + tl.arange(0, BN)
    ok = visible(rows[:, None], cols[None, :], sk, shift, left, right, HAS_LEFT, HAS_RIGHT)
    ok = ok & (rows < sq)[:, None]
    inside = (rows < max_q)[:, None] & (cols < max_k)[None, :]
    place = (b64 * heads + h64) * max_q * max_k
    off = place + rows.to(tl.int64)[:, None] * max_k + cols[None, :]
    tl.store(s_ptr + off, tl.where(ok, s, -float("inf")), mask=inside)
    if DROPOUT:
        keep = keep_mask(
            tl.load(seed_ptr), b + batch_offset, h + head_offset,
            q_pos + m0, k_pos + n0, threshold, BM, BN, not CHUNKED,
        )  # fmt: skip
        tl.store(keep_ptr + off, keep.to(tl.int8), mask=inside)


def scores_and_mask(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, extras: Extras
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scaled, masked scores float32 (-inf where hidden), int8 mask of kept weights)."""
    shape = (problem.batch, problem.heads, problem.sq, problem.sk)
    scores = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    keep = torch.ones(shape, dtype=torch.int8, device=q.device)
    if scores.numel():
        tiles = (triton.cdiv(problem.sq, BLOCK), triton.cdiv(problem.sk, BLOCK))
        scores_kernel[(*tiles, problem.batch * problem.heads)](
            q, k, scores, keep, extras.seed, *extras.pointers(),
            *strides(q, problem.layout), *strides(k, problem.layout),
            **common_arguments(problem, extras), max_q=problem.sq, max_k=problem.sk,
            BM=BLOCK, BN=BLOCK,
        )  # fmt: skip
    return scores, keep

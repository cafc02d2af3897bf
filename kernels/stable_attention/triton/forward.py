"""Forward attention kernel: O (16-bit or float32), its low-order part, LSE, largest logits.

Shape legend: B batch, H query heads, HK key/value heads, BM x BN tile of queries x keys,
D / DV head dims (BD / BDV padded, see `parts`).
q, k, v tiles, acc and part are tuples of one or two tensors along the head dim (`parts`).
LSE is [B, H, sq], or [H, tq] for packed sequences; float32, natural log. So is the LSE of the
rounded P, from which the backward makes P where O is divided by that sum.

Dataflow: one program owns BM query rows of one head. It visits the tiles that touch the edge of the
visible band with a mask and all others without one: in two loops, or in one with a branch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from stable_attention import configs
from stable_attention.layouts import strides
from stable_attention.numerics import (
    DYNAMIC_BOUND_BF16,
    DYNAMIC_BOUND_FP16,
    LN2,
    accumulate,
    add_late_sum,
    add_segment,
    add_sink,
    inverse,
    log_sum_exp,
    log_sum_exp_planes,
    one_a_lane,
    pinned,
    residual_encode,
    round_and_widen,
    round_scores,
    soften,
    softmax_step,
)
from stable_attention.philox import keep_mask
from stable_attention.problem import Extras, Problem
from stable_attention.stabilizers import KNOWN, Stabilizer
from stable_attention.triton import bundles
from stable_attention.triton.descriptors import descriptors
from stable_attention.triton.geometry import (
    AT_EDGE,
    align,
    edge_tile,
    hide,
    key_range,
    locate,
    tile_and_head,
)
from stable_attention.triton.launches import Arguments, launch
from stable_attention.triton.memory import POINTERS, store_tile
from stable_attention.triton.options import NO_SPECIALIZE, common_arguments
from stable_attention.triton.parts import (
    accumulate_parts,
    add_dot_parts,
    add_late_parts,
    add_segment_parts,
    dot_over_parts,
    dot_parts,
    first_part,
    load_parts,
    part_offsets,
    part_sources,
    rescale_parts,
    scale_parts,
    zero_parts,
)
from stable_attention.triton.results import ForwardResult, allocate


@triton.jit
def _scores(q, k, n, sk, RAGGED: tl.constexpr, T: tl.constexpr):
    """Raw scores [BM, BN] of the key tile that starts at n: the product and nothing that waits."""
    # [BN, BD]
    k = load_parts(k.sources, k.offsets, n, k.stride, sk, T.BN, T.BD, T.D, RAGGED, T.TMA)
    # [BM, BD] @ [BD, BN] -> [BM, BN]
    return dot_over_parts(q, k)


@triton.jit
def _weights(
    s, m, l, top, edge, n, place, mask, softmax, drop, MASKED: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Softmax step of raw scores; ``edge`` decides on the mask where MASKED is AT_EDGE.

    place: batch entry and head as dropout counts them.

    Returns (P [BM, BN] as DTYPE, P after dropout, alpha, m, l, top).
    """
    s = soften(round_scores(s, T.PAPER), softmax.capped_scale, T.CAPPED)
    rows = (mask.first + tl.arange(0, T.BM))[:, None]
    cols = (n + tl.arange(0, T.BN))[None, :]
    if MASKED == AT_EDGE:
        if edge:
            s = hide(s, rows, cols, mask, -float("inf"), T)
    elif MASKED:
        s = hide(s, rows, cols, mask, -float("inf"), T)
    p, alpha, m, l, top = softmax_step(
        s, m, l, top, softmax.unit, softmax.beta, softmax.eps,
        MASKED, T.SUM, T.DYNAMIC, T.PAPER, T.BOUND,
    )  # fmt: skip
    p = p.to(T.DTYPE)
    weights = p
    if T.DROPOUT:
        keep = keep_mask(
            drop.seed, place[0], place[1], drop.q_pos + mask.first, drop.k_pos + n,
            drop.threshold, T.BM, T.BN, not T.CHUNKED,
        )  # fmt: skip
        weights = tl.where(keep, p, 0.0)
    return p, weights, alpha, m, l, top


@triton.jit
def _late_step(
    state, s, ones, v, edge, n, mask, softmax, drop, MASKED: tl.constexpr, T: tl.constexpr
):
    """Add the product of the tile before (part, l_part), then start that of the tile at n.

    state: (m, l, l_acc, top, acc, part, l_part, alpha). l_acc [BM, 4] sums the rounded P, if
    ROUNDED; its columns are equal, as those of l_part are.
    """
    place = drop.batch + drop.batch_offset, drop.head + drop.head_offset
    m, l, l_acc, top, acc, part, l_part, alpha = state
    acc = add_late_parts(acc, part, alpha)
    if T.ROUNDED:
        l_acc = add_late_sum(l_acc, l_part, alpha)
    p, weights, alpha, m, l, top = _weights(
        s, m, l, top, edge, n, place, mask, softmax, drop, MASKED, T
    )
    if T.EARLY:
        if T.SUM:
            l = pinned(l)
        if T.ROUNDED:
            l_part = pinned(tl.dot(p, ones))
    v = load_parts(v.sources, v.offsets, n, v.stride, mask.length, T.BN, T.BDV, T.DV, False, T.TMA)
    part = dot_parts(weights, v)
    if T.ROUNDED and not T.EARLY:
        l_part = tl.dot(p, ones)
    return m, l, l_acc, top, acc, part, l_part, alpha


@triton.jit
def _forward_step(
    state, q, ones, k, v, n, mask, softmax, drop, MASKED: tl.constexpr, T: tl.constexpr
):
    """Fold the key tile that starts at n into state: (m, l, l_acc, top, acc).

    l_acc [BM, ONES] sums the rounded P, if ROUNDED; all its columns are equal.
    """
    place = drop.batch + drop.batch_offset, drop.head + drop.head_offset
    m, l, l_acc, top, acc = state
    s = _scores(q, k, n, mask.length, MASKED, T)
    p, weights, alpha, m, l, top = _weights(
        s, m, l, top, True, n, place, mask, softmax, drop, MASKED, T
    )
    if T.EARLY:
        if T.SUM:
            l = pinned(l)
        if T.ROUNDED:
            l_acc = pinned(accumulate(l_acc, alpha, p, ones, False))
        acc = rescale_parts(acc, alpha)
    # [BN, BDV]
    v = load_parts(v.sources, v.offsets, n, v.stride, mask.length, T.BN, T.BDV, T.DV, MASKED, T.TMA)
    # [BM, BN] @ [BN, BDV] -> [BM, BDV]
    if T.EARLY:
        acc = add_dot_parts(weights, v, acc)
    else:
        acc = accumulate_parts(acc, alpha, weights, v, T.PAPER)
    if T.ROUNDED and not T.EARLY:
        l_acc = accumulate(l_acc, alpha, p, ones, False)
    return m, l, l_acc, top, acc


@triton.jit
def _store_output(
    o, o_ptr, low_ptr, m0, stride, sq, DTYPE: tl.constexpr,
    BM: tl.constexpr, BDV: tl.constexpr, DV: tl.constexpr, HAS_LOW: tl.constexpr,
    TMA: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Write O [BM, BDV] (the part at COLUMN), and rounded to DTYPE also its low-order part."""
    if HAS_LOW:
        hi, wide = round_and_widen(o, DTYPE)
        # Both, then both stores: nothing is computed between them, while a descriptor's is waited
        # for.
        if TMA:
            low = residual_encode(o, hi, wide, low_ptr[0].dtype)
        else:
            low = residual_encode(o, hi, wide, low_ptr.dtype.element_ty)
        store_tile(o_ptr, hi, m0, stride, sq, BM, BDV, DV, TMA, COLUMN)
        store_tile(low_ptr, low, m0, stride, sq, BM, BDV, DV, TMA, COLUMN)
    else:
        store_tile(o_ptr, o, m0, stride, sq, BM, BDV, DV, TMA, COLUMN)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def forward_kernel(
    q_ptr, q_tail, k_ptr, k_tail, v_ptr, v_tail, o_ptr, o_tail, low_ptr, low_tail,
    lse_ptr, row_ptr, max_ptr, sink_ptr, seed_ptr,
    cu_q_ptr, cu_k_ptr, start_q_ptr, start_k_ptr, pos_q_ptr, pos_k_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    stride_lb, stride_lh,
    sq, sk, tq, tk, heads, tiles, left, right, pos_q, pos_k, batch_offset, head_offset, threshold,
    unit, capped_scale, keep_scale, beta, eps,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, VARLEN: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    DROPOUT: tl.constexpr, CHUNKED: tl.constexpr, POS_PTR: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_LOW: tl.constexpr, HAS_MAX: tl.constexpr,
    SUM: tl.constexpr, ROUNDED: tl.constexpr, HAS_ROW: tl.constexpr,
    SEGMENT: tl.constexpr, ONES: tl.constexpr, EARLY: tl.constexpr,
    DYNAMIC: tl.constexpr, PAPER: tl.constexpr, BOUND: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, TMA: tl.constexpr, Q_TMA: tl.constexpr,
    REVERSE: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    tile, h = tile_and_head(tl.program_id(0), tiles, heads, HEAD_BLOCK, HAS_RIGHT)
    b = tl.program_id(1)
    start_q, sq = locate(cu_q_ptr, start_q_ptr, b, tq, sq, VARLEN)
    start_k, sk = locate(cu_k_ptr, start_k_ptr, b, tk, sk, VARLEN)
    m0 = tile * BM
    if m0 >= sq:
        return
    q_pos, k_pos, shift = align(sq, sk, b, pos_q, pos_k, pos_q_ptr, pos_k_ptr, CHUNKED, POS_PTR)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    hk = h // GROUP
    of_q = bundles.Head(b, h, start_q, sq)
    of_k = bundles.Head(b, hk, start_k, sk)
    q_ptr = part_sources(q_ptr, q_tail, of_q, (stride_qb, stride_qs, stride_qh), BD, Q_TMA)
    row = b64 * stride_lb + h64 * stride_lh + start_q

    off_q = part_offsets(stride_qs, BM, BD)
    k_ptr = part_sources(k_ptr, k_tail, of_k, (stride_kb, stride_ks, stride_kh), BD, TMA)
    v_ptr = part_sources(v_ptr, v_tail, of_k, (stride_vb, stride_vs, stride_vh), BDV, TMA)
    k = bundles.Tiles(k_ptr, part_offsets(stride_ks, BN, BD), stride_ks)
    v = bundles.Tiles(v_ptr, part_offsets(stride_vs, BN, BDV), stride_vs)
    # [BM, BD]
    q = load_parts(q_ptr, off_q, m0, stride_qs, sq, BM, BD, D, True, Q_TMA)
    m = tl.full([BM], -float("inf"), tl.float32)
    # The sum of the unrounded P stays spread over four lanes: no exchange until the end.
    l = tl.zeros([BM], tl.float32) if PAPER else tl.zeros([BM, 4], tl.float32)
    l_acc = tl.zeros([BM, ONES], tl.float32)
    ones = tl.full([BN, ONES], 1.0, tl.float32).to(q[0].dtype)
    top = m
    acc = zero_parts(BM, BDV)
    T: tl.constexpr = bundles.ForwardTraits(
        q[0].dtype, BM, BN, BD, BDV, D, DV, HAS_LEFT, HAS_RIGHT, CAPPED, DROPOUT, CHUNKED,
        SUM, ROUNDED, EARLY, DYNAMIC, PAPER, BOUND, TMA,
    )  # fmt: skip
    seed = tl.load(seed_ptr) if DROPOUT else 0
    mask = bundles.Mask(m0, sk, shift, left, right)
    softmax = bundles.Softmax(unit, capped_scale, beta, eps)
    drop = bundles.Dropout(
        seed, b, batch_offset, h, head_offset, q_pos, k_pos, threshold, keep_scale
    )

    lo, full_lo, full_hi, hi = key_range(
        m0, sq, sk, shift, left, right, BM, BN, HAS_LEFT, HAS_RIGHT
    )
    EDGES: tl.constexpr = HAS_LEFT or HAS_RIGHT or not EVEN_K
    # One loop for all tiles, masked or not, fills its pipeline of loads once. It needs descriptors
    # for what lies past the sequence; where products join in place, its branch makes ptxas
    # serialize them (C7515).
    ONE_LOOP: tl.constexpr = EDGES and (TMA or EVEN_K) and SEGMENT == BN
    MASKED: tl.constexpr = AT_EDGE if ONE_LOOP else False
    begin = lo if ONE_LOOP else full_lo
    end = hi if ONE_LOOP else full_hi
    if EDGES and not ONE_LOOP:
        for t in range(0, (full_lo - lo + hi - full_hi) // BN):
            n = edge_tile(t, lo, full_lo, full_hi, BN)
            m, l, l_acc, top, acc = _forward_step(
                (m, l, l_acc, top, acc), q, ones, k, v, n, mask, softmax, drop, True, T
            )
    # Masked tiles may leave rows without a key (m = -inf); an unmasked tile ends that.
    if SEGMENT == BN:
        # The product of a tile joins an iteration later, in float32: a fused multiply-add where an
        # accumulating product needs the multiplication by alpha, in the shadow of the next softmax
        # and not between a softmax and its product.
        part = zero_parts(BM, BDV)
        l_acc = one_a_lane(l_acc)
        l_part = tl.zeros([BM, ONES], tl.float32)
        alpha = tl.full([BM], 1.0, tl.float32)
        for t in range(0, (end - begin) // BN):
            n = end - BN - t * BN if REVERSE else begin + t * BN
            s = _scores(q, k, n, sk, False, T)
            m, l, l_acc, top, acc, part, l_part, alpha = _late_step(
                (m, l, l_acc, top, acc, part, l_part, alpha), s, ones, v,
                (n < full_lo) | (n >= full_hi), n, mask, softmax, drop, MASKED, T,
            )  # fmt: skip
        acc = add_late_parts(acc, part, alpha)
        l_acc = add_late_sum(l_acc, l_part, alpha)
    elif SEGMENT == 0:
        for t in range(0, (full_hi - full_lo) // BN):
            n = full_lo + t * BN
            m, l, l_acc, top, acc = _forward_step(
                (m, l, l_acc, top, acc), q, ones, k, v, n, mask, softmax, drop, False, T
            )
    else:
        for g in range(0, tl.cdiv(full_hi - full_lo, SEGMENT)):
            n0 = full_lo + g * SEGMENT
            m_before = m
            part = zero_parts(BM, BDV)
            l_part = tl.zeros([BM, ONES], tl.float32)
            for t in range(0, tl.minimum(SEGMENT, full_hi - n0) // BN):
                n = n0 + t * BN
                m, l, l_part, top, part = _forward_step(
                    (m, l, l_part, top, part), q, ones, k, v, n, mask, softmax, drop, False, T
                )
            acc = add_segment_parts(acc, part, m_before, m)
            l_acc = add_segment(l_acc, l_part, m_before, m)

    rows = m0 + tl.arange(0, BM)
    row_ok = rows < sq
    if HAS_MAX:
        seen = tl.where(row_ok, top, -float("inf"))
        tl.atomic_max(max_ptr + h, tl.max(seen, 0) * LN2, sem="relaxed")
    if not PAPER:
        l = tl.sum(l, 1)
    l_rounded = tl.max(l_acc, 1) if ROUNDED else l
    if HAS_SINK:
        alpha, m, l, l_rounded = add_sink(tl.load(sink_ptr + h), m, l, l_rounded)
        acc = scale_parts(acc, alpha)
    # Before O, whose descriptor's store is waited for.
    if SUM:
        tl.store(lse_ptr + row + rows, log_sum_exp(m, l), mask=row_ok)
    if HAS_ROW:
        if PLANES:
            hi, lo = log_sum_exp_planes(m, l_rounded)
            tl.store(row_ptr + row + rows, hi, mask=row_ok)
            tl.store(row_ptr + heads.to(tl.int64) * tq + row + rows, lo, mask=row_ok)
        else:
            tl.store(row_ptr + row + rows, log_sum_exp(m, l_rounded), mask=row_ok)
    acc = scale_parts(acc, inverse(l_rounded) * keep_scale)
    steps_o = (stride_ob, stride_os, stride_oh)
    o_ptr = part_sources(o_ptr, o_tail, of_q, steps_o, BDV, TMA)
    if HAS_LOW:
        low_ptr = part_sources(low_ptr, low_tail, of_q, steps_o, BDV, TMA)
    else:
        low_ptr = (None, None)
    C1: tl.constexpr = first_part(BDV)
    REST: tl.constexpr = BDV - C1
    _store_output(
        acc[0], o_ptr[0], low_ptr[0], m0, stride_os, sq,
        q[0].dtype, BM, C1, min(C1, DV), HAS_LOW, TMA, 0,
    )  # fmt: skip
    if REST:
        _store_output(
            acc[1], o_ptr[1], low_ptr[1], m0, stride_os, sq,
            q[0].dtype, BM, REST, DV - C1, HAS_LOW, TMA, C1,
        )  # fmt: skip


def _segment(stabilizer: Stabilizer, tile: configs.Tile) -> int:
    """Keys between float32 additions: what the numerics ask for, or what is faster for all."""
    if stabilizer.paper or not (stabilizer.rounded_normalizer or tile.segment == tile.bn):
        return 0
    return tile.segment


def _arguments(
    problem: Problem, extras: Extras, tile: configs.Tile, *tensors: torch.Tensor | None
) -> Arguments:
    """Those of `forward_kernel`, of the tensors that `forward` names."""
    q, k, v, out, low, lse, row, max_logits, sinks, *small = tensors
    assert q is not None and k is not None and v is not None and out is not None
    stabilizer = KNOWN[problem.stabilizer]
    tiles = triton.cdiv(problem.sq, tile.bm)
    lse_strides = (0, problem.tq) if problem.varlen else (problem.heads * problem.sq, problem.sq)
    bound = DYNAMIC_BOUND_FP16 if q.dtype == torch.float16 else DYNAMIC_BOUND_BF16
    queries: tuple[object, ...] = (q, None)
    q_tma = POINTERS.value
    if tile.query_tma:
        q_tma, queries = descriptors(problem, tile, (q, tile.bm))
    tma, tiled = descriptors(
        problem, tile, (k, tile.bn), (v, tile.bn), (out, tile.bm), (low, tile.bm)
    )
    positional = (
        *queries, *tiled, lse, row, max_logits, sinks, *small,
        *strides(q, problem.layout), *strides(k, problem.layout), *strides(v, problem.layout),
        *strides(out, problem.layout), *lse_strides,
    )  # fmt: skip
    named = common_arguments(problem, extras) | {
        "tiles": tiles,
        "keep_scale": 1.0 / (1.0 - problem.dropout_p),
        "beta": problem.beta, "eps": problem.eps,
        "BM": tile.bm, "BN": tile.bn,
        "EVEN_K": not problem.varlen and problem.sk % tile.bn == 0,
        "HAS_SINK": problem.has_sinks,
        "HAS_LOW": low is not None,
        "HAS_MAX": max_logits is not None,
        "SUM": lse is not None,
        "ROUNDED": stabilizer.rounded_normalizer,
        "HAS_ROW": row is not None, "PLANES": stabilizer.planes > 1,
        "SEGMENT": _segment(stabilizer, tile),
        # The failing emulation has one order of summation.
        "ONES": 8 if stabilizer.paper else tile.ones,
        "EARLY": bool(tile.early) and not stabilizer.paper,
        "DYNAMIC": stabilizer.dynamic, "PAPER": stabilizer.paper, "BOUND": bound.value,
        "HEAD_BLOCK": configs.head_block(problem, tiles * problem.group),
        "TMA": tma, "Q_TMA": q_tma, "REVERSE": tile.reverse,
        "num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers or None,
    }  # fmt: skip
    return (tiles * problem.heads, problem.batch), positional, named


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
    """Launch the forward kernel.

    Args:
        extras: sinks, offsets, seed and the other tensors that are not q, k, v.
        out_dtype: q's dtype (default), or float32 for partial outputs that will be merged.
        with_lse: LSE is wanted; without it, what needs it all the same still makes it.
        config: tile sizes; None looks them up in `configs`.
    """
    result = allocate(
        problem,
        q.device,
        out_dtype=out_dtype or q.dtype,
        with_max_logits=with_max_logits,
        with_lse=with_lse,
    )
    if problem.sq == 0 or problem.batch == 0 or q.numel() == 0:
        return result
    tile = config or configs.lookup("forward", problem, q.device)
    low, lse, row = (x if x.numel() else None for x in (result.low, result.lse, result.row_lse))
    tensors = (
        q, k, v, result.out, low, lse, row,
        result.max_logits if with_max_logits else None,
        extras.sinks if problem.has_sinks else None,
        extras.seed if problem.dropout_p > 0 else None,
        *extras.pointers(),
    )  # fmt: skip
    launch(
        forward_kernel,
        (problem, tile),
        tensors,
        functools.partial(_arguments, problem, extras, tile),
    )
    return result


__all__ = ["forward", "forward_kernel"]

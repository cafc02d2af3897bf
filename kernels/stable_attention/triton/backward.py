"""Backward attention kernels: (dK, dV) by key tile, then dQ by query tile.

Shape legend: as in `forward` (tiles of q, k, v, dO, dq, dk and dv are tuples, see `parts`); LSE and
D' (see `preprocess`) are [B, H, sq] or [H, T], float32.

Every gradient tile is owned by one program and summed in a fixed order, so repeats are bitwise
equal, always. Grouped-query heads are summed in float32 inside the program that owns the key/value
tile. `hopper` adds dQ of all key tiles in turns instead: five tile products, not seven.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from stable_attention import configs
from stable_attention.layouts import strides
from stable_attention.numerics import (
    lse_planes_to_shift,
    lse_to_shift,
    round_scores,
    score_slope,
    soften,
)
from stable_attention.philox import keep_mask
from stable_attention.problem import Extras, Problem
from stable_attention.stabilizers import KNOWN
from stable_attention.triton import bundles, projection
from stable_attention.triton.descriptors import descriptors
from stable_attention.triton.geometry import (
    align,
    edge_tile,
    key_range,
    locate,
    query_range,
    tile_and_head,
    visible,
    visible_transposed,
)
from stable_attention.triton.launches import launch
from stable_attention.triton.memory import (
    POINTERS,
    load_row,
    load_tile,
    source,
    store_tile,
    tile_offsets,
)
from stable_attention.triton.options import NO_SPECIALIZE, common_arguments
from stable_attention.triton.parts import (
    add_dot_parts,
    add_rest,
    dot_over_parts,
    first_part,
    load_parts,
    part_offsets,
    part_sources,
    read_parts,
    zero_parts,
)
from stable_attention.triton.results import new_gradients


@triton.jit
def _dkdv_step(
    dk, dv, k, v, q, do, numbers, m0, mask, softmax, drop,
    MASKED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the query tile that starts at m0 to (dk, dv). Scores are transposed: [BN, BM].

    numbers: `bundles.Rows`.
    """
    lse_ptr = numbers.lse_ptr + numbers.first
    delta_ptr = numbers.delta_ptr + numbers.first
    batch = drop.batch + drop.batch_offset
    head = drop.head + drop.head_offset
    sq = mask.length
    rows = m0 + tl.arange(0, T.BM)
    # [BM, BD]
    q = load_parts(q.sources, q.offsets, m0, q.stride, sq, T.BM, T.BD, T.D, MASKED, T.TMA)
    # [BN, BD] @ [BD, BM] -> [BN, BM]
    s = dot_over_parts(k, q)
    lse = load_row(lse_ptr, rows, sq, float("inf"), MASKED)
    s = soften(round_scores(s, T.PAPER), softmax.capped_scale, T.CAPPED)
    if T.PLANES:
        # Under SPLIT `projection.finish` has made it anew.
        rests = numbers.delta_lo_ptr + numbers.first if T.SPLIT else lse_ptr
        rest = load_row(rests + numbers.plane, rows, sq, 0.0, MASKED)
        p = tl.exp2((s * softmax.unit - lse_planes_to_shift(lse)[None, :]) - rest[None, :])
    else:
        p = tl.exp2(s * softmax.unit - lse_to_shift(lse)[None, :])
    if MASKED:
        cols = mask.first + tl.arange(0, T.BN)
        ok = visible_transposed(
            rows[None, :], cols[:, None], mask.shift, mask.left, mask.right, T.HAS_LEFT, T.HAS_RIGHT
        )
        p = tl.where(ok, p, 0.0)
    do = load_parts(do.sources, do.offsets, m0, do.stride, sq, T.BM, T.BDV, T.DV, MASKED, T.TMA)
    # [BN, BDV] @ [BDV, BM] -> [BN, BM]
    dp = dot_over_parts(v, do)
    weights = p
    p_rounded = p.to(do[0].dtype)
    if T.DROPOUT:
        keep = keep_mask(
            drop.seed, batch, head, drop.q_pos + m0, drop.k_pos + mask.first,
            drop.threshold, T.BM, T.BN, not T.CHUNKED,
        )  # fmt: skip
        keep = tl.trans(keep)
        weights = tl.where(keep, p, 0.0)
        p_rounded = tl.where(keep, p_rounded, 0.0)
        dp = tl.where(keep, dp * drop.keep_scale, 0.0)
    # [BN, BM] @ [BM, BDV] -> [BN, BDV]
    dv = add_dot_parts(p_rounded, do, dv)
    dv = add_rest(weights, p_rounded, do, dv, T.SPLIT)
    dp -= load_row(delta_ptr, rows, sq, 0.0, MASKED)[None, :]
    if T.PLANES:
        dp -= load_row(numbers.delta_lo_ptr + numbers.first, rows, sq, 0.0, MASKED)[None, :]
    ds = score_slope(p * dp, s, T.CAPPED)
    ds_rounded = ds.to(q[0].dtype)
    # [BN, BM] @ [BM, BD] -> [BN, BD]
    dk = add_dot_parts(ds_rounded, q, dk)
    return add_rest(ds, ds_rounded, q, dk, T.SPLIT), dv


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def dkdv_kernel(
    q_ptr, q_tail, do_ptr, do_tail, k_ptr, v_ptr, dk_ptr, dk_tail, dv_ptr, dv_tail,
    lse_ptr, delta_ptr, delta_lo_ptr, seed_ptr,
    cu_q_ptr, cu_k_ptr, start_q_ptr, start_k_ptr, pos_q_ptr, pos_k_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_gb, stride_gs, stride_gh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, stride_lb, stride_lh,
    sq, sk, tq, tk, heads, tiles, left, right, pos_q, pos_k, batch_offset, head_offset, threshold,
    unit, capped_scale, keep_scale, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    DROPOUT: tl.constexpr, CHUNKED: tl.constexpr, POS_PTR: tl.constexpr, PAPER: tl.constexpr,
    ADD: tl.constexpr, EVEN: tl.constexpr, HEAD_BLOCK: tl.constexpr, TMA: tl.constexpr,
    PLANES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # Under a causal mask the first key tiles see the most queries, so the order is natural.
    tile, hk = tile_and_head(tl.program_id(0), tiles, heads // GROUP, HEAD_BLOCK, False)
    b = tl.program_id(1)
    start_q, sq = locate(cu_q_ptr, start_q_ptr, b, tq, sq, VARLEN)
    start_k, sk = locate(cu_k_ptr, start_k_ptr, b, tk, sk, VARLEN)
    n0 = tile * BN
    if n0 >= sk:
        return
    q_pos, k_pos, shift = align(sq, sk, b, pos_q, pos_k, pos_q_ptr, pos_k_ptr, CHUNKED, POS_PTR)
    b64 = b.to(tl.int64)
    of_k = bundles.Head(b, hk, start_k, sk)
    k_ptr = source(k_ptr, of_k, (stride_kb, stride_ks, stride_kh), POINTERS)
    v_ptr = source(v_ptr, of_k, (stride_vb, stride_vs, stride_vh), POINTERS)
    off_q = part_offsets(stride_qs, BM, BD)
    off_do = part_offsets(stride_gs, BM, BDV)
    # [BN, BD], [BN, BDV]
    k = read_parts(k_ptr, n0, stride_ks, sk, BN, BD, D)
    v = read_parts(v_ptr, n0, stride_vs, sk, BN, BDV, DV)
    dk = zero_parts(BN, BD)
    dv = zero_parts(BN, BDV)
    seed = tl.load(seed_ptr) if DROPOUT else 0
    plane = heads.to(tl.int64) * tq if PLANES else 0
    T: tl.constexpr = bundles.BackwardTraits(
        BM, BN, BD, BDV, D, DV, HAS_LEFT, HAS_RIGHT, CAPPED, DROPOUT, CHUNKED, PAPER, TMA, PLANES,
        SPLIT,
    )  # fmt: skip
    mask = bundles.Mask(n0, sq, shift, left, right)
    softmax = bundles.Softmax(unit, capped_scale)
    lo, full_lo, full_hi, hi = query_range(
        n0, sq, sk, shift, left, right, BM, BN, HAS_LEFT, HAS_RIGHT
    )
    for g in range(0, GROUP):
        h = hk * GROUP + g
        h64 = h.to(tl.int64)
        of_q = bundles.Head(b, h, start_q, sq)
        q_h = part_sources(q_ptr, q_tail, of_q, (stride_qb, stride_qs, stride_qh), BD, TMA)
        do_h = part_sources(do_ptr, do_tail, of_q, (stride_gb, stride_gs, stride_gh), BDV, TMA)
        row = b64 * stride_lb + h64 * stride_lh + start_q
        q = bundles.Tiles(q_h, off_q, stride_qs)
        do = bundles.Tiles(do_h, off_do, stride_gs)
        numbers = bundles.Rows(lse_ptr, delta_ptr, delta_lo_ptr, row, plane)
        drop = bundles.Dropout(
            seed, b, batch_offset, h, head_offset, q_pos, k_pos, threshold, keep_scale
        )
        if HAS_LEFT or HAS_RIGHT or not EVEN:
            for t in range(0, (full_lo - lo + hi - full_hi) // BM):
                m0 = edge_tile(t, lo, full_lo, full_hi, BM)
                dk, dv = _dkdv_step(dk, dv, k, v, q, do, numbers, m0, mask, softmax, drop, True, T)
        for t in range(0, (full_hi - full_lo) // BM):
            m0 = full_lo + t * BM
            dk, dv = _dkdv_step(dk, dv, k, v, q, do, numbers, m0, mask, softmax, drop, False, T)
    # What is added to is read first, through pointers.
    OUT: tl.constexpr = POINTERS if ADD else TMA
    dk_ptr = part_sources(dk_ptr, dk_tail, of_k, (stride_dkb, stride_dks, stride_dkh), BD, OUT)
    dv_ptr = part_sources(dv_ptr, dv_tail, of_k, (stride_dvb, stride_dvs, stride_dvh), BDV, OUT)
    store_gradient(dk_ptr, dk, scale, n0, stride_dks, sk, BN, BD, D, ADD, OUT)
    store_gradient(dv_ptr, dv, keep_scale, n0, stride_dvs, sk, BN, BDV, DV, ADD, OUT)


@triton.jit
def store_gradient(
    ptr, grad, scale, row0, stride, rows,
    R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Write scale times a gradient tile [R, C] in parts; see `_store_part`."""
    C1: tl.constexpr = first_part(C)
    if C == C1:
        _store_part(ptr[0], grad[0] * scale, row0, stride, rows, R, C, WIDTH, ADD, TMA, 0)
    else:
        _store_part(ptr[0], grad[0] * scale, row0, stride, rows, R, C1, C1, ADD, TMA, 0)
        _store_part(
            ptr[1], grad[1] * scale, row0, stride, rows, R, C - C1, WIDTH - C1, ADD, TMA, C1
        )


@triton.jit
def _store_part(
    ptr, grad, row0, stride, rows,
    R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, TMA: tl.constexpr,
    COLUMN: tl.constexpr,
):  # fmt: skip
    """Write a [R, C] gradient tile, or add it to what is there (float32 accumulators of chunks)."""
    if ADD:
        off = tile_offsets(stride, R, C)
        grad += load_tile(ptr, off, row0, stride, rows, R, C, WIDTH, True, POINTERS, COLUMN)
    store_tile(ptr, grad, row0, stride, rows, R, C, WIDTH, TMA, COLUMN)


@triton.jit
def _dq_step(
    dq, state, q, do, lse, delta, k, v, n, mask, softmax, drop,
    MASKED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the key tile that starts at n to (dq, what the projection follows). lse is already a
    shift in log2 units."""
    batch = drop.batch + drop.batch_offset
    head = drop.head + drop.head_offset
    sk = mask.length
    k = load_parts(k.sources, k.offsets, n, k.stride, sk, T.BN, T.BD, T.D, MASKED, T.TMA)
    v = load_parts(v.sources, v.offsets, n, v.stride, sk, T.BN, T.BDV, T.DV, MASKED, T.TMA)
    # [BM, BD] @ [BD, BN] -> [BM, BN]
    s = dot_over_parts(q, k)
    s = soften(round_scores(s, T.PAPER), softmax.capped_scale, T.CAPPED)
    p = tl.exp2(s * softmax.unit - lse[:, None])
    if MASKED:
        rows = mask.first + tl.arange(0, T.BM)
        cols = n + tl.arange(0, T.BN)
        ok = visible(
            rows[:, None], cols[None, :], sk, mask.shift, mask.left, mask.right,
            T.HAS_LEFT, T.HAS_RIGHT,
        )  # fmt: skip
        p = tl.where(ok, p, 0.0)
    # [BM, BDV] @ [BDV, BN] -> [BM, BN]
    dp = dot_over_parts(do, v)
    if T.DROPOUT:
        keep = keep_mask(
            drop.seed, batch, head, drop.q_pos + mask.first, drop.k_pos + n,
            drop.threshold, T.BM, T.BN, not T.CHUNKED,
        )  # fmt: skip
        dp = tl.where(keep, dp * drop.keep_scale, 0.0)
    ds = score_slope(p * (dp - delta[:, None]), s, T.CAPPED)
    ds_rounded = ds.to(k[0].dtype)
    # [BM, BN] @ [BN, BD] -> [BM, BD]
    dq = add_rest(ds, ds_rounded, k, add_dot_parts(ds_rounded, k, dq), T.SPLIT)
    return dq, projection.follow(state, ds, ds_rounded, p, k, n, T.PROJECT, T.SPLIT)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def dq_kernel(
    q_ptr, do_ptr, k_ptr, k_tail, v_ptr, v_tail, dq_ptr, dq_tail, key_ptr,
    excess_ptr, top_ptr, best_ptr, lse_ptr, delta_ptr, delta_lo_ptr, seed_ptr,
    cu_q_ptr, cu_k_ptr, start_q_ptr, start_k_ptr, pos_q_ptr, pos_k_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_gb, stride_gs, stride_gh,
    stride_dqb, stride_dqs, stride_dqh, stride_lb, stride_lh,
    sq, sk, tq, tk, heads, tiles, left, right, pos_q, pos_k, batch_offset, head_offset, threshold,
    unit, capped_scale, keep_scale, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    DROPOUT: tl.constexpr, CHUNKED: tl.constexpr, POS_PTR: tl.constexpr, PAPER: tl.constexpr,
    ADD: tl.constexpr, EVEN: tl.constexpr, HEAD_BLOCK: tl.constexpr, TMA: tl.constexpr,
    PLANES: tl.constexpr, SPLIT: tl.constexpr, PROJECT: tl.constexpr, TARGET: tl.constexpr,
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
    q_ptr = source(q_ptr, of_q, (stride_qb, stride_qs, stride_qh), POINTERS)
    do_ptr = source(do_ptr, of_q, (stride_gb, stride_gs, stride_gh), POINTERS)
    row = b64 * stride_lb + h64 * stride_lh + start_q
    off_k = part_offsets(stride_ks, BN, BD)
    off_v = part_offsets(stride_vs, BN, BDV)
    k_ptr = part_sources(k_ptr, k_tail, of_k, (stride_kb, stride_ks, stride_kh), BD, TMA)
    v_ptr = part_sources(v_ptr, v_tail, of_k, (stride_vb, stride_vs, stride_vh), BDV, TMA)
    k = bundles.Tiles(k_ptr, off_k, stride_ks)
    v = bundles.Tiles(v_ptr, off_v, stride_vs)
    # [BM, BD], [BM, BDV]
    q = read_parts(q_ptr, m0, stride_qs, sq, BM, BD, D)
    do = read_parts(do_ptr, m0, stride_gs, sq, BM, BDV, DV)
    rows = m0 + tl.arange(0, BM)
    lse = tl.load(lse_ptr + row + rows, mask=rows < sq, other=float("inf"))
    lse = lse_planes_to_shift(lse) if PLANES else lse_to_shift(lse)
    delta = tl.load(delta_ptr + row + rows, mask=rows < sq, other=0.0)
    dq = zero_parts(BM, BD)
    state = projection.start(BM, BD, PROJECT, SPLIT)
    seed = tl.load(seed_ptr) if DROPOUT else 0
    T: tl.constexpr = bundles.BackwardTraits(
        BM, BN, BD, BDV, D, DV, HAS_LEFT, HAS_RIGHT, CAPPED, DROPOUT, CHUNKED, PAPER, TMA, PLANES,
        SPLIT, PROJECT,
    )  # fmt: skip
    mask = bundles.Mask(m0, sk, shift, left, right)
    softmax = bundles.Softmax(unit, capped_scale)
    lo, full_lo, full_hi, hi = key_range(
        m0, sq, sk, shift, left, right, BM, BN, HAS_LEFT, HAS_RIGHT
    )
    drop = bundles.Dropout(
        seed, b, batch_offset, h, head_offset, q_pos, k_pos, threshold, keep_scale
    )
    if HAS_LEFT or HAS_RIGHT or not EVEN:
        for t in range(0, (full_lo - lo + hi - full_hi) // BN):
            n = edge_tile(t, lo, full_lo, full_hi, BN)
            dq, state = _dq_step(
                dq, state, q, do, lse, delta, k, v, n, mask, softmax, drop, True, T
            )
    for t in range(0, (full_hi - full_lo) // BN):
        n = full_lo + t * BN
        dq, state = _dq_step(dq, state, q, do, lse, delta, k, v, n, mask, softmax, drop, False, T)
    if PROJECT and CHUNKED:
        # What is kept lies as LSE and dQ do.
        best = source(best_ptr, of_q, (stride_dqb, stride_dqs, stride_dqh), POINTERS)
        projection.carry(
            state, excess_ptr + row, top_ptr + row, best, stride_dqs, rows, rows < sq,
            source(key_ptr, of_k, (stride_kb, stride_ks, stride_kh), POINTERS),
            stride_ks, BN, BD, D,
        )  # fmt: skip
    elif PROJECT:
        plane = heads.to(tl.int64) * tq
        row_ok = rows < sq
        rest = tl.load(lse_ptr + plane + row + rows, mask=row_ok, other=0.0)
        dq = projection.finish(
            dq, state, rest, delta_ptr + row, delta_lo_ptr + row, plane, rows, row_ok,
            source(key_ptr, of_k, (stride_kb, stride_ks, stride_kh), POINTERS),
            stride_ks, BN, BD, D, PROJECT, TARGET, SPLIT,
        )  # fmt: skip
    OUT: tl.constexpr = POINTERS if ADD else TMA
    dq_ptr = part_sources(dq_ptr, dq_tail, of_q, (stride_dqb, stride_dqs, stride_dqh), BD, OUT)
    store_gradient(dq_ptr, dq, scale, m0, stride_dqs, sq, BM, BD, D, ADD, OUT)


def _descriptors(problem, tile, inputs, gradients, add):
    """`descriptors` of what a loop reads, and of gradients that are not added to: (tensor, rows).

    A program's own tile goes through pointers: that is as fast or faster, and takes no argument.
    What is added to is read first, and goes through pointers too.
    """
    tma, tiled = descriptors(problem, tile, *inputs, *(() if add else gradients))
    plain = tuple(part for x, _ in gradients for part in (x, None)) if add else ()
    return tma, tiled[: 2 * len(inputs)], (*tiled[2 * len(inputs) :], *plain)


def launch_dkdv(problem, tensors, dk, dv, *, extras, tile, add):
    _launch(dkdv_kernel, _dkdv_arguments, problem, (*tensors, dk, dv), extras, tile, add)


def launch_dq(problem, tensors, dq, *, extras, tile, add, kept=None):
    tensors = (*tensors, dq, *(kept or (None, None, None)))
    _launch(dq_kernel, _dq_arguments, problem, tensors, extras, tile, add)


def _launch(kernel, arguments, problem, tensors, extras, tile, add):
    seed = extras.seed if problem.dropout_p > 0 else None
    launch(
        kernel,
        (problem, tile, add),
        (*tensors, seed, *extras.pointers()),
        functools.partial(arguments, problem, extras, tile, add),
    )


def _dkdv_arguments(problem, extras, tile, add, q, k, v, dout, lse, delta, lo, dk, dv, *small):
    tiles = triton.cdiv(problem.sk, tile.bn)
    group_block = max(1, configs.head_block(problem, tiles) // problem.group)
    gradients = ((dk, tile.bn), (dv, tile.bn))
    tma, reads, writes = _descriptors(
        problem, tile, ((q, tile.bm), (dout, tile.bm)), gradients, add
    )
    positional = (
        *reads, k, v, *writes, lse, delta, lo, *small,
        *(s for x in (q, k, v, dout, dk, dv) for s in strides(x, problem.layout)),
        *_row_strides(problem, lse),
    )  # fmt: skip
    named = _backward_arguments(problem, extras, tile) | {
        "tiles": tiles, "ADD": add, "HEAD_BLOCK": group_block, "TMA": tma,
        "EVEN": not problem.varlen and problem.sk % tile.bn == 0 and problem.sq % tile.bm == 0,
    }  # fmt: skip
    return (tiles * problem.kv_heads, problem.batch), positional, named


def _dq_arguments(
    problem, extras, tile, add, q, k, v, dout, lse, delta, lo, dq, excess, top, best, *small
):
    tiles = triton.cdiv(problem.sq, tile.bm)
    keys = ((k, tile.bn), (v, tile.bn))
    tma, reads, writes = _descriptors(problem, tile, keys, ((dq, tile.bm),), add)
    project = projection.KINDS[KNOWN[problem.stabilizer].projection]
    positional = (
        q, dout, *reads, *writes, k if project else None, excess, top, best, lse, delta, lo,
        *small,
        *(s for x in (q, k, v, dout, dq) for s in strides(x, problem.layout)),
        *_row_strides(problem, lse),
    )  # fmt: skip
    named = _backward_arguments(problem, extras, tile) | {
        "tiles": tiles, "ADD": add, "TMA": tma,
        "EVEN": not problem.varlen and problem.sk % tile.bn == 0,
        "HEAD_BLOCK": configs.head_block(problem, tiles * problem.group),
        "PROJECT": project, "TARGET": delta.dim() == lse.dim(),
    }  # fmt: skip
    return (tiles * problem.heads, problem.batch), positional, named


def _row_strides(problem: Problem, lse: torch.Tensor) -> tuple[int, int]:
    """Batch and head strides of a plane of LSE, of which a projecting stabilizer has two."""
    steps = lse.stride()[problem.planes > 1 :]
    return (0, steps[0]) if problem.varlen else (steps[0], steps[1])


def _backward_arguments(problem: Problem, extras: Extras, tile: configs.Tile) -> dict[str, object]:
    return common_arguments(problem, extras) | {
        "keep_scale": 1.0 / (1.0 - problem.dropout_p), "scale": problem.scale,
        "PAPER": KNOWN[problem.stabilizer].paper,
        "PLANES": problem.planes > 1, "SPLIT": problem.backward == "own_x2",
        "BM": tile.bm, "BN": tile.bn, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


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
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV), with the shapes of q, k, v and in their layout, in q's dtype.

    Args:
        lse, delta: float32 [b, h, sq] or [h, tq]; delta is D' = delta - dLSE. Of a projecting
            stabilizer what `results` and `preprocess` say; its delta is corrected in place.
        accumulators: float32 (dQ, dK, dV) to add to and return instead of new tensors.
        gradients: what to write to and return, from `results.new_gradients`; None makes them.
        kept: of a projecting stabilizer under chunks: (row sums of dS so far and largest P, with
            LSE's strides; keys of those P, with dQ's), `chunks.ProjectedRows`.
    """
    add = accumulators is not None
    dq, dk, dv = accumulators or gradients or new_gradients(problem, q, k, v)[1]
    if problem.batch == 0:
        return dq, dk, dv
    two = problem.backward == "own_x2"
    project = KNOWN[problem.stabilizer].projection
    lo = torch.empty_like(lse if two else lse[0]) if project else None
    tensors = (q, k, v, dout, lse, delta, lo)
    passes = ["dkdv"] * bool(k.numel() and problem.heads) + ["dq"] * bool(q.numel())
    if project:
        passes.reverse()  # dQ corrects the delta that dK is made with
    for which in passes:
        tile = configs.lookup(which, problem, q.device)
        if which == "dkdv":
            if two:  # the rests of P and dS take registers
                half = "bn" if tile.bm == tile.bn and tile.warps > 4 else "bm"
                tile = replace(tile, **{half: max(getattr(tile, half) // 2, 16)})
            launch_dkdv(problem, tensors, dk, dv, extras=extras, tile=tile, add=add)
            continue
        if project == "mean":
            # P K takes as many registers as dQ.
            tile = replace(tile, bm=max(tile.bm // 2, min(tile.bm, 64)))
        launch_dq(problem, tensors, dq, extras=extras, tile=tile, add=add, kept=kept)
    return dq, dk, dv

"""Backward INT8 attention: dQ by query tile, then (dK, dV) by key tile; dP = dO V^T in 16 bits.

Shape legend: as in `int8.forward`; sdo are dO's scales, kt, qt and dot codes of K, Q and dO as
`quantise.turned` stores them, v and dO 16-bit in the problem's layout, delta [B, H, S] float32.
Every gradient tile is owned by one program: repeats are bitwise equal. The dQ pass may correct
delta (projection), so it runs first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stable_attention.int8 import bundles as int8_bundles
from stable_attention.int8.forward import NO_SPECIALIZE, block_bias
from stable_attention.int8.quantise import first_block, inverse_of, load_block, nearest
from stable_attention.triton import bundles
from stable_attention.triton.geometry import (
    edge_tile,
    hide,
    key_range,
    locate,
    query_range,
    tile_and_head,
    visible_transposed,
)
from stable_attention.triton.memory import load_tile, store_tile, tile_offsets


@triton.jit
def _largest(x, ROW: tl.constexpr):
    """Largest magnitude of each row of a tile x [M, N] as [M]; not ROW: of the tile, in each."""
    found = tl.max(tl.abs(x), 1)
    if not ROW:
        found = tl.max(found, 0) + found * 0.0
    return found


@triton.jit
def _dq_step(dq, pk, excess, error, queries, keys, n, mask, MASKED: tl.constexpr, T: tl.constexpr):
    """Add the key tile that starts at n."""
    k8 = load_tile(keys.k_ptr, keys.off_k, n, T.D, mask.length, T.BN, T.D, T.D, MASKED)
    scale_k = tl.load(keys.k_scale + n)
    s = tl.dot(queries.codes, tl.trans(k8), out_dtype=tl.int32).to(tl.float32)
    s = s * (queries.unit_q * scale_k)[:, None]
    if T.SMOOTH_Q:
        s += (block_bias(k8, queries.mu) * (scale_k * queries.unit))[None, :]
    p = tl.exp2(s - queries.lse[:, None])
    if MASKED:
        rows = mask.first + tl.arange(0, T.BM)
        cols = n + tl.arange(0, T.BN)
        p = hide(p, rows[:, None], cols[None, :], mask, 0.0, T)
    v = load_tile(keys.v_ptr, keys.off_v, n, keys.stride_v, mask.length, T.BN, T.D, T.D, MASKED)
    # [BM, D] @ [D, BN]
    dp = tl.dot(queries.do, tl.trans(v))
    ds = p * (dp - queries.delta[:, None])
    # No clamp: |dS| * (127 / largest) exceeds 127 by its own rounding at most.
    up, down = inverse_of(_largest(ds, T.ROW) + queries.bad)
    ds8 = nearest(ds * up[:, None])
    # [BM, BN] @ [BN, D], exact within the tile
    turned = load_block(keys.turned_ptr, n // T.BN, T.BN, T.D)
    part = tl.dot(ds8, turned, out_dtype=tl.int32).to(tl.float32)
    dq += part * (down * scale_k)[:, None]
    if T.PROJECT:
        excess += tl.sum(ds8.to(tl.int32), 1).to(tl.float32) * down
        error += tl.sum(ds, 1)
        # INT8 codes are exact in 16 bits.
        pk = tl.dot((p * scale_k).to(queries.do.dtype), k8.to(queries.do.dtype), pk)
    return dq, pk, excess, error


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def dq_kernel(
    q8_ptr, k8_ptr, kt_ptr, sq_ptr, sk_ptr, mu_ptr, v_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr,
    cu_q_ptr, cu_k_ptr, start_q_ptr, start_k_ptr,
    stride_vb, stride_vs, stride_vh, stride_gb, stride_gs, stride_gh,
    stride_dqb, stride_dqs, stride_dqh, stride_qb, stride_qh, stride_kb, stride_kh,
    sq, sk, tq, tk, heads, tiles, blocks, total, left, right, unit, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EVEN: tl.constexpr,
    SMOOTH_Q: tl.constexpr, ROW: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    tile, h = tile_and_head(tl.program_id(0), tiles, heads, 1, HAS_RIGHT)
    b = tl.program_id(1)
    block_k = first_block(cu_k_ptr, b, tk, sk, total, BN, VARLEN)
    start_q, sq = locate(cu_q_ptr, start_q_ptr, b, tq, sq, VARLEN)
    start_k, sk = locate(cu_k_ptr, start_k_ptr, b, tk, sk, VARLEN)
    m0 = tile * BM
    if m0 >= sq:
        return
    shift = sk - sq
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    row_q = b64 * stride_qb + h64 * stride_qh + start_q
    row_k = b64 * stride_kb + (h64 // GROUP) * stride_kh + start_k
    kt_ptr += ((h64 // GROUP) * total + block_k) * (D * BN)
    v_ptr += b64 * stride_vb + (h64 // GROUP) * stride_vh + start_k.to(tl.int64) * stride_vs
    do_ptr += b64 * stride_gb + h64 * stride_gh + start_q.to(tl.int64) * stride_gs
    rows = m0 + tl.arange(0, BM)
    row_ok = rows < sq
    off_k = tile_offsets(D, BN, D)
    off_v = tile_offsets(stride_vs, BN, D)
    q8 = load_tile(q8_ptr + row_q * D, tile_offsets(D, BM, D), m0, D, sq, BM, D, D, True)
    off_do = tile_offsets(stride_gs, BM, D)
    do = load_tile(do_ptr, off_do, m0, stride_gs, sq, BM, D, D, True)
    unit_q = tl.load(sq_ptr + row_q + rows, mask=row_ok, other=0.0) * unit
    lse = tl.load(lse_ptr + row_q + rows, mask=row_ok, other=-float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    delta = tl.load(delta_ptr + row_q + rows, mask=row_ok, other=0.0)
    # A maximum drops NaN: 0, or NaN where the row's delta is not finite.
    bad = delta - delta
    mu = tl.zeros([D], tl.float32)
    if SMOOTH_Q:
        mu = tl.load(mu_ptr + ((b64 * heads + h) * blocks + tile) * D + tl.arange(0, D))
    dq = tl.zeros([BM, D], tl.float32)
    pk = tl.zeros([BM, D], tl.float32) if PROJECT else 0
    excess = tl.zeros([BM], tl.float32)
    error = tl.zeros([BM], tl.float32)
    lo, full_lo, full_hi, hi = key_range(
        m0, sq, sk, shift, left, right, BM, BN, HAS_LEFT, HAS_RIGHT
    )
    T: tl.constexpr = int8_bundles.Traits(
        BM, BN, D, HAS_LEFT, HAS_RIGHT, SMOOTH_Q, ROW=ROW, PROJECT=PROJECT
    )
    queries = int8_bundles.DqQueries(q8, do, unit_q, mu, unit, lse, delta, bad)
    mask = bundles.Mask(m0, sk, shift, left, right)
    if HAS_LEFT or HAS_RIGHT or not EVEN:
        for t in range(0, (full_lo - lo + hi - full_hi) // BN):
            keys = int8_bundles.DqKeys(
                k8_ptr + row_k * D, kt_ptr, v_ptr, sk_ptr + row_k, off_k, off_v, stride_vs
            )
            n = edge_tile(t, lo, full_lo, full_hi, BN)
            dq, pk, excess, error = _dq_step(dq, pk, excess, error, queries, keys, n, mask, True, T)
    for t in range(0, (full_hi - full_lo) // BN):
        keys = int8_bundles.DqKeys(
            k8_ptr + row_k * D, kt_ptr, v_ptr, sk_ptr + row_k, off_k, off_v, stride_vs
        )
        n = full_lo + t * BN
        dq, pk, excess, error = _dq_step(dq, pk, excess, error, queries, keys, n, mask, False, T)
    if PROJECT:
        # P sums to one: P K is the mean along which an error of delta shows in dQ.
        dq -= excess[:, None] * pk
        tl.store(delta_ptr + row_q + rows, delta + error, mask=row_ok)
    dq_ptr += b64 * stride_dqb + h64 * stride_dqh + start_q.to(tl.int64) * stride_dqs
    store_tile(dq_ptr, dq * scale, m0, stride_dqs, sq, BM, D, D)


@triton.jit
def _dkdv_step(dk, dv, keys, queries, m0, mask, MASKED: tl.constexpr, T: tl.constexpr):
    """Add the query tile that starts at m0. Scores are transposed: [BN, BM]."""
    q_ptr = queries.q_ptr + queries.row * T.D
    qt_ptr = queries.turned_ptr + queries.block
    dot_ptr = queries.do_turned_ptr + queries.block
    q_scale = queries.q_scale + queries.row
    do_scale = queries.do_scale + queries.row
    lse_ptr = queries.lse_ptr + queries.row
    delta_ptr = queries.delta_ptr + queries.row
    rows = m0 + tl.arange(0, T.BM)
    ok = rows < mask.length
    q8 = load_tile(q_ptr, queries.off_q, m0, T.D, mask.length, T.BM, T.D, T.D, MASKED)
    scale_q = tl.load(q_scale + m0)
    s = tl.dot(keys.codes, tl.trans(q8), out_dtype=tl.int32).to(tl.float32)
    s = s * (keys.scale * (scale_q * keys.unit))[:, None]
    mu = tl.zeros([T.D], tl.float32)
    if T.SMOOTH_Q:
        mu = tl.load(queries.mu_ptr + (m0 // T.BM) * T.D + tl.arange(0, T.D))
        s += (block_bias(keys.codes, mu) * keys.scale * keys.unit)[:, None]
    lse = tl.load(lse_ptr + rows, mask=ok, other=-float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    p = tl.exp2(s - lse[None, :])
    if MASKED:
        cols = mask.first + tl.arange(0, T.BN)
        seen = visible_transposed(
            rows[None, :], cols[:, None], mask.shift, mask.left, mask.right, T.HAS_LEFT, T.HAS_RIGHT
        )
        if not T.ROW:
            # Keys past the sequence must not decide the scale of a tile.
            seen = seen & (cols < keys.length)[:, None]
        p = tl.where(seen, p, 0.0)
    up, down = inverse_of(_largest(p, T.ROW))
    p8 = nearest(p * up[:, None])
    do8 = load_block(dot_ptr, m0 // T.BM, T.BM, T.D)
    # [BN, BM] @ [BM, D], exact within the tile
    part = tl.dot(p8, do8, out_dtype=tl.int32).to(tl.float32)
    dv += part * (down * tl.load(do_scale + m0))[:, None]
    do = load_tile(
        queries.do_ptr, queries.off_do, m0, queries.stride_do, mask.length, T.BM, T.D, T.D, MASKED
    )
    delta = tl.load(delta_ptr + rows, mask=ok, other=0.0)
    # [BN, D] @ [D, BM]
    dp = tl.dot(keys.v, tl.trans(do))
    ds = p * (dp - delta[None, :])
    # A maximum drops NaN: 0, or NaN where the delta of a row is not finite.
    up, down = inverse_of(_largest(ds, T.ROW) + tl.sum(delta - delta, 0))
    ds8 = nearest(ds * up[:, None])
    turned = load_block(qt_ptr, m0 // T.BM, T.BM, T.D)
    part = tl.dot(ds8, turned, out_dtype=tl.int32).to(tl.float32)
    dk += part * (down * scale_q)[:, None]
    if T.SMOOTH_Q:
        dk += (tl.sum(ds8.to(tl.int32), 1).to(tl.float32) * down)[:, None] * mu[None, :]
    return dk, dv


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def dkdv_kernel(
    q8_ptr, qt_ptr, k8_ptr, dot_ptr, sq_ptr, sk_ptr, sdo_ptr, mu_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr,
    lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, start_q_ptr, start_k_ptr,
    stride_vb, stride_vs, stride_vh, stride_gb, stride_gs, stride_gh,
    stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    stride_qb, stride_qh, stride_kb, stride_kh,
    sq, sk, tq, tk, heads, tiles, blocks, total, left, right, unit, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EVEN: tl.constexpr,
    SMOOTH_Q: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    tile, hk = tile_and_head(tl.program_id(0), tiles, heads // GROUP, 1, False)
    b = tl.program_id(1)
    block_q = first_block(cu_q_ptr, b, tq, sq, total, BM, VARLEN)
    start_q, sq = locate(cu_q_ptr, start_q_ptr, b, tq, sq, VARLEN)
    start_k, sk = locate(cu_k_ptr, start_k_ptr, b, tk, sk, VARLEN)
    n0 = tile * BN
    if n0 >= sk:
        return
    shift = sk - sq
    b64 = b.to(tl.int64)
    hk64 = hk.to(tl.int64)
    row_k = b64 * stride_kb + hk64 * stride_kh + start_k
    token_k = start_k.to(tl.int64)
    cols = n0 + tl.arange(0, BN)
    k8 = load_tile(k8_ptr + row_k * D, tile_offsets(D, BN, D), n0, D, sk, BN, D, D, True)
    v_ptr += b64 * stride_vb + hk64 * stride_vh + token_k * stride_vs
    v = load_tile(v_ptr, tile_offsets(stride_vs, BN, D), n0, stride_vs, sk, BN, D, D, True)
    scale_k = tl.load(sk_ptr + row_k + cols, mask=cols < sk, other=0.0)
    off_q = tile_offsets(D, BM, D)
    off_do = tile_offsets(stride_gs, BM, D)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    lo, full_lo, full_hi, hi = query_range(
        n0, sq, sk, shift, left, right, BM, BN, HAS_LEFT, HAS_RIGHT
    )
    T: tl.constexpr = int8_bundles.Traits(BM, BN, D, HAS_LEFT, HAS_RIGHT, SMOOTH_Q, ROW=ROW)
    keys = int8_bundles.DkdvKeys(k8, v, scale_k, unit, sk)
    mask = bundles.Mask(n0, sq, shift, left, right)
    for g in range(0, GROUP):
        h64 = hk64 * GROUP + g
        row_q = b64 * stride_qb + h64 * stride_qh + start_q
        do_h = do_ptr + b64 * stride_gb + h64 * stride_gh + start_q.to(tl.int64) * stride_gs
        turned = (h64 * total + block_q) * (D * BM)
        mu_h = mu_ptr + (b64 * heads + h64) * blocks * D if SMOOTH_Q else mu_ptr
        queries = int8_bundles.DkdvQueries(
            q8_ptr, qt_ptr, do_h, dot_ptr, sq_ptr, sdo_ptr, mu_h, lse_ptr, delta_ptr,
            row_q, turned, off_q, off_do, stride_gs,
        )  # fmt: skip
        if HAS_LEFT or HAS_RIGHT or not EVEN:
            for t in range(0, (full_lo - lo + hi - full_hi) // BM):
                m0 = edge_tile(t, lo, full_lo, full_hi, BM)
                dk, dv = _dkdv_step(dk, dv, keys, queries, m0, mask, True, T)
        for t in range(0, (full_hi - full_lo) // BM):
            dk, dv = _dkdv_step(dk, dv, keys, queries, full_lo + t * BM, mask, False, T)
    dk_ptr += b64 * stride_dkb + hk64 * stride_dkh + token_k * stride_dks
    dv_ptr += b64 * stride_dvb + hk64 * stride_dvh + token_k * stride_dvs
    store_tile(dk_ptr, dk * scale, n0, stride_dks, sk, BN, D, D)
    store_tile(dv_ptr, dv, n0, stride_dvs, sk, BN, D, D)

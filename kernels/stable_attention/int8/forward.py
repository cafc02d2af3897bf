"""Forward INT8 attention: S = Q K^T and O = P V as integer products.

Shape legend: BM query rows, BN = BLOCK keys of a tile, D head dim. q8 and k8 are codes
[B, H, S, D] (packed [H, T, D]), v8 codes as `quantise.turned` stores them, sq, sk, sv the scales,
laid out like LSE. LSE is in log2 units
and of the smoothed scores: the backward's alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stable_attention.int8 import bundles as int8_bundles
from stable_attention.int8.quantise import LEAST, MAGIC, TOP, first_block, load_block
from stable_attention.numerics import inverse
from stable_attention.triton import bundles
from stable_attention.triton.geometry import edge_tile, hide, key_range, locate, tile_and_head
from stable_attention.triton.memory import load_tile, store_tile, tile_offsets

NO_SPECIALIZE = (
    "sq", "sk", "tq", "tk", "heads", "tiles", "blocks", "total", "left", "right",
    "stride_qb", "stride_qh", "stride_kb", "stride_kh",
)  # fmt: skip


@triton.jit
def block_bias(k8, mu):
    """k8 [BN, D] times the mean mu [D] of a block of queries, float32 [BN]."""
    return tl.sum(k8.to(tl.float32) * mu[None, :], 1)


@triton.jit
def _step(acc, m, l, l_rounded, queries, keys, n, mask, MASKED: tl.constexpr, T: tl.constexpr):
    """Fold the key tile that starts at n into (acc, m, l, l_rounded)."""
    k8 = load_tile(keys.k_ptr, keys.offsets, n, T.D, mask.length, T.BN, T.D, T.D, MASKED)
    scale_k = tl.load(keys.k_scale + n)
    # [BM, D] @ [D, BN], exact
    s = tl.dot(queries.codes, tl.trans(k8), out_dtype=tl.int32).to(tl.float32)
    s = s * (queries.unit_q * scale_k)[:, None]
    if T.SMOOTH_Q:
        s += (block_bias(k8, queries.mu) * (scale_k * queries.unit))[None, :]
    if MASKED:
        rows = mask.first + tl.arange(0, T.BM)
        cols = n + tl.arange(0, T.BN)
        s = hide(s, rows[:, None], cols[None, :], mask, -float("inf"), T)
    tile_max = tl.max(s, 1)
    m_new = tl.maximum(m, tile_max)
    base = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(m - base)
    # The largest P of the row in this tile is code 127. What lies below 2^-100 adds nothing.
    top = tl.exp2(tile_max - base)
    # Both conditions let NaN pass: O divides by 0 where the sum is NaN, and would be 0.
    top = tl.where(top < LEAST, 0.0, top)
    up = tl.where(top == 0, 0.0, tl.div_rn(TOP, tl.where(top == 0, 1.0, top)))
    magic = p * up[:, None] + MAGIC
    p8 = magic.to(tl.int32, bitcast=True).to(tl.int8)
    weight = tl.div_rn(top, TOP)
    l = l * alpha + tl.sum(p, 1)
    if T.ROUNDED:
        l_rounded = l_rounded * alpha + tl.sum(magic - MAGIC, 1) * weight
    v8 = load_block(keys.v_ptr, n // T.BN, T.BN, T.D)
    # [BM, BN] @ [BN, D], exact within the tile
    part = tl.dot(p8, v8, out_dtype=tl.int32).to(tl.float32)
    acc = acc * alpha[:, None] + part * (weight * tl.load(keys.v_scale + n))[:, None]
    return acc, m_new, l, l_rounded


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def forward_kernel(
    q8_ptr, k8_ptr, v8_ptr, sq_ptr, sk_ptr, sv_ptr, mu_ptr, o_ptr, lse_ptr,
    cu_q_ptr, cu_k_ptr, start_q_ptr, start_k_ptr,
    stride_ob, stride_os, stride_oh, stride_qb, stride_qh, stride_kb, stride_kh,
    sq, sk, tq, tk, heads, tiles, blocks, total, left, right, unit,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EVEN: tl.constexpr,
    SMOOTH_Q: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    tile, h = tile_and_head(tl.program_id(0), tiles, heads, 1, HAS_RIGHT)
    b = tl.program_id(1)
    block_v = first_block(cu_k_ptr, b, tk, sk, total, BN, VARLEN)
    start_q, sq = locate(cu_q_ptr, start_q_ptr, b, tq, sq, VARLEN)
    start_k, sk = locate(cu_k_ptr, start_k_ptr, b, tk, sk, VARLEN)
    m0 = tile * BM
    if m0 >= sq:
        return
    shift = sk - sq
    b64 = b.to(tl.int64)
    row_q = b64 * stride_qb + h.to(tl.int64) * stride_qh + start_q
    row_k = b64 * stride_kb + (h // GROUP).to(tl.int64) * stride_kh + start_k
    rows = m0 + tl.arange(0, BM)
    row_ok = rows < sq
    off = tile_offsets(D, BN, D)
    v_h = v8_ptr + ((h // GROUP).to(tl.int64) * total + block_v) * (D * BN)
    q8 = load_tile(q8_ptr + row_q * D, tile_offsets(D, BM, D), m0, D, sq, BM, D, D, True)
    unit_q = tl.load(sq_ptr + row_q + rows, mask=row_ok, other=0.0) * unit
    mu = tl.zeros([D], tl.float32)
    if SMOOTH_Q:
        mu = tl.load(mu_ptr + ((b64 * heads + h) * blocks + tile) * D + tl.arange(0, D))
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    l_rounded = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    lo, full_lo, full_hi, hi = key_range(
        m0, sq, sk, shift, left, right, BM, BN, HAS_LEFT, HAS_RIGHT
    )
    T: tl.constexpr = int8_bundles.Traits(BM, BN, D, HAS_LEFT, HAS_RIGHT, SMOOTH_Q, ROUNDED)
    queries = int8_bundles.ForwardQueries(q8, unit_q, mu, unit)
    mask = bundles.Mask(m0, sk, shift, left, right)
    if HAS_LEFT or HAS_RIGHT or not EVEN:
        for t in range(0, (full_lo - lo + hi - full_hi) // BN):
            keys = int8_bundles.ForwardKeys(
                k8_ptr + row_k * D, v_h, sk_ptr + row_k, sv_ptr + row_k, off
            )
            n = edge_tile(t, lo, full_lo, full_hi, BN)
            acc, m, l, l_rounded = _step(acc, m, l, l_rounded, queries, keys, n, mask, True, T)
    for t in range(0, (full_hi - full_lo) // BN):
        keys = int8_bundles.ForwardKeys(
            k8_ptr + row_k * D, v_h, sk_ptr + row_k, sv_ptr + row_k, off
        )
        n = full_lo + t * BN
        acc, m, l, l_rounded = _step(acc, m, l, l_rounded, queries, keys, n, mask, False, T)
    tl.store(
        lse_ptr + row_q + rows,
        tl.where(l > 0, m + tl.log2(tl.where(l > 0, l, 1.0)), -float("inf")),
        mask=row_ok,
    )
    acc = acc * inverse(l_rounded if ROUNDED else l)[:, None]
    o_ptr += b64 * stride_ob + h.to(tl.int64) * stride_oh + start_q.to(tl.int64) * stride_os
    store_tile(o_ptr, acc, m0, stride_os, sq, BM, D, D)

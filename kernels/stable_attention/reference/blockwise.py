"""Attention in float32, a block of keys at a time, for CPU and GPU training and as a baseline.

Never holds more than one tile of scores. The backward recomputes P from the stored LSE and takes
delta = rowsum(dO * O) from the float32 O, so neither of the two roundings that bias a BF16 kernel
(docs/numerics.md) occurs. Loops run in a fixed order: results repeat bit for bit.

Shapes: q [b, sq, hq, d], k [b, sk, hk, d], v [b, sk, hk, dv] in ``layout``; inside, q is
[b, hk, g, rows, d], k and v [b, hk, 1, columns, d], scores [b, hk, g, rows, columns].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stable_attention.once import once_differentiable
from stable_attention.reference import dropout
from stable_attention.reference.geometry import (
    Window,
    allowed,
    bounds,
    check_layout,
    from_bhsd,
    head_group,
    key_range,
    sequences,
    to_bhsd,
)

TILE_BYTES = 32 << 20  # scores of one tile; a few such buffers live at a time


@dataclass(frozen=True)
class Rules:
    """Everything but the tensors."""

    layout: str
    reach: tuple[int | None, int | None]
    scale: float
    softcap: float
    dropout_p: float
    dropout_seed: int
    batch_offset: int
    head_offset: int
    compute: torch.dtype


class At(NamedTuple):
    """Which rows and keys these are."""

    batch: int
    shift: int
    """Position of row 0 less that of key 0."""
    row: int = 0
    """Index of row 0 for the dropout mask, which is keyed by global indices."""
    column: int = 0


def _tiles(s: torch.Size, shift: int, rules: Rules) -> list[tuple[slice, list[slice]]]:
    """Row blocks of queries, each with the column blocks of keys it can see, of scores ``s``."""
    batch_heads, sq, sk = s[:3].numel(), s[3], s[4]
    side = math.isqrt(TILE_BYTES // (rules.compute.itemsize * max(1, batch_heads)))
    side = max(64, min(1024, side // 64 * 64))
    out = []
    for first in range(0, sq, side):
        last = min(sq, first + side)
        low, high = key_range(first, last, shift=shift, sk=sk, reach=rules.reach)
        columns = [slice(c, min(high, c + side)) for c in range(low, high, side)]
        out.append((slice(first, last), columns))
    return out


def _scores(
    q: torch.Tensor, k: torch.Tensor, rows: slice, columns: slice, rules: Rules, shift: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled, capped, masked scores of one tile, and d(capped)/d(uncapped) where there is a cap."""
    s = torch.matmul(q[..., rows, :], k[..., columns, :].transpose(-1, -2)) * rules.scale
    slope = None
    if rules.softcap:
        bent = torch.tanh(s / rules.softcap)
        s, slope = bent * rules.softcap, 1 - bent * bent
    i = torch.arange(rows.start, rows.stop, device=q.device)
    j = torch.arange(columns.start, columns.stop, device=q.device)
    ok = allowed(i, j, shift=shift, reach=rules.reach)
    if ok is not None:
        s = s.masked_fill(~ok, -math.inf)
    return s, slope


def _kept(s: torch.Tensor, rules: Rules, at: At, rows: slice, columns: slice) -> torch.Tensor:
    """Dropout factors of a tile, keyed by global positions: 0 or 1 / (1 - p)."""
    b, hk, g = s.shape[:3]
    keep = dropout.keep_mask(
        rules.dropout_seed,
        rules.dropout_p,
        batches=torch.arange(b, device=s.device) + at.batch + rules.batch_offset,
        heads=torch.arange(hk * g, device=s.device) + rules.head_offset,
        rows=torch.arange(rows.start, rows.stop, device=s.device) + at.row,
        columns=torch.arange(columns.start, columns.stop, device=s.device) + at.column,
    )
    return keep.view(s.shape).to(s.dtype) / (1 - rules.dropout_p)


def forward_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    rules: Rules,
    at: At,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """O, LSE and per-head maximum logit of sequences [b, hk, g, sq, d]."""
    b, hk, g, sq = q.shape[:4]
    sk = k.shape[-2]
    out = q.new_zeros(b, hk, g, sq, v.shape[-1])
    lse = q.new_full((b, hk, g, sq), -math.inf)
    top = q.new_full((hk, g), -math.inf)
    for rows, blocks in _tiles(torch.Size((b, hk, g, sq, sk)), at.shift, rules):
        m, l, acc = lse[..., rows].clone(), torch.zeros_like(lse[..., rows]), out[..., rows, :]
        for columns in blocks:
            s, _ = _scores(q, k, rows, columns, rules, at.shift)
            m_new = torch.maximum(m, s.amax(-1))
            # A row that has seen no key yet has m = -inf: shift by 0, its exponentials stay 0.
            shift = m_new.masked_fill(m_new == -math.inf, 0.0)
            p = torch.exp(s - shift[..., None])
            fade = torch.exp(m - shift)
            l = l * fade + p.sum(-1)
            if rules.dropout_p:
                p = p * _kept(s, rules, at, rows, columns)
            acc = acc * fade[..., None] + torch.matmul(p, v[..., columns, :])
            m = m_new
        if b and rows.stop > rows.start:
            top = torch.maximum(top, m.amax((0, 3)))
        if sink is not None:
            m_new = torch.maximum(m, sink[:, :, None].expand_as(m))
            shift = m_new.masked_fill(m_new == -math.inf, 0.0)
            fade = torch.exp(m - shift)
            l, acc = l * fade + torch.exp(sink[:, :, None] - shift), acc * fade[..., None]
            m = m_new
        empty = l == 0
        out[..., rows, :] = acc / l.masked_fill(empty, 1.0)[..., None]
        lse[..., rows] = (m + torch.log(l)).masked_fill(empty, -math.inf)
    return out, lse, top


def backward_one(
    tensors: tuple[torch.Tensor, ...], sums: tuple[torch.Tensor, ...], rules: Rules, at: At
) -> None:
    """Add to ``sums`` = dQ, dK, dV of sequences; ``tensors`` = q, k, v, dO, LSE, delta."""
    q, k, v, dout, lse, delta = tensors
    dq, dk, dv = sums
    # exp(s - lse) with lse = -inf belongs to rows without keys: s = -inf too, and P must be 0.
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    for rows, blocks in _tiles(q.shape[:4] + k.shape[-2:-1], at.shift, rules):
        do_rows, q_rows = dout[..., rows, :], q[..., rows, :]
        for columns in blocks:
            s, slope = _scores(q, k, rows, columns, rules, at.shift)
            p = torch.exp(s - lse[..., rows, None])
            dp = torch.matmul(do_rows, v[..., columns, :].transpose(-1, -2))
            used = p
            if rules.dropout_p:
                kept = _kept(s, rules, at, rows, columns)
                used, dp = p * kept, dp * kept
            ds = p * (dp - delta[..., rows, None])
            if slope is not None:
                ds = ds * slope
            ds = ds * rules.scale
            dq[..., rows, :] += torch.matmul(ds, k[..., columns, :])
            dk[..., columns, :] += torch.matmul(ds.transpose(-1, -2), q_rows).sum(2, keepdim=True)
            dv[..., columns, :] += torch.matmul(used.transpose(-1, -2), do_rows).sum(
                2, keepdim=True
            )


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        cu_seqlens: tuple[torch.Tensor | None, ...],
        rules: Rules,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            q5, k5, v5 = five_dims(rules, q, k, v)
            hk, g, sq = q5.shape[1:4]
            sink2 = None if sink is None else sink.to(rules.compute).view(hk, g)
            out = q5.new_zeros(*q5.shape[:4], v5.shape[-1])
            lse = q5.new_full(q5.shape[:4], -math.inf)
            top = q5.new_full((hk, g), -math.inf)
            for batch, rows, keys in sequences(sq, k5.shape[3], *cu_seqlens):
                inputs = q5[..., rows, :], k5[..., keys, :], v5[..., keys, :]
                part = forward_one(*inputs, sink2, rules, _at(batch, rows, keys))
                out[..., rows, :], lse[..., rows] = part[0], part[1]
                top = torch.maximum(top, part[2])
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.cu_seqlens, ctx.rules = cu_seqlens, rules
        high = from_bhsd(out.flatten(1, 2), rules.layout).to(q.dtype)
        if high.data_ptr() == out.data_ptr():  # an output that shares memory stands no +=
            high = high.clone()
        sums = lse.flatten(1, 2)
        top = top.flatten()
        ctx.mark_non_differentiable(top)
        ctx.set_materialize_grads(True)
        return high, (sums[0] if rules.layout == "thd" else sums).clone(), top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor, _top: torch.Tensor) -> Any:
        q, k, v, sink, out, lse = ctx.saved_tensors
        rules: Rules = ctx.rules
        with torch.autocast(q.device.type, enabled=False):
            q5, k5, v5 = five_dims(rules, q, k, v)
            do5 = to_bhsd(dout, rules.layout).to(rules.compute).view_as(out)
            # dLSE enters exactly like -delta: d LSE / d S = P.
            delta = (do5 * out).sum(-1) - dlse.to(rules.compute).reshape(lse.shape)
            # Rows without keys: P is 0, but 0 times the infinite dLSE of an infinite LSE is not.
            delta = delta.masked_fill(lse == -math.inf, 0.0)
            dq, dk, dv = torch.zeros_like(q5), torch.zeros_like(k5), torch.zeros_like(v5)
            for batch, rows, keys in sequences(q5.shape[3], k5.shape[3], *ctx.cu_seqlens):
                inputs = (q5[..., rows, :], k5[..., keys, :], v5[..., keys, :])
                given = (do5[..., rows, :], lse[..., rows], delta[..., rows])
                sums = (dq[..., rows, :], dk[..., keys, :], dv[..., keys, :])
                backward_one(inputs + given, sums, rules, _at(batch, rows, keys))
            dsink = None
            if sink is not None and ctx.needs_input_grad[3]:
                weight = torch.exp(sink.to(rules.compute).view(1, *lse.shape[1:3], 1) - lse)
                weight = weight.masked_fill(lse == -math.inf, 0.0)
                dsink = -(weight * delta).sum((0, 3)).view(sink.shape).to(sink.dtype)
        grads = [
            from_bhsd(x.flatten(1, 2), rules.layout).to(like.dtype)
            for x, like in ((dq, q), (dk, k), (dv, v))
        ]
        return (*grads, dsink, None, None)


def five_dims(rules: Rules, q: torch.Tensor, *kv: torch.Tensor) -> list[torch.Tensor]:
    """Views of q as [b, hk, g, sq, d] and of k, v as [b, hk, 1, sk, d], of compute type."""
    q4, *rest = (to_bhsd(x, rules.layout).to(rules.compute) for x in (q, *kv))
    hk = rest[0].shape[1]
    return [q4.unflatten(1, (hk, head_group(q4.shape[1], hk))), *(x.unsqueeze(2) for x in rest)]


def _at(batch: int, rows: slice, keys: slice) -> At:
    """A whole sequence: the last query sees what the last key is (bottom-right alignment)."""
    return At(batch, (keys.stop - keys.start) - (rows.stop - rows.start))


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    sinks: str | torch.Tensor | None = None,
    softcap: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    batch_offset: int = 0,
    head_offset: int = 0,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """softmax(scale * Q K^T + mask) V in float32 (float64 for float64 inputs), differentiable.

    Arguments mean what they mean for ``stable_attention``: ``layout`` one of bshd, sbhd, bhsd, thd
    (thd with ``cu_seqlens_q``/``cu_seqlens_k``, int32 [sequences + 1]); ``causal`` and ``window`` =
    (left, right) are bottom-right aligned, None or -1 leaves a side open; ``sinks`` None,
    "off-by-one" or a tensor [hq] of logits that join the softmax without a value; dropout draws
    from Philox keyed by ``dropout_seed`` and global positions (``batch_offset`` and
    ``head_offset`` say where this rank's batch and heads begin); ``cu_seqlens_*_padded`` say where
    each sequence starts in memory when there are gaps between sequences.

    Returns O in q's dtype and ``layout``; with ``return_lse`` also the natural-log sum of
    exponentials (sink included), float32 [b, hq, sq] or [hq, t], -inf for rows without keys; with
    ``return_max_logits`` also the largest score of each head, float32 [hq], not differentiable.
    Rows that see no key give O = 0 and zero gradients.
    """
    check_layout(layout, (q, k, v), (cu_seqlens_q, cu_seqlens_k))
    if dropout_p and dropout_seed is None:
        raise ValueError(
            f"dropout_p={dropout_p} needs dropout_seed (an int): masks are keyed by it"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p}: use a probability in [0, 1)")
    q_heads = q.shape[1] if layout == "bhsd" else q.shape[-2]
    sink = sinks if isinstance(sinks, torch.Tensor) else None
    if sink is None and sinks is not None:
        if sinks != "off-by-one":
            raise ValueError(f'sinks={sinks!r}: use None, "off-by-one" or a tensor [{q_heads}]')
        sink = q.new_zeros(q_heads, dtype=torch.float32)
    if sink is not None and sink.numel() != q_heads:
        raise ValueError(f"sinks has {sink.numel()} logits, one per query head needed: {q_heads}")
    rules = Rules(
        layout=layout,
        reach=bounds(causal, window),
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        dropout_seed=0 if dropout_seed is None else int(dropout_seed),
        batch_offset=batch_offset,
        head_offset=head_offset,
        compute=torch.float64 if q.dtype == torch.float64 else torch.float32,
    )
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded)
    out, lse, top = _Blockwise.apply(q, k, v, sink, cu_seqlens, rules)
    if not return_lse and not return_max_logits:
        return out
    return (out, *((lse,) if return_lse else ()), *((top,) if return_max_logits else ()))

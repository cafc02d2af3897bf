"""INT8 attention rounding by rounding in float32: the oracle of `stable_attention.int8`.

Codes are whole numbers in float32, whose products and sums are exact at these sizes (127 * 127
* 128 is below 2^24), so that integer products are those of the kernels bit for bit. Exponentials,
float32 sums and their order differ. Whole score matrices: short sequences.

Shapes: q [b, hk, g, sq, d], k and v [b, hk, 1, sk, d], scores [b, hk, g, sq, sk], where hk
key/value heads serve g query heads each; blocks of `BLOCK` tokens begin with the sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from stable_attention.int8.settings import BLOCK, CODES, DEFAULT, SMALLEST, Settings
from stable_attention.once import once_differentiable
from stable_attention.reference.geometry import (
    Window,
    allowed,
    bounds,
    check_layout,
    from_bhsd,
    head_group,
    sequences,
    to_bhsd,
)

LOG2E = 1.4426950408889634


def blocks_of(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x with ``dim`` (negative) split into [blocks, BLOCK], the last one filled with zeros."""
    pad = [0, 0] * -dim
    pad[-1] = -x.shape[dim] % BLOCK
    return F.pad(x, pad).unflatten(dim, (-1, BLOCK))


def codes_of(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale with ``dims`` kept) of x whose largest magnitude over ``dims`` is code 127."""
    largest = x.abs().amax(dims, keepdim=True).clamp_min(SMALLEST)
    # Not `CODES / largest`, which torch takes for a reciprocal and a product, each rounded.
    codes = torch.round(x * (torch.full_like(largest, CODES) / largest)).clamp(-CODES, CODES)
    return codes, largest / CODES


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [..., s, d], scale of each token [..., s]) of one scale a block of tokens."""
    codes, scale = codes_of(blocks_of(x, -2), (-1, -2))
    s = x.shape[-2]
    rows = scale.expand(*codes.shape[:-1], 1).flatten(-3, -2)[..., :s, 0]
    return codes.flatten(-3, -2)[..., :s, :], rows


def _tiled(x: torch.Tensor, axis: int, scales: str) -> torch.Tensor:
    """x [..., sq, sk] rounded to INT8 and back: a scale a tile, or a row along ``axis`` of one."""
    sq, sk = x.shape[-2:]
    tiles = blocks_of(blocks_of(x, -1), -3)  # [..., tq, BLOCK, tk, BLOCK]
    codes, scale = codes_of(tiles, (axis,) if scales == "row" else (-1, -3))
    return (codes * scale).flatten(-4, -3).flatten(-2, -1)[..., :sq, :sk]


@dataclass
class Operands:
    """What the forward keeps for the backward, of one sequence."""

    q8: torch.Tensor
    sq: torch.Tensor
    k8: torch.Tensor
    sk: torch.Tensor
    mu: torch.Tensor | None
    """Mean of each query's block, where Q is smoothed."""


def operands(q: torch.Tensor, k: torch.Tensor, settings: Settings) -> Operands:
    """Codes and scales of Q and K."""
    mu = None
    if settings.smooth_q:
        s = q.shape[-2]
        blocks = blocks_of(q, -2)
        left = torch.arange(blocks.shape[-3], device=q.device) * BLOCK
        count = (s - left).clamp(max=BLOCK).view(-1, 1, 1)
        mean = blocks.sum(-2, keepdim=True) / count
        mu = mean.expand_as(blocks).flatten(-3, -2)[..., :s, :]
        q = q - mu
    if settings.smooth_k:
        k = k - k.mean(-2, keepdim=True)
    return Operands(*quantise(q), *quantise(k), mu)


def scores(x: Operands, scale: float, ok: torch.Tensor | None) -> torch.Tensor:
    """Scores in log2 units, -inf where hidden."""
    unit = scale * LOG2E
    s = torch.matmul(x.q8, x.k8.mT) * ((x.sq * unit)[..., None] * x.sk[..., None, :])
    if x.mu is not None:
        s = s + torch.matmul(x.mu, x.k8.mT) * (x.sk[..., None, :] * unit)
    return s if ok is None else s.masked_fill(~ok, -math.inf)


def forward_one(
    s: torch.Tensor, v: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O float32, LSE in log2 units) of scores; P is rounded against its tile's row maximum."""
    v8, sv = quantise(v)
    pad = -s.shape[-1] % BLOCK
    tiles = F.pad(s, (0, pad), value=-math.inf).unflatten(-1, (-1, BLOCK))
    top = tiles.amax(-1, keepdim=True)
    m = top.amax(-2, keepdim=True)
    m0 = m.masked_fill(m == -math.inf, 0.0)
    p = torch.exp2(tiles - m0)
    weight = torch.exp2(top - m0)
    weight = torch.where(weight > SMALLEST, weight, 0.0)
    up = torch.full_like(weight, CODES) / weight
    codes = torch.round(p * torch.where(weight > 0, up, 0.0))
    rounded = (codes * (weight / CODES)).flatten(-2)[..., : s.shape[-1]]
    l = p.sum((-1, -2), keepdim=True)[..., 0]
    total = rounded.sum(-1, keepdim=True) if settings.normalizer == "rounded" else l
    out = torch.matmul(rounded, v8 * sv[..., None])
    out = out / total.masked_fill(total == 0, 1.0)
    lse = (m0[..., 0] + torch.log2(l)).masked_fill(l == 0, -math.inf)
    return out, lse[..., 0]


def backward_one(
    x: Operands,
    s: torch.Tensor,
    lse: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    settings: Settings,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) float32; dK and dV summed over the query heads of a group."""
    p = torch.exp2(s - lse.masked_fill(lse == -math.inf, math.inf)[..., None])
    dp = torch.matmul(dout, v.mT)
    ds = p * (dp - delta[..., None])
    k = x.k8 * x.sk[..., None]
    rounded = _tiled(ds, -1, settings.scales)
    dq = torch.matmul(rounded, k)
    if settings.projection:
        weights = (p * x.sk[..., None, :]).to(dtype).float()
        dq = dq - rounded.sum(-1, keepdim=True) * torch.matmul(weights, x.k8)
        ds = p * (dp - (delta + ds.sum(-1))[..., None])
    rounded = _tiled(ds, -3, settings.scales)
    dk = torch.matmul(rounded.mT, x.q8 * x.sq[..., None])
    if x.mu is not None:
        dk = dk + torch.matmul(rounded.mT, x.mu)
    do8, sdo = quantise(dout)
    dv = torch.matmul(_tiled(p, -3, settings.scales).mT, do8 * sdo[..., None])
    return dq * scale, dk.sum(2, keepdim=True) * scale, dv.sum(2, keepdim=True)


@dataclass(frozen=True)
class _Rules:
    layout: str
    reach: tuple[int | None, int | None]
    scale: float
    settings: Settings


class _Int8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: tuple[torch.Tensor | None, ...],
        rules: _Rules,
    ) -> torch.Tensor:
        q5, k5, v5 = _five_dims(rules, q, k, v)
        out = torch.zeros_like(q5)
        lse = q5.new_full(q5.shape[:-1], -math.inf)
        for _, rows, keys in sequences(q5.shape[3], k5.shape[3], *cu_seqlens):
            if rows.stop == rows.start or keys.stop == keys.start:
                continue
            _, s = _scores(q5, k5, rows, keys, rules)
            out[..., rows, :], lse[..., rows] = forward_one(s, v5[..., keys, :], rules.settings)
        out = from_bhsd(out.flatten(1, 2), rules.layout).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.cu_seqlens, ctx.rules = cu_seqlens, rules
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        rules: _Rules = ctx.rules
        q5, k5, v5 = _five_dims(rules, q, k, v)
        do5, o5 = (to_bhsd(x, rules.layout).float().view_as(q5) for x in (dout, out))
        delta = (do5 * o5).sum(-1)
        dq, dk, dv = (torch.zeros_like(x) for x in (q5, k5, v5))
        for _, rows, keys in sequences(q5.shape[3], k5.shape[3], *ctx.cu_seqlens):
            if rows.stop == rows.start or keys.stop == keys.start:
                continue
            kept, s = _scores(q5, k5, rows, keys, rules)
            dq[..., rows, :], dk[..., keys, :], dv[..., keys, :] = backward_one(
                kept, s, lse[..., rows], v5[..., keys, :], do5[..., rows, :], delta[..., rows],
                rules.scale, rules.settings, q.dtype,
            )  # fmt: skip
        pairs = ((dq, q), (dk, k), (dv, v))
        grads = (from_bhsd(x.flatten(1, 2), rules.layout).to(like.dtype) for x, like in pairs)
        return (*grads, None, None)


def _five_dims(rules: _Rules, q: torch.Tensor, *kv: torch.Tensor) -> list[torch.Tensor]:
    q4, *rest = (to_bhsd(x, rules.layout).float() for x in (q, *kv))
    hk = rest[0].shape[1]
    return [q4.unflatten(1, (hk, head_group(q4.shape[1], hk))), *(x.unsqueeze(2) for x in rest)]


def _scores(
    q: torch.Tensor, k: torch.Tensor, rows: slice, keys: slice, rules: _Rules
) -> tuple[Operands, torch.Tensor]:
    """Operands and scores of one sequence, the last query aligned with the last key."""
    sq, sk = rows.stop - rows.start, keys.stop - keys.start
    i, j = (torch.arange(n, device=q.device) for n in (sq, sk))
    ok = allowed(i, j, shift=sk - sq, reach=rules.reach)
    x = operands(q[..., rows, :], k[..., keys, :], rules.settings)
    return x, scores(x, rules.scale, ok)


def int8_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: Settings = DEFAULT,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
) -> torch.Tensor:
    """O in q's dtype and layout, differentiable: `stable_attention.int8.launch.int8_attention`
    in PyTorch, any head dim, CPU or GPU. Arguments as there; v has q's head dim.

    Raises:
        ValueError: an unknown layout, or head counts that do not divide.
    """
    check_layout(layout, (q, k, v), (cu_seqlens_q, cu_seqlens_k))
    if v.shape[-1] != q.shape[-1]:
        raise ValueError(f"head dim of v is {v.shape[-1]}: use q's, {q.shape[-1]}")
    rules = _Rules(
        layout=layout,
        reach=bounds(causal, window),
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        settings=settings,
    )
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded)
    with torch.autocast(q.device.type, enabled=False):
        out = _Int8.apply(q, k, v, cu_seqlens, rules)
    assert isinstance(out, torch.Tensor)
    return out

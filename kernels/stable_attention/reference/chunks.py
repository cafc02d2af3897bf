"""The chunk primitives of `stable_attention.chunks`, in float32 PyTorch for any device.

Same functions, same keywords, so that context parallelism runs on either. float64 inputs are
computed and accumulated in float64. Packed offsets and tensor positions are read on the host: this
is the exact and slow path, which stops a GPU.

Shapes: as in `blockwise`; positions are global, so a query row i and a key column j of a pair see
each other by (j + k_position) - (i + q_position).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stable_attention.reference import dropout
from stable_attention.reference.geometry import (
    Window,
    allowed,
    bounds,
    from_bhsd,
    head_group,
    sequences,
    to_bhsd,
)

Position = int | torch.Tensor
TILE = 1024  # rows and columns of the scores held at a time


@dataclass(frozen=True, kw_only=True)
class _Rules:
    reach: tuple[int | None, int | None]
    scale: float
    softcap: float
    dropout_p: float
    seed: int
    batch_offset: int
    head_offset: int
    cu: tuple[torch.Tensor | None, ...]
    positions: tuple[Position, Position]

    def sequences(self, sq: int, sk: int) -> Iterator[tuple[int, slice, slice, tuple[int, int]]]:
        """(batch, rows, keys, global positions of the first of each) of every sequence."""
        for batch, rows, keys in sequences(sq, sk, *self.cu):
            q, k = (int(p[batch]) if isinstance(p, torch.Tensor) else p for p in self.positions)
            yield batch, rows, keys, (q, k)


def _rules(
    d: int,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_position: Position = 0,
    k_position: Position = 0,
    batch_offset: int = 0,
    head_offset: int = 0,
    deterministic: bool = False,
) -> _Rules:
    if dropout_p and dropout_seed is None:
        raise ValueError("dropout needs dropout_seed: all chunks must share one")
    return _Rules(
        reach=bounds(causal, window),
        scale=d**-0.5 if scale is None else float(scale),
        softcap=softcap,
        dropout_p=dropout_p,
        seed=0 if dropout_seed is None else int(dropout_seed),
        batch_offset=batch_offset,
        head_offset=head_offset,
        cu=(cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded),
        positions=(q_position, k_position),
    )


def _compute(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _spread(x: torch.Tensor, layout: str, kv_heads: int) -> torch.Tensor:
    """[b, kv_heads, g, s, d] of compute type."""
    x4 = to_bhsd(x, layout).to(_compute(x))
    return x4.unflatten(1, (kv_heads, head_group(x4.shape[1], kv_heads)))


def _tiles(
    rows: slice, keys: slice, at: tuple[int, int], reach: tuple[int | None, int | None]
) -> Iterator[tuple[slice, slice, int, int]]:
    """(rows, keys, position of the first row, of the first key) of every tile that may be seen."""
    left, right = reach
    for r in range(rows.start, rows.stop, TILE):
        r_end = min(rows.stop, r + TILE)
        q = at[0] + r - rows.start
        for c in range(keys.start, keys.stop, TILE):
            c_end = min(keys.stop, c + TILE)
            k = at[1] + c - keys.start
            beyond = right is not None and k - (q + r_end - r - 1) > right
            before = left is not None and (k + c_end - c - 1) - q < -left
            if not (beyond or before):
                yield slice(r, r_end), slice(c, c_end), q, k


def _scores(
    q: torch.Tensor, k: torch.Tensor, q_at: int, k_at: int, rules: _Rules
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled, capped, masked scores of a tile, and the slope of the cap where there is one."""
    s = torch.matmul(q, k.transpose(-1, -2)) * rules.scale
    slope = None
    if rules.softcap:
        bent = torch.tanh(s / rules.softcap)
        s, slope = bent * rules.softcap, 1 - bent * bent
    i = torch.arange(s.shape[-2], device=s.device)
    j = torch.arange(s.shape[-1], device=s.device)
    ok = allowed(i, j, shift=q_at - k_at, reach=rules.reach)
    return (s if ok is None else s.masked_fill(~ok, -math.inf)), slope


def _kept(s: torch.Tensor, q_at: int, k_at: int, batch: int, rules: _Rules) -> torch.Tensor:
    """Dropout factors of a tile, keyed by global positions: 0 or 1 / (1 - p)."""
    b, hk, g, m, n = s.shape
    keep = dropout.keep_mask(
        rules.seed,
        rules.dropout_p,
        batches=torch.arange(b, device=s.device) + batch + rules.batch_offset,
        heads=torch.arange(hk * g, device=s.device) + rules.head_offset,
        rows=torch.arange(m, device=s.device) + q_at,
        columns=torch.arange(n, device=s.device) + k_at,
    )
    return keep.view(s.shape).to(s.dtype) / (1 - rules.dropout_p)


def chunk_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bshd",
    return_max_logits: bool = False,
    stabilizer: str = "compensated",
    residual: str = "bf16",
    **options,
) -> tuple[torch.Tensor, ...]:
    """As `stable_attention.chunks.chunk_forward`; ``stabilizer`` and ``residual`` do not matter."""
    rules = _rules(q.shape[-1], **options)
    hk = k.shape[1] if layout == "bhsd" else k.shape[-2]
    q5, k5, v5 = (_spread(x, layout, hk) for x in (q, k, v))
    b, _, g, sq = q5.shape[:4]
    out = q5.new_zeros(b, hk, g, sq, v5.shape[-1])
    m, l = q5.new_full((b, hk, g, sq), -math.inf), q5.new_zeros(b, hk, g, sq)
    for batch, rows, keys, at in rules.sequences(sq, k5.shape[3]):
        for r, c, q_at, k_at in _tiles(rows, keys, at, rules.reach):
            s, _ = _scores(q5[..., r, :], k5[..., c, :], q_at, k_at, rules)
            m_new = torch.maximum(m[..., r], s.amax(-1))
            shift = m_new.masked_fill(m_new == -math.inf, 0.0)
            p, fade = torch.exp(s - shift[..., None]), torch.exp(m[..., r] - shift)
            l[..., r] = l[..., r] * fade + p.sum(-1)
            if rules.dropout_p:
                p = p * _kept(s, q_at, k_at, batch, rules)
            out[..., r, :] = out[..., r, :] * fade[..., None] + torch.matmul(p, v5[..., c, :])
            m[..., r] = m_new
    empty = l == 0
    out = from_bhsd((out / l.masked_fill(empty, 1.0)[..., None]).flatten(1, 2), layout)
    lse = (m + torch.log(l)).masked_fill(empty, -math.inf).flatten(1, 2)
    lse = lse[0] if layout == "thd" else lse
    if return_max_logits:
        top = m.amax((0, 3)).flatten() if m.numel() else m.new_full((hk * g,), -math.inf)
        return out, lse, top
    return out, lse


def _rows_like(lse: torch.Tensor, layout: str) -> torch.Tensor:
    """A view of row values, [b, h, s] or [h, t], that multiplies an O in ``layout``."""
    if layout == "thd":
        return lse.transpose(0, 1)[..., None]
    return lse.permute({"bshd": (0, 2, 1), "sbhd": (2, 0, 1), "bhsd": (0, 1, 2)}[layout])[..., None]


def merge_chunks(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    *,
    layout: str = "bshd",
) -> None:
    """As `stable_attention.chunks.merge_chunks`."""
    total = torch.logaddexp(lse, part_lse)
    safe = total.masked_fill(total == -math.inf, 0.0)
    old, new = torch.exp(lse - safe), torch.exp(part_lse - safe)
    out.mul_(_rows_like(old, layout)).add_(part * _rows_like(new, layout))
    lse.copy_(total)


def finish_chunks(
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dtype: torch.dtype,
    layout: str = "bshd",
    sinks: torch.Tensor | None = None,
    stabilizer: str = "compensated",
    residual: str = "bf16",
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `stable_attention.chunks.finish_chunks`; the low-order part is all that rounding lost."""
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))
        safe = total.masked_fill(total == -math.inf, 0.0)
        out = out * _rows_like(torch.exp(lse - safe), layout)
        lse.copy_(total)
    high = out.to(dtype)
    return high, (out - high.to(out.dtype) if dtype != out.dtype else out.new_empty(0))


def chunk_delta(
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    layout: str = "bshd",
    low: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `stable_attention.chunks.chunk_delta`."""
    whole = out.to(lse.dtype)
    if low is not None and low.numel():
        whole = whole + low.to(lse.dtype)
    rows = (dout.to(lse.dtype) * whole).sum(-1)
    perm = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2), "thd": (1, 0)}[layout]
    delta = rows.permute(perm).contiguous()
    if dlse is not None:
        delta = (delta - dlse).masked_fill(lse == -math.inf, 0.0)  # not 0 * NaN later
    if sinks is None:
        return delta, None
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
    share = -(weight * delta).sum(-1)
    return delta, share if layout == "thd" else share.sum(0)


def chunk_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    layout: str = "bshd",
    stabilizer: str = "compensated",
    residual: str = "bf16",
    **options,
) -> None:
    """As `stable_attention.chunks.chunk_backward`: adds to dq, dk and dv."""
    rules = _rules(q.shape[-1], **options)
    hk = k.shape[1] if layout == "bhsd" else k.shape[-2]
    q5, k5, v5, do5 = (_spread(x, layout, hk) for x in (q, k, v, dout))
    b, _, g, sq = q5.shape[:4]
    lse5, delta5 = (x.reshape(b, hk, g, sq) for x in (lse, delta))
    lse5 = lse5.masked_fill(lse5 == -math.inf, 0.0)  # rows without keys have s = -inf, P = 0
    # Views of the caller's accumulators, so that += reaches them.
    dq4, dk4, dv4 = (to_bhsd(x, layout) for x in (dq, dk, dv))
    for batch, rows, keys, at in rules.sequences(sq, k5.shape[3]):
        for r, c, q_at, k_at in _tiles(rows, keys, at, rules.reach):
            s, slope = _scores(q5[..., r, :], k5[..., c, :], q_at, k_at, rules)
            p = torch.exp(s - lse5[..., r, None])
            dp = torch.matmul(do5[..., r, :], v5[..., c, :].transpose(-1, -2))
            used = p
            if rules.dropout_p:
                kept = _kept(s, q_at, k_at, batch, rules)
                used, dp = p * kept, dp * kept
            ds = p * (dp - delta5[..., r, None])
            ds = (ds if slope is None else ds * slope) * rules.scale
            dq4[..., r, :] += torch.matmul(ds, k5[..., c, :]).flatten(1, 2)
            dk4[..., c, :] += torch.matmul(ds.transpose(-1, -2), q5[..., r, :]).sum(2)
            dv4[..., c, :] += torch.matmul(used.transpose(-1, -2), do5[..., r, :]).sum(2)

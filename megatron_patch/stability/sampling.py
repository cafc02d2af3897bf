"""Attention in float32 on a few sampled query rows: what the kernel's rounding did to them.

The inputs are those of the kernel; the truth here is float32 arithmetic on them, whose own error
(about 1e-6 relative) is a thousandth of what it measures. Under context parallelism the sampled
rows of all ranks are gathered, every rank attends with its own keys, and row maximum and sums are
merged: three small all-reduces.

Shape legend: s tokens of this rank; b sequences; h query heads, kv key/value heads of this rank,
g = h / kv; d, dv head dims; r sampled rows of this rank, R of all context-parallel ranks; n keys
of a block. Row tensors are [b, kv, g, R(, ...)].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patch.context_parallel import layout

BLOCK_BYTES = 64 << 20  # float32 scores of one block of keys; a few such buffers live at a time
GOLDEN = 0.6180339887498949


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Who sees whom, and over which ranks."""

    scale: float
    causal: bool
    window: tuple[int, int] | None = None
    group: Any = None
    """Context-parallel process group; None when the sequence is whole."""

    @property
    def size(self) -> int:
        """Context-parallel ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Context-parallel rank."""
        return 0 if self.group is None else self.group.rank()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """Float32 facts of the sampled rows, [b, h, r] for this rank's rows unless said otherwise."""

    out: torch.Tensor
    """O, [b, h, r, dv]."""
    plain: torch.Tensor
    """O as a plain flash kernel computes it (P rounded to 16 bits for P V, O rounded once)."""
    delta: torch.Tensor
    logit: torch.Tensor
    """sum_j P_j S_j over the keys, a sink's share left out."""
    growth: torch.Tensor
    """sum_j dS_j S_j over the keys: the derivative by a factor on the row's logits."""
    entropy: torch.Tensor
    first: torch.Tensor
    """Mass on key 0 of the sequence."""
    top: torch.Tensor
    """Largest probability."""
    max_logit: torch.Tensor
    """[h], over the rows of all ranks."""
    spread: torch.Tensor
    """[h]: sum over the rows of *all* ranks and the keys of *this* rank of P (dP - delta)^2."""


def pick_rows(
    tokens: int, count: int, *, phase: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """``count`` increasing row numbers of ``tokens``, spread evenly, other ones for every phase.

    The first rows are left out (64 of them, or an eighth): they see few keys, so little rounds.
    Computed on ``device``: a copy from the host would wait for it.
    """
    first = min(64, tokens // 8)
    count = max(1, min(count, tokens - first))
    shift = (phase * GOLDEN) % 1.0
    places = torch.arange(count, dtype=torch.float64, device=device) + shift
    return first + (places * ((tokens - first) / count)).long()


def gather(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """``x`` of every rank of ``group``, in rank order; [x] without a group."""
    if group is None:
        return [x]
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x, group=group)
    return parts


def _reduce(x: torch.Tensor, group: Any, op: Any) -> torch.Tensor:
    if group is not None:
        torch.distributed.all_reduce(x, op=op, group=group)
    return x


class _Scores:
    """Scores of the rows against this rank's keys, a block at a time; kept if one block does."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, *, rows: torch.Tensor, geometry: Geometry
    ) -> None:
        """``q`` [b, kv, g, R, d] float32, ``k`` [s, b, kv, d], ``rows`` global positions [R]."""
        self.q, self.k, self.rows, self.geometry = q, k, rows, geometry
        tokens = k.shape[0]
        per_key = 4 * q[..., 0].numel()
        step = max(1, min(tokens, BLOCK_BYTES // max(1, per_key)))
        self.blocks = [slice(i, min(tokens, i + step)) for i in range(0, tokens, step)]
        self.keys = layout.positions(
            tokens * geometry.size, rank=geometry.rank, size=geometry.size, device=k.device
        )
        self._only: torch.Tensor | None = None

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for block in self.blocks:
            if self._only is not None:
                yield block, self._only
                continue
            s = self._block(block)
            if len(self.blocks) == 1:
                self._only = s
            yield block, s

    def _block(self, block: slice) -> torch.Tensor:
        keys = self.k[block].float().permute(1, 2, 3, 0).unsqueeze(2)  # [b, kv, 1, d, n]
        s = torch.matmul(self.q, keys) * self.geometry.scale
        gap = self.rows[:, None] - self.keys[block][None, :]
        hidden = gap < 0 if self.geometry.causal else torch.zeros_like(gap, dtype=torch.bool)
        if self.geometry.window is not None:
            left, right = self.geometry.window
            if left >= 0:
                hidden = hidden | (gap > left)
            if right >= 0:
                hidden = hidden | (-gap > right)
        return s.masked_fill(hidden, -math.inf)


@torch.no_grad()
def measure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    rows: torch.Tensor,
    geometry: Geometry,
    sinks: torch.Tensor | None = None,
) -> RowFacts:
    """Attention of some rows in float32. Collective over ``geometry.group``.

    Args:
        q: [s, b, h, d], k: [s, b, kv, d], v: [s, b, kv, dv]: this rank's tokens.
        dout: [s, b, h, dv], the gradient of the output.
        rows: local row numbers [r], the same number on all ranks.
        geometry: mask, scale, process group.
        sinks: [h] sink logits that join the softmax without a value.
    """
    kv = k.shape[2]
    here = layout.positions(
        q.shape[0] * geometry.size, rank=geometry.rank, size=geometry.size, device=q.device
    )[rows]
    positions = torch.cat(gather(here, geometry.group))
    q_rows = torch.cat(gather(_by_head(q[rows], kv), geometry.group), 3)
    do_rows = torch.cat(gather(_by_head(dout[rows], kv), geometry.group), 3)
    scores = _Scores(q_rows, k, rows=positions, geometry=geometry)
    sink = None if sinks is None else sinks.float().view(1, kv, -1, 1)
    top = q_rows.new_full(q_rows.shape[:-1], -math.inf)
    for _, s in scores:
        top = torch.maximum(top, s.amax(-1))
    top = _reduce(top, geometry.group, torch.distributed.ReduceOp.MAX)
    # The shift of the softmax; a row that sees no key (a window's) shifts by 0 and sums to 0.
    m = top if sink is None else torch.maximum(top, sink)
    m = m.masked_fill(m == -math.inf, 0.0)
    sums = _sums(scores, v, m, geometry)
    l = sums["l"] if sink is None else sums["l"] + torch.exp(sink - m)
    l = l.clamp_min(torch.finfo(torch.float32).tiny)
    out = sums["acc"] / l[..., None]
    plain = (sums["rounded"] / l[..., None]).to(_narrow(v.dtype)).float()
    delta = (do_rows * out).sum(-1)
    logit = (sums["weighted"] + m * sums["l"]) / l
    spread, growth = torch.zeros_like(delta), torch.zeros_like(delta)
    for block, s in scores:
        p = torch.exp(s - m[..., None]) / l[..., None]
        dp = torch.matmul(do_rows, v[block].float().permute(1, 2, 3, 0).unsqueeze(2))
        ds = p * (dp - delta[..., None])
        spread += (ds * (dp - delta[..., None])).sum(-1)
        # Against the mean, not zero: dS sums to zero, large logits would leave rounding only.
        growth += (ds * (s - logit[..., None]).masked_fill(p == 0, 0.0)).sum(-1)
    growth = _reduce(growth, geometry.group, torch.distributed.ReduceOp.SUM)
    sink_share = torch.zeros_like(l)
    if sink is not None:  # the sink's own term: no value, so dP = 0; its part of the entropy
        share = torch.exp(sink - m) / l
        spread += share * delta.pow(2) / geometry.size
        growth += share * delta * logit  # what is left of the sum of dS over the keys
        sink_share = share * (sink - m)
    lse = torch.log(l)
    r = rows.numel()
    mine = slice(geometry.rank * r, (geometry.rank + 1) * r)

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, :, mine].flatten(1, 2)

    return RowFacts(
        out=flat(out),
        plain=flat(plain),
        delta=flat(delta),
        logit=flat(logit),
        growth=flat(growth),
        entropy=flat(lse - sums["weighted"] / l - sink_share),
        first=flat(sums["first"] / l),
        top=flat(torch.exp(top - m) / l),
        max_logit=top.amax((0, 3)).flatten(),
        spread=spread.sum((0, 3)).flatten(),
    )


def _sums(
    scores: _Scores, v: torch.Tensor, m: torch.Tensor, geometry: Geometry
) -> dict[str, torch.Tensor]:
    """Sums over all keys under shift m: l, P (S - m), P of key 0, P V, and P V with P rounded."""
    dv = v.shape[-1]
    narrow = _narrow(v.dtype)
    total = m.new_zeros(*m.shape, 3 + 2 * dv)
    for block, s in scores:
        s = s - m[..., None]
        p = torch.exp(s)
        values = v[block].float().transpose(0, 1).transpose(1, 2).unsqueeze(2)  # [b, kv, 1, n, dv]
        total[..., 0] += p.sum(-1)
        total[..., 1] += (p * s.masked_fill(p == 0, 0.0)).sum(-1)
        if block.start == 0 and geometry.rank == 0:  # rank 0 holds the sequence's first token
            total[..., 2] += p[..., 0]
        total[..., 3 : 3 + dv] += torch.matmul(p, values)
        total[..., 3 + dv :] += torch.matmul(p.to(narrow).float(), values)
    total = _reduce(total, geometry.group, torch.distributed.ReduceOp.SUM)
    return {
        "l": total[..., 0],
        "weighted": total[..., 1],
        "first": total[..., 2],
        "acc": total[..., 3 : 3 + dv],
        "rounded": total[..., 3 + dv :],
    }


def _by_head(x: torch.Tensor, kv: int) -> torch.Tensor:
    """[r, b, h, d] -> float32 [b, kv, g, r, d]."""
    r, b, h, d = x.shape
    return x.float().view(r, b, kv, h // kv, d).permute(1, 2, 3, 0, 4)


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """What a plain kernel would store; float32 inputs are judged as BF16 would be."""
    return torch.bfloat16 if dtype == torch.float32 else dtype

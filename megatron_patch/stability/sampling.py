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

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_patch.context_parallel import layout

LOWEST = -1e30  # of a float32 that is subtracted: -inf would leave NaN
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
    starts: torch.Tensor | None = field(default=None, compare=False)
    """First token of the document of each token [s], in a pack of them; None: one sequence."""

    @property
    def size(self) -> int:
        """Context-parallel ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Context-parallel rank."""
        return 0 if self.group is None else self.group.rank()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Which rows are looked at and whom they see: one for all layers with the same mask."""

    rows: torch.Tensor
    """Local row numbers [r], the same number on all ranks."""
    hidden: torch.Tensor | None
    """Bool [R, s], true where a row of any rank does not see a key of this one; None: sees all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """Float32 facts of the sampled rows, [b, h, r] for this rank's rows unless said otherwise."""

    dout: torch.Tensor
    """dO, [b, h, r, dv]."""
    out: torch.Tensor
    """O, [b, h, r, dv]."""
    plain: torch.Tensor | None
    """O as a plain flash kernel computes it (P rounded to 16 bits for P V, O rounded once)."""
    delta: torch.Tensor
    logit: torch.Tensor
    """sum_j P_j S_j over the keys, a sink's share left out."""
    common: torch.Tensor
    """scale q . c, c the mean of all keys of the sequence: what they share, and a softmax without
    a sink does not see."""
    growth: torch.Tensor
    """sum_j dS_j S_j over the keys: the derivative by a factor on the row's logits."""
    entropy: torch.Tensor
    first: torch.Tensor
    """Mass on key 0 of the sequence."""
    top: torch.Tensor
    """Largest probability."""
    max_logit: torch.Tensor
    """[b, h], over the rows of all ranks."""
    spread: torch.Tensor
    """[b, h]: sum over the rows of *all* ranks and the keys of *this* rank of P (dP - delta)^2."""


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


def sample(rows: torch.Tensor, *, tokens: int, geometry: Geometry) -> Sample:
    """The mask of local rows [r], of ``tokens`` a rank. Collective over ``geometry.group``."""
    keys = layout.positions(
        tokens * geometry.size, rank=geometry.rank, size=geometry.size, device=rows.device
    )
    if not geometry.causal and geometry.window is None:
        return Sample(rows=rows, hidden=None)
    gap = _gathered(keys[rows], geometry.group, 0)[:, None] - keys[None, :]
    hidden = gap < 0 if geometry.causal else torch.zeros_like(gap, dtype=torch.bool)
    if geometry.window is not None:
        left, right = geometry.window
        if left >= 0:
            hidden = hidden | (gap > left)
        if right >= 0:
            hidden = hidden | (-gap > right)
    if geometry.starts is not None:
        hidden = hidden | (keys[None, :] < geometry.starts[rows][:, None])
    return Sample(rows=rows, hidden=hidden)


def gather(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """``x`` of every rank of ``group``, in rank order; [x] without a group. Collective."""
    if group is None:
        return [x]
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x, group=group)
    return parts


def _gathered(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    return x if group is None else torch.cat(gather(x, group), dim)


def _reduce(x: torch.Tensor, group: Any, op: Any) -> torch.Tensor:
    if group is not None:
        torch.distributed.all_reduce(x, op=op, group=group)
    return x


class _Block:
    """Scores of the rows against a block of keys, -inf where hidden; the rest when asked for."""

    def __init__(self, scores: torch.Tensor, v: torch.Tensor) -> None:
        """``scores`` [b, kv, g, R, n], ``v`` [n, b, kv, dv]."""
        self.scores, self._v = scores, v
        self._p: torch.Tensor | None = None

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """Float32 [b, kv, 1, n, dv]."""
        return self._v.float().permute(1, 2, 0, 3).unsqueeze(2)

    def p(self, m: torch.Tensor) -> torch.Tensor:
        """exp(S - m), the same m at every call."""
        if self._p is None:
            self._p = torch.exp(self.scores - m[..., None])
        return self._p


class _Blocks:
    """The blocks of this rank's keys in turn, made anew at every pass; kept if one is enough."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        hidden: torch.Tensor | None,
        scale: float,
    ) -> None:
        """``q`` [b, kv, g, R, d] float32, ``k`` [s, b, kv, d], ``v`` [s, b, kv, dv]."""
        self._q, self._k, self._v, self._hidden, self._scale = q, k, v, hidden, scale
        tokens = k.shape[0]
        step = max(1, min(tokens, BLOCK_BYTES // max(1, 4 * q[..., 0].numel())))
        self._slices = [slice(i, min(tokens, i + step)) for i in range(0, tokens, step)]
        self._only: list[_Block] = []

    def __iter__(self) -> Iterator[_Block]:
        if self._only:
            return iter(self._only)
        if len(self._slices) == 1:
            self._only.append(self._block(self._slices[0]))
            return iter(self._only)
        return map(self._block, self._slices)

    def common(self, share: float) -> torch.Tensor:
        """Scores against the mean of this rank's keys, seen or not, times share: [b, kv, g, R]."""
        mean = self._k.mean(0, dtype=torch.float32).mul_(self._scale * share)
        return torch.matmul(self._q, mean[:, :, None, :, None])[..., 0]  # [b, kv, 1, d, 1]

    def _block(self, block: slice) -> _Block:
        keys = self._k[block].float().permute(1, 2, 3, 0).unsqueeze(2)  # [b, kv, 1, d, n]
        s = torch.matmul(self._q, keys).mul_(self._scale)
        if self._hidden is not None:
            s.masked_fill_(self._hidden[:, block], -math.inf)
        return _Block(s, self._v[block])


@torch.no_grad()
def measure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    sampled: Sample,
    geometry: Geometry,
    sinks: torch.Tensor | None = None,
    plain: bool = False,
) -> RowFacts:
    """Attention of some rows in float32. Collective over ``geometry.group``.

    An observation is bound by kernel launches: sequences of several layers come as one batch, what
    they share is in ``sampled``, nothing is computed that is not asked for, and nothing is added to
    zeros.

    Args:
        q: [r, b, h, d], the sampled rows alone; k: [s, b, kv, d], v: [s, b, kv, dv]: this rank's.
        dout: [r, b, h, dv], the gradient of the output in those rows.
        sampled: of `sample`, with the same geometry.
        geometry: mask, scale, process group.
        sinks: [h] or [b, h] sink logits that join the softmax without a value.
        plain: whether the O of a plain kernel is wanted.
    """
    kv, group = k.shape[2], geometry.group
    q_rows = _gathered(_by_head(q, kv), group, 3)
    do_rows = _gathered(_by_head(dout, kv), group, 3)
    blocks = _Blocks(q_rows, k, v, hidden=sampled.hidden, scale=geometry.scale)
    sink = None if sinks is None else sinks.float().view(-1, kv, q.shape[2] // kv, 1)
    top = functools.reduce(torch.maximum, (block.scores.amax(-1) for block in blocks))
    top = _reduce(top, group, torch.distributed.ReduceOp.MAX)
    # The shift of the softmax; a row that sees no key (a window's) sums to 0.
    m = (top if sink is None else torch.maximum(top, sink)).clamp_min(LOWEST)
    sums = _sums(blocks, m, geometry, narrow=_narrow(v.dtype) if plain else None)
    l = sums["l"] if sink is None else sums["l"] + torch.exp(sink - m)
    l = l.clamp_min(torch.finfo(torch.float32).tiny)
    out = sums["acc"] / l[..., None]
    delta = (do_rows * out).sum(-1)
    logit = (sums["weighted"] + m * sums["l"]) / l
    spread, growth = functools.reduce(
        torch.add, (_derivatives(b, do_rows, m=m, l=l, delta=delta, logit=logit) for b in blocks)
    )
    growth = _reduce(growth, group, torch.distributed.ReduceOp.SUM)
    entropy = torch.log(l) - sums["weighted"] / l
    if sink is not None:  # the sink's own term: no value, so dP = 0; its part of the entropy
        share = torch.exp(sink - m) / l
        spread = spread + share * delta.pow(2) / geometry.size
        growth = growth + share * delta * logit  # what is left of the sum of dS over the keys
        entropy = entropy - share * (sink - m)
    r = sampled.rows.numel()
    mine = slice(geometry.rank * r, (geometry.rank + 1) * r)

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, :, mine].flatten(1, 2)

    rounded = None
    if plain:
        rounded = flat((sums["rounded"] / l[..., None]).to(_narrow(v.dtype)).float())
    rows = {"dout": do_rows, "out": out, "delta": delta, "logit": logit, "growth": growth,
            "common": sums["common"], "entropy": entropy, "first": sums["first"] / l,
            "top": torch.exp(top - m) / l}  # fmt: skip
    return RowFacts(
        plain=rounded,
        max_logit=top.amax(3).flatten(1),
        spread=spread.sum(3).flatten(1),
        **{name: flat(x) for name, x in rows.items()},
    )


def _derivatives(
    block: _Block,
    do_rows: torch.Tensor,
    *,
    m: torch.Tensor,
    l: torch.Tensor,
    delta: torch.Tensor,
    logit: torch.Tensor,
) -> torch.Tensor:
    """[2, b, kv, g, R]: sums over the block's keys of P (dP - delta)^2 and of dS (S - logit)."""
    gap = torch.matmul(do_rows, block.values.mT) - delta[..., None]
    ds = block.p(m) / l[..., None] * gap
    # Against the mean, not zero: dS sums to zero, large logits would leave rounding only.
    away = (block.scores - logit[..., None]).clamp_min(LOWEST)  # dS is 0 where S is -inf
    return torch.stack([(ds * gap).sum(-1), (ds * away).sum(-1)])


def _sums(
    blocks: _Blocks, m: torch.Tensor, geometry: Geometry, *, narrow: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Sums over all keys under shift m: l, P (S - m), P of key 0, P V; P V with P in ``narrow``;
    and the scores against the mean key, of which every rank has as many keys."""
    found = {"common": blocks.common(1 / geometry.size)}
    for number, block in enumerate(blocks):
        p = block.p(m)
        new = {"l": p.sum(-1), "weighted": -torch.special.entr(p).sum(-1)}  # log P is S - m
        new["acc"] = torch.matmul(p, block.values)
        if narrow is not None:
            new["rounded"] = torch.matmul(p.to(narrow).float(), block.values)
        if number == 0:  # rank 0 holds the sequence's first token
            found["first"] = p[..., 0] if geometry.rank == 0 else torch.zeros_like(m)
        for name, value in new.items():
            found[name] = found[name] + value if name in found else value
    if geometry.group is None:
        return found
    wide = [x if x.dim() > m.dim() else x[..., None] for x in found.values()]
    total = _reduce(torch.cat(wide, -1), geometry.group, torch.distributed.ReduceOp.SUM)
    parts = total.split([x.shape[-1] for x in wide], -1)
    return {
        name: part if old.dim() > m.dim() else part[..., 0]
        for (name, old), part in zip(found.items(), parts, strict=True)
    }


def _by_head(x: torch.Tensor, kv: int) -> torch.Tensor:
    """[r, b, h, d] -> float32 [b, kv, g, r, d]."""
    r, b, h, d = x.shape
    return x.float().view(r, b, kv, h // kv, d).permute(1, 2, 3, 0, 4)


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """What a plain kernel would store; float32 inputs are judged as BF16 would be."""
    return torch.bfloat16 if dtype == torch.float32 else dtype

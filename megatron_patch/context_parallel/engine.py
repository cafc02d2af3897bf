"""What one rank computes, forward and backward, whatever brings it keys and values.

Shape legend: q [s, b, h, d], k [s, b, kv_heads, d], v [s, b, kv_heads, dv] of a shard ("sbhd"),
without b packed ("thd"); LSE and delta [b, h, s] or [h, t].

Everything between two launches is float32 (float64 for float64 inputs): partial O and LSE, and the
accumulators dQ, dK, dV. Saved for the backward: this rank's q, k, v, O, its low-order part, and
LSE over all keys and the sinks. Keys of other ranks are sent again instead of kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_patch.context_parallel.communicator import Communicator
from megatron_patch.context_parallel.heads import HeadExchange
from megatron_patch.context_parallel.movement import Block, Movement, accumulator
from megatron_patch.context_parallel.schedule import Mask
from megatron_patch.context_parallel.tokens import Tokens, arguments
from stable_attention.problem import UNLIMITED, Options


class Saved(NamedTuple):
    """What the backward needs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    low: torch.Tensor
    lse: torch.Tensor
    sinks: torch.Tensor | None
    seed: torch.Tensor | None


@dataclass(slots=True)
class _Partial:
    """Merged partial results: out float32 like q with v's head dim, and its LSE."""

    primitives: Any
    layout: str
    shape: tuple[int, ...]
    rows: int
    heads: int
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    written: list[tuple[range, range]] = field(default_factory=list)

    def fold(self, part: torch.Tensor, lse: torch.Tensor, rows: slice, heads: slice) -> None:
        """Merge what the queries ``rows`` of ``heads`` saw of some keys."""
        place = (range(self.rows)[rows], range(self.heads)[heads])
        whole = len(place[0]) == self.rows and len(place[1]) == self.heads
        if self.out is None and whole:
            self.out, self.lse = part, lse
        else:
            out_at, lse_at = self._views(part, lse, rows, heads)
            if any(_overlap(place[0], r) and _overlap(place[1], h) for r, h in self.written):
                self.primitives.merge_chunks(out_at, lse_at, part, lse, layout=self.layout)
            else:
                out_at.copy_(part)
                lse_at.copy_(lse)
        self.written.append(place)

    def _views(
        self, part: torch.Tensor, lse: torch.Tensor, rows: slice, heads: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.out is None or self.lse is None:
            self.out = part.new_zeros(self.shape)
            self.lse = lse.new_full((*lse.shape[:-2], self.heads, self.rows), -torch.inf)
        return self.out[rows][..., heads, :], self.lse[..., heads, rows]


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


@dataclass(slots=True)
class Attention:
    """Distributed attention of one rank.

    ``exchange`` turns tokens into heads (a2a), ``movement`` brings the keys that are then missing
    (p2p, all_gather, or nothing); ``everyone`` is the whole context-parallel group.
    """

    options: Options
    """The same for every launch, but for mask and head offset."""
    want_max_logits: bool
    primitives: Any
    """A module with the functions of `stable_attention.chunks`."""
    tokens: Tokens
    """Geometry after the exchange."""
    exchange: HeadExchange
    movement: Movement
    everyone: Communicator

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        seed: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """(O in q's dtype, largest logits float32 [h] or [0], what `backward` needs)."""
        heads = q.shape[-2]
        q, k, v = self.exchange.apart([("q", q), ("k", k), ("v", v)])
        layout = self.tokens.layout
        partial = _Partial(
            self.primitives, layout, (*q.shape[:-1], v.shape[-1]), q.shape[0], q.shape[-2]
        )
        top = accumulator(q[:0]).new_full((heads,), -torch.inf)
        mine = top[self._own_heads(q.shape[-2])]

        def compute(block: Block) -> None:
            at = self._query_heads(q, block)
            for q_view, k_view, mask in block.launches:
                part, lse, *seen = self.primitives.chunk_forward(
                    q[q_view.rows][..., at, :],
                    block.k[k_view.rows],
                    block.v[k_view.rows],
                    return_max_logits=self.want_max_logits,
                    **self._options(mask, at, seed),
                    **arguments(q_view, k_view, by_position=mask is Mask.GLOBAL),
                )
                partial.fold(part, lse, q_view.rows, at)
                for x in seen:
                    mine[at] = torch.maximum(mine[at], x)

        self.movement.forward(k, v, compute)
        assert partial.out is not None and partial.lse is not None
        own_sinks = None if sinks is None else sinks[self._own_heads(q.shape[-2])].contiguous()
        out, low = self.primitives.finish_chunks(
            partial.out,
            partial.lse,
            dtype=q.dtype,
            layout=layout,
            sinks=own_sinks,
            stabilizer=self.options.stabilizer,
            o_lo=self.options.o_lo,
        )
        if self.want_max_logits:
            self.everyone.maximum(top)
        saved = Saved(q, k, v, out, low, partial.lse, own_sinks, seed)
        return self.exchange.together([("o", out)])[0], top, saved

    def backward(
        self, dout: torch.Tensor, saved: Saved
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(dQ, dK, dV) in the inputs' dtypes and dSinks float32 [h], this rank's share alone."""
        heads = dout.shape[-2]
        if dout.stride(-1) != 1:  # once, and not in every launch
            dout = dout.contiguous()
        (dout,) = self.exchange.apart([("do", dout)])
        q, k, v, layout = saved.q, saved.k, saved.v, self.tokens.layout
        delta, share = self.primitives.chunk_delta(
            dout, saved.out, saved.lse, layout=layout, low=saved.low, sinks=saved.sinks
        )
        dq = accumulator(q)
        kept = self.primitives.projected_rows(q, saved.lse, stabilizer=self.options.stabilizer)

        def compute(block: Block, dk: torch.Tensor, dv: torch.Tensor) -> None:
            at = self._query_heads(q, block)
            for q_view, k_view, mask in block.launches:
                rows, keys = q_view.rows, k_view.rows
                self.primitives.chunk_backward(
                    dout[rows][..., at, :],
                    q[rows][..., at, :],
                    block.k[keys],
                    block.v[keys],
                    saved.lse[..., at, rows],
                    delta[..., at, rows],
                    dq=dq[rows][..., at, :],
                    dk=dk[keys],
                    dv=dv[keys],
                    rows=None if kept is None else kept.cut(rows, at),
                    **self._options(mask, at, saved.seed),
                    **arguments(q_view, k_view, by_position=mask is Mask.GLOBAL),
                )

        dk, dv = self.movement.backward(k, v, compute)
        if kept is not None:
            self.primitives.project_chunks(
                dq, kept, saved.lse, delta,
                scale=self.options.scale, layout=layout, sinks=saved.sinks,
            )  # fmt: skip
        if self.exchange.split.replicas == 1 or self.exchange.comm.size == 1:
            # Complete sums: rounding them before or after they travel is the same.
            dk, dv = dk.to(k.dtype), dv.to(v.dtype)
        dq, dk, dv = self.exchange.together([("dq", dq.to(q.dtype)), ("dk", dk), ("dv", dv)])
        dsinks = None
        if share is not None:
            dsinks = share.new_zeros(heads)
            dsinks[self._own_heads(share.shape[0])] = share
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks

    def _own_heads(self, count: int) -> slice:
        """This rank's query heads among all, after the exchange."""
        first = self.exchange.comm.rank * count if self.exchange.comm.size > 1 else 0
        return slice(first, first + count)

    def _query_heads(self, q: torch.Tensor, block: Block) -> slice:
        split = self.exchange.split
        group = q.shape[-2] // (split.kv_heads * split.replicas // self.exchange.comm.size)
        return slice(block.heads.start * group, block.heads.stop * group)

    def _options(self, mask: Mask, at: slice, seed: torch.Tensor | None) -> dict[str, Any]:
        options = self.options
        first = self._own_heads(self.exchange.split.heads // self.exchange.comm.size).start
        out = options.keywords()
        if mask is not Mask.GLOBAL:
            out["window"] = (UNLIMITED, 0 if mask is Mask.LOCAL else UNLIMITED)
        out["head_offset"] = options.head_offset + first + at.start
        if options.dropout_p > 0:
            out["dropout_seed"] = seed
        return out

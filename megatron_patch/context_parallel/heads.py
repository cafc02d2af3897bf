"""a2a: give up tokens of all heads for all tokens of some heads, and back.

Shape legend: x [s, b, heads, d] of a shard ("sbhd"), without b packed ("thd"); a ranks in the
group; after the exchange [a s, b, heads / a, d], in the token order of one larger rank.

Key/value heads that do not divide by a are replicated: rank i then gets those its query heads use,
and the float32 sum over the replicas is the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_patch.context_parallel.communicator import Communicator
from megatron_patch.context_parallel.tokens import Tokens


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """How ``heads`` query and ``kv_heads`` key/value heads are shared by ``ranks``."""

    ranks: int
    heads: int
    kv_heads: int

    @property
    def replicas(self) -> int:
        """Copies of each key/value head among all ranks (1: none is replicated)."""
        group = self.heads // self.kv_heads
        # Largest number of query heads that share a key head on every rank alike.
        return group // math.gcd(group, self.heads // self.ranks)


@dataclass(slots=True)
class HeadExchange:
    """The exchange over one group; does nothing in a group of one."""

    comm: Communicator
    tokens: Tokens
    """Geometry of a shard before the exchange."""
    split: HeadSplit

    def apart(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Exchange tensors of all heads together; "k" and "v" are key/value heads.

        Returns [a s, b, local heads, d] each.
        """
        ranks = self.comm.size
        if ranks == 1:
            return [x for _, x in named]
        parts = []
        for name, x in named:
            if name in ("k", "v") and self.split.replicas > 1:
                x = x.repeat_interleave(self.split.replicas, -2)
            parts.append(x.unflatten(-2, (ranks, -1)).movedim(-3, 0).contiguous())
        names = ", ".join(name for name, _ in named)
        return [self.tokens.gather(x) for x in self._swap(parts, f"heads of {names} (a2a)")]

    def together(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Inverse of `apart`: [s, b, heads, d] each; replicas are summed in the type given."""
        ranks = self.comm.size
        if ranks == 1:
            return [x for _, x in named]
        parts = [self.tokens.scatter(x, ranks).contiguous() for _, x in named]
        names = ", ".join(name for name, _ in named)
        out = []
        for (name, _), x in zip(named, self._swap(parts, f"tokens of {names} (a2a)"), strict=True):
            x = x.movedim(0, -3).flatten(-3, -2)
            if name in ("dk", "dv") and self.split.replicas > 1:
                x = x.unflatten(-2, (self.split.kv_heads, self.split.replicas)).sum(-2)
            out.append(x)
        return out

    def _swap(self, parts: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
        """[a, ...] each: element j goes to rank j; what comes back is from rank j."""
        me = self.comm.rank
        arrived = [torch.empty_like(x) for x in parts]
        peers = [r for r in range(self.comm.size) if r != me]
        ticket = self.comm.exchange(
            [(r, x[r]) for r in peers for x in parts],
            [(r, x[r]) for r in peers for x in arrived],
            what,
        )
        for x, mine in zip(arrived, parts, strict=True):
            x[me].copy_(mine[me])
        if ticket is not None:  # None: tensors without elements
            ticket.wait()
        return arrived

"""Spectral norms of W_Q and W_K, head by head: a drift of W_Q is how the explosion shows in weights
(arXiv 2510.04212, section 3).

Power iteration with a vector kept from one observation to the next: a few products of a matrix and
a vector per observation, for all layers of one shape at once; converged after some observations and
following the weights since then. Always a lower bound of the norm. `exact_norms` is for captures,
which are seldom.

Shape legend: np query heads and ng key/value heads of this tensor-parallel rank, g = np / ng; d
head dim; c hidden size. Core's fused QKV weight is [ng, (g + 2), d, c], flattened to 2-D: the g
query heads of a group, its key, its value.

With fewer key/value heads than tensor-parallel ranks, the whole weight is cut into equal numbers of
rows, wherever heads begin: ranks that share a key/value head gather its group's activations, and
each takes its own query heads. Here every rank gets the rows of its own heads instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_patch.stability.observe import Site

FIRST, LATER = 32, 2
"""Iterations at the first observation of an attempt and at later ones. No checkpoint has the
vectors: the first must come near what an uninterrupted run has by then, or the rule sees growth.
An alarm of head growth may still come at another record than without the resume."""
Rows = tuple[int, int]
"""First row and the one after the last."""


BATCH_BYTES = 64 << 20  # of the float32 copies of weights that are multiplied at once


class SpectralNorms:
    """Norms of the head slices of W_Q and W_K of this rank's layers.

    ``sites``: whose attention is measured.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = list(sites)
        self._x: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def measure(self) -> list[tuple[Site, torch.Tensor]]:
        """Float32 [2, np] for every site: norms of W_Q, and of W_K, which the query heads of a
        group share.

        Sites without core's fused QKV projection (multi-latent attention) are left out. Collective
        over the tensor-parallel group if that has more ranks than there are key/value heads.
        """
        found: list[tuple[Site, torch.Tensor]] = []
        batch: list[tuple[Site, torch.Tensor, torch.Tensor]] = []
        shape = None
        for site in self.sites:
            weights = split_qkv(site.attention)
            if weights is None:
                continue
            new = tuple(w.shape for w in weights)
            size = 4 * sum(w.numel() for w in weights)
            if batch and (new != shape or (len(batch) + 1) * size > BATCH_BYTES):
                found += self._norms(batch, number=len(found))
                batch = []
            batch.append((site, *weights))
            shape = new
        return found + (self._norms(batch, number=len(found)) if batch else [])

    def _norms(
        self, batch: list[tuple[Site, torch.Tensor, torch.Tensor]], *, number: int
    ) -> list[tuple[Site, torch.Tensor]]:
        """Of layers of one shape, all at once: an observation is bound by kernel launches.

        ``number`` of sites before them tells their vectors from those of other batches.
        """
        sites, w_q, w_k = zip(*batch, strict=True)
        n, heads, groups = len(sites), w_q[0].shape[0], w_k[0].shape[0]
        self._x[number], norms = _iterate(torch.cat([*w_q, *w_k]), self._x.get(number))
        q_norm, k_norm = norms.split([n * heads, n * groups])
        k_norm = k_norm.view(n, groups, 1).expand(-1, -1, heads // groups)
        both = torch.stack([q_norm.view(n, heads), k_norm.reshape(n, heads)], 1)
        return list(zip(sites, both.unbind(), strict=True))


@torch.no_grad()
def exact_norms(site: Site) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `SpectralNorms.measure` returns them, but the largest singular values themselves: one
    observation's power iterations stay up to 7 % below them. Waits for the device; collective
    where that is."""
    found = split_qkv(site.attention)
    if found is None:
        return None
    w_q, w_k = found
    return _largest(w_q), _largest(w_k).repeat_interleave(w_q.shape[0] // w_k.shape[0])


def _largest(w: torch.Tensor) -> torch.Tensor:
    """Largest singular values [n] of matrices [n, d, c], float32; NaN of one that is not finite.

    Of the Gram matrices [d, d], whose largest singular value is the square: in float64 nothing of
    a float32 is lost by that, and a training job's memory need not hold the workspace of an SVD.
    """
    norms = torch.full((w.shape[0],), torch.nan)
    for i, one in enumerate(w):
        a = one.float().double()
        gram = torch.matmul(a, a.mT).cpu()
        if bool(gram.isfinite().all()):  # an SVD of anything else raises
            norms[i] = torch.linalg.matrix_norm(gram, ord=2).sqrt()
    return norms


def split_qkv(attention: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(W_Q [np, d, c], W_K [ng, d, c]) of a self-attention module, or None.

    Collective where `SpectralNorms.measure` is; None on all ranks of the group or on none.
    """
    linear = getattr(attention, "linear_qkv", None)
    weight = getattr(linear, "weight", None)
    heads = getattr(attention, "num_attention_heads_per_partition", None)
    groups = getattr(attention, "num_query_groups_per_partition", None)
    if weight is None or not heads or not groups or weight.dim() != 2:
        return None
    weight, per_group = weight.detach(), heads // groups
    d = attention.hidden_size_per_attention_head
    # Key/value heads of the whole layer, where the module says.
    kv_heads = getattr(getattr(attention, "config", None), "num_query_groups", None)
    size = getattr(attention, "world_size", 1)
    if kv_heads is not None and kv_heads < size:
        # Here core's numbers of this partition are those of a whole group.
        if weight.shape[0] * size != kv_heads * (per_group + 2) * d:
            return None
        group = attention.pg_collection.tp
        return _gathered(weight, heads=per_group * kv_heads, groups=kv_heads, d=d, group=group)
    if weight.shape[0] != groups * (per_group + 2) * d:
        return None  # gated output or another layout: not ours to guess
    blocks = weight.view(groups, per_group + 2, d, weight.shape[1])
    return blocks[:, :per_group].flatten(0, 1), blocks[:, per_group]


def rows_of(rank: int, *, heads: int, groups: int, d: int, size: int) -> list[Rows]:
    """Rows of the whole fused weight that rank's query heads and their key are; ``heads`` and
    ``groups`` of the whole layer, fewer groups than ``size`` ranks."""
    mine, per_group = heads // size, heads // groups
    group, place = divmod(rank * mine, per_group)
    base = group * (per_group + 2)
    blocks = ((base + place, base + place + mine), (base + per_group, base + per_group + 1))
    return [(first * d, last * d) for first, last in blocks]


def overlap(owner: int, reader: int, *, heads: int, groups: int, d: int, size: int) -> list[Rows]:
    """Rows of owner's share of the weight, counted in it, that reader wants; in order."""
    share = (heads + 2 * groups) * d // size
    low, high = owner * share, (owner + 1) * share
    wanted = rows_of(reader, heads=heads, groups=groups, d=d, size=size)
    cut = [(max(first, low) - low, min(last, high) - low) for first, last in wanted]
    return [(first, last) for first, last in cut if first < last]


def _gathered(
    weight: torch.Tensor, *, heads: int, groups: int, d: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(W_Q [np, d, c], W_K [1, d, c]) of this rank from the shares of all. Collective.

    What goes where follows from the shapes alone: nothing waits for the device.
    """
    size, rank = group.size(), group.rank()

    def between(owner: int, reader: int) -> list[Rows]:
        return overlap(owner, reader, heads=heads, groups=groups, d=d, size=size)

    sends = [between(rank, reader) for reader in range(size)]
    pieces = [weight[first:last] for rows in sends for first, last in rows]
    leaving = torch.cat([weight[:0], *pieces])
    counts = [_count(between(owner, rank)) for owner in range(size)]
    arriving = leaving.new_empty(sum(counts), weight.shape[1])
    torch.distributed.all_to_all_single(
        arriving, leaving, counts, [_count(rows) for rows in sends], group=group
    )
    # Owners in rank order and their rows in order: the query heads, then the key.
    blocks = arriving.view(-1, d, weight.shape[1])
    return blocks[:-1], blocks[-1:]


def _count(rows: list[Rows]) -> int:
    return sum(last - first for first, last in rows)


def _iterate(w: torch.Tensor, x: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(vector [n, c, 1], largest singular value so far [n]) of matrices [n, d, c]."""
    w = w.float()
    steps = LATER
    if x is None:
        steps = FIRST
        # Any vector that is not orthogonal to the top one; the same on every rank and resume.
        # Made on the device: a copy from the host would wait for it.
        places = torch.arange(w.shape[2], dtype=torch.float64, device=w.device)
        start = torch.cos(places * 1.7 + 0.3)
        x = start.float().expand(w.shape[0], -1)[..., None]
    for _ in range(steps):
        x = x / x.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        y = torch.matmul(w, x)
        x = torch.matmul(w.mT, y)
    return x, y.norm(dim=1).flatten()

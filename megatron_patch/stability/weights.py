"""Spectral norms of W_Q and W_K, head by head: a drift of W_Q is how the explosion shows in weights
(arXiv 2510.04212, section 3).

Power iteration with a vector kept from one observation to the next: a few products of a matrix and
a vector per layer and observation, converged after some observations and following the weights
since then. Always a lower bound of the norm.

Shape legend: np query heads and ng key/value heads of this tensor-parallel rank, g = np / ng; d
head dim; c hidden size. Core's fused QKV weight is [ng, (g + 2), d, c], flattened to 2-D: the g
query heads of a group, its key, its value.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patch.stability.observe import Site

FIRST, LATER = 8, 2  # iterations at the first observation and at later ones


class SpectralNorms:
    """Norms of the head slices of one layer's W_Q and W_K."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._q: torch.Tensor | None = None
        self._k: torch.Tensor | None = None

    @torch.no_grad()
    def measure(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Float32 (W_Q norms [np], W_K norms [np], a group's query heads sharing theirs).

        None for layers without core's fused QKV projection (multi-latent attention).
        """
        found = split_qkv(self.site.attention)
        if found is None:
            return None
        w_q, w_k = found
        self._q, q_norm = _iterate(w_q, self._q)
        self._k, k_norm = _iterate(w_k, self._k)
        return q_norm, k_norm.repeat_interleave(w_q.shape[0] // w_k.shape[0])


def split_qkv(attention: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(W_Q [np, d, c], W_K [ng, d, c]) of a self-attention module, or None."""
    linear = getattr(attention, "linear_qkv", None)
    weight = getattr(linear, "weight", None)
    heads = getattr(attention, "num_attention_heads_per_partition", None)
    groups = getattr(attention, "num_query_groups_per_partition", None)
    if weight is None or not heads or not groups or weight.dim() != 2:
        return None
    per_group = heads // groups
    d = attention.hidden_size_per_attention_head
    if weight.shape[0] != groups * (per_group + 2) * d:
        return None  # gated output or another layout: not ours to guess
    blocks = weight.detach().view(groups, per_group + 2, d, weight.shape[1])
    return blocks[:, :per_group].flatten(0, 1), blocks[:, per_group]


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

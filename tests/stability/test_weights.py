"""Spectral norms of the heads' slices of a fused QKV weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patch.stability import weights
from megatron_patch.stability.weights import SpectralNorms, split_qkv

GROUPS, PER_GROUP, D, C = 2, 3, 8, 24


def attention(weight: torch.Tensor) -> Any:
    """Stands for core's SelfAttention."""
    return SimpleNamespace(
        linear_qkv=SimpleNamespace(weight=weight),
        num_attention_heads_per_partition=GROUPS * PER_GROUP,
        num_query_groups_per_partition=GROUPS,
        hidden_size_per_attention_head=D,
    )


def blocks(seed: int = 0) -> torch.Tensor:
    """[groups, query heads + K + V, d, c], every block of another size."""
    gen = torch.Generator().manual_seed(seed)
    size = torch.arange(1, GROUPS * (PER_GROUP + 2) + 1).view(GROUPS, PER_GROUP + 2, 1, 1)
    return torch.randn(GROUPS, PER_GROUP + 2, D, C, generator=gen) * size


def of(*attentions: Any) -> SpectralNorms:
    """The norms of layers with these attentions."""
    sites: Any = [SimpleNamespace(attention=one) for one in attentions]
    return SpectralNorms(sites)


def test_norms_are_those_of_the_slices():
    whole = blocks()
    norms = of(attention(whole.flatten(0, 2)))
    exact = torch.linalg.matrix_norm(whole.double(), ord=2)
    want_q = exact[:, :PER_GROUP].flatten()
    want_k = exact[:, PER_GROUP].repeat_interleave(PER_GROUP)
    shares = []
    for _ in range(20):
        ((_, found),) = norms.measure()
        for mine, want in zip(found, (want_q, want_k), strict=True):
            assert (mine <= want * (1 + 1e-5)).all()  # from below
        shares.append(float((found[0] / want_q).min()))
    assert shares[0] > 0.8 and shares[-1] > 0.999


def test_norms_follow_the_weights():
    weight = blocks().flatten(0, 2)
    norms = of(attention(weight))
    ((_, before),) = norms.measure()
    weight *= 3
    ((_, after),) = norms.measure()
    assert (after[0] >= 2.99 * before[0]).all()


def test_other_layouts_are_not_guessed_at():
    assert split_qkv(SimpleNamespace()) is None
    assert split_qkv(attention(blocks().flatten(0, 2)[:-1])) is None
    assert of(SimpleNamespace()).measure() == []
    ((_, found),) = of(attention(torch.zeros(80, C))).measure()
    assert (found == 0).all()


@pytest.mark.parametrize("limit", [weights.BATCH_BYTES, 1])
def test_layers_at_once_are_layers_one_by_one(limit, monkeypatch):
    """Of two shapes, with one between them that is not measured; and with no memory for two."""
    monkeypatch.setattr(weights, "BATCH_BYTES", limit)
    other = SimpleNamespace(
        linear_qkv=SimpleNamespace(weight=blocks(7)[:, PER_GROUP - 1 :].flatten(0, 2)),
        num_attention_heads_per_partition=GROUPS,
        num_query_groups_per_partition=GROUPS,
        hidden_size_per_attention_head=D,
    )
    layers = [attention(blocks(seed).flatten(0, 2)) for seed in range(3)]
    every = [layers[0], SimpleNamespace(), layers[1], other, layers[2]]
    together, alone = of(*every), [of(one) for one in every]
    for _ in range(3):
        found = {id(site.attention): norms for site, norms in together.measure()}
        assert len(found) == 4
        for norms in alone:
            for site, want in norms.measure():
                torch.testing.assert_close(found[id(site.attention)], want)


class Ranks:
    """A tensor-parallel group in one process: two rounds, of which the first only sends."""

    def __init__(self) -> None:
        self.sent: dict[int, tuple[torch.Tensor, ...]] = {}

    def all_to_all_single(
        self, out: torch.Tensor, x: torch.Tensor, counts: Any, sends: Any, *, group: Any
    ) -> None:
        assert sum(sends) == x.shape[0] and sum(counts) == out.shape[0]
        self.sent[group.rank()] = x.split(sends)
        if len(self.sent) == group.size():
            parts = [self.sent[owner][group.rank()] for owner in range(group.size())]
            assert [part.shape[0] for part in parts] == counts
            out.copy_(torch.cat(parts))


@pytest.mark.parametrize(
    ("heads", "groups", "size"),
    # In the last three a rank's rows begin inside a head: 6, 12 and 10 blocks over 4 and 8 ranks.
    [(4, 1, 2), (8, 2, 4), (12, 2, 4), (6, 3, 6), (4, 1, 4), (8, 2, 8), (8, 1, 8)],
)
def test_fewer_key_heads_than_ranks(monkeypatch, heads, groups, size):
    """Every head of the layer on one rank, with the norms one process finds; as core cuts them."""
    per_group = heads // groups
    gen = torch.Generator().manual_seed(1)
    scale = torch.arange(1.0, groups * (per_group + 2) + 1).view(groups, per_group + 2, 1, 1)
    whole = torch.randn(groups, per_group + 2, D, C, generator=gen) * scale
    ranks = Ranks()
    monkeypatch.setattr(torch.distributed, "all_to_all_single", ranks.all_to_all_single)

    def module(weight: torch.Tensor, rank: int, tp: int) -> Any:
        return SimpleNamespace(
            linear_qkv=SimpleNamespace(weight=weight),
            config=SimpleNamespace(num_query_groups=groups),
            world_size=tp,
            pg_collection=SimpleNamespace(tp=SimpleNamespace(rank=lambda: rank, size=lambda: tp)),
            # Core's own numbers where key/value heads are repeated.
            num_attention_heads_per_partition=heads // min(tp, groups),
            num_query_groups_per_partition=max(1, groups // tp),
            hidden_size_per_attention_head=D,
        )

    def norms_of(weight: torch.Tensor, rank: int, tp: int) -> Any:
        ((_, found),) = of(module(weight, rank, tp)).measure()
        return found

    flat = whole.flatten(0, 2)
    q, k = norms_of(flat, 0, 1)
    shares = flat.chunk(size)
    for rank in range(size):
        norms_of(shares[rank], rank, size)
    found = [norms_of(shares[rank], rank, size) for rank in range(size)]
    assert all(len(x) == heads // size for pair in found for x in pair)
    torch.testing.assert_close(torch.cat([x for x, _ in found]), q)
    torch.testing.assert_close(torch.cat([x for _, x in found]), k)

"""Spectral norms of the heads' slices of a fused QKV weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def test_norms_are_those_of_the_slices() -> None:
    whole = blocks()
    norms = SpectralNorms(SimpleNamespace(attention=attention(whole.flatten(0, 2))))  # type: ignore[arg-type]
    exact = torch.linalg.matrix_norm(whole.double(), ord=2)
    want_q = exact[:, :PER_GROUP].flatten()
    want_k = exact[:, PER_GROUP].repeat_interleave(PER_GROUP)
    shares = []
    for _ in range(20):
        found = norms.measure()
        assert found is not None
        for mine, want in zip(found, (want_q, want_k), strict=True):
            assert (mine <= want * (1 + 1e-5)).all()  # from below
        shares.append(float((found[0] / want_q).min()))
    assert shares[0] > 0.8 and shares[-1] > 0.999


def test_norms_follow_the_weights() -> None:
    weight = blocks().flatten(0, 2)
    norms = SpectralNorms(SimpleNamespace(attention=attention(weight)))  # type: ignore[arg-type]
    before = norms.measure()
    weight *= 3
    after = norms.measure()
    assert before is not None and after is not None
    assert (after[0] >= 2.99 * before[0]).all()


def test_other_layouts_are_not_guessed_at() -> None:
    assert split_qkv(SimpleNamespace()) is None
    assert split_qkv(attention(blocks().flatten(0, 2)[:-1])) is None
    zero = SpectralNorms(SimpleNamespace(attention=attention(torch.zeros(80, C))))  # type: ignore[arg-type]
    found = zero.measure()
    assert found is not None and (found[0] == 0).all()


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
def test_fewer_key_heads_than_ranks(
    monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, size: int
) -> None:
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
            pg_collection=SimpleNamespace(
                tp=SimpleNamespace(rank=lambda: rank, size=lambda: tp),
            ),
            # Core's own numbers where key/value heads are repeated.
            num_attention_heads_per_partition=heads // min(tp, groups),
            num_query_groups_per_partition=max(1, groups // tp),
            hidden_size_per_attention_head=D,
        )

    def norms_of(weight: torch.Tensor, rank: int, tp: int) -> Any:
        site = SimpleNamespace(attention=module(weight, rank, tp))
        return SpectralNorms(site).measure()  # type: ignore[arg-type]

    flat = whole.flatten(0, 2)
    q, k = norms_of(flat, 0, 1)
    shares = flat.chunk(size)
    for rank in range(size):
        norms_of(shares[rank], rank, size)
    found = [norms_of(shares[rank], rank, size) for rank in range(size)]
    assert all(len(x) == heads // size for pair in found for x in pair)
    torch.testing.assert_close(torch.cat([x for x, _ in found]), q)
    torch.testing.assert_close(torch.cat([x for _, x in found]), k)

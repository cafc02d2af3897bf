"""Spectral norms of the heads' slices of a fused QKV weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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

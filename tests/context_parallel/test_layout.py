"""The zigzag split: complete, balanced, and the one Megatron-Core uses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_patch.context_parallel.layout import positions, shard, unshard
from megatron_patch.core_patches import cpu_mode


def test_the_split_megatron_core_documents():
    """8 tokens over 2 ranks: rank 0 holds 0, 1, 6, 7."""
    assert positions(8, rank=0, size=2).tolist() == [0, 1, 6, 7]
    assert positions(8, rank=1, size=2).tolist() == [2, 3, 4, 5]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 2))
def test_round_trip_and_balance(size, chunk, dim):
    shape = [3, 3, 3]
    shape[dim] = length = 2 * size * chunk
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [shard(x, rank=rank, size=size, dim=dim) for rank in range(size)]
    assert torch.equal(unshard(parts, dim=dim), x)
    seen = [positions(length, rank=rank, size=size) for rank in range(size)]
    assert sorted(torch.cat(seen).tolist()) == list(range(length))
    # Causal work of a rank is the sum of its positions plus one each: equal on all ranks.
    assert len({int(s.sum()) for s in seen}) == 1


def test_a_length_that_cannot_be_split():
    with pytest.raises(ValueError, match=r"12 is not a multiple of 2 x 4 .*; use 8 or 16"):
        shard(torch.zeros(2, 12), rank=0, size=4, dim=1)


def test_agrees_with_megatron_core(monkeypatch):
    """Its own slicer changes signature with every release, hence ours; the layout must not."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    tokens = torch.arange(32).view(2, 16)
    batch = {"tokens": tokens, "cu_seqlens": None}
    cpu_mode.install()
    try:
        theirs = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False)["tokens"]
    finally:
        cpu_mode.uninstall()
    assert torch.equal(shard(tokens, rank=1, size=2, dim=1), theirs)

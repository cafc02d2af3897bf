"""Packed documents: the split is a permutation, is Megatron's, and groups of ranks nest."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_patch.context_parallel.layout import shard
from megatron_patch.context_parallel.packed import (
    gathered_index,
    packed_index,
    packed_positions,
    padded_cu_seqlens,
    padded_lengths,
    shard_packed,
    unshard_packed,
)

DOCUMENTS = st.lists(st.integers(0, 23), min_size=1, max_size=5)


def test_two_documents_over_two_ranks():
    cu = torch.tensor([0, 4, 12], dtype=torch.int32)
    assert packed_index(cu, 12, rank=0, size=2).tolist() == [0, 3, 4, 5, 10, 11]
    assert packed_index(cu, 12, rank=1, size=2).tolist() == [1, 2, 6, 7, 8, 9]
    assert packed_positions(cu, 12, rank=0, size=2).tolist() == [0, 3, 0, 1, 6, 7]


@given(DOCUMENTS, st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_every_document_is_cut_like_a_sequence(lengths, size, tail):
    _, cu = padded_cu_seqlens(lengths, size)
    tokens = int(cu[-1]) + tail * size
    x = torch.arange(tokens)
    parts = [shard_packed(x, cu, rank=r, size=size) for r in range(size)]
    assert torch.equal(unshard_packed(parts, cu), x)
    for rank in range(size):
        want = [shard(x[a:b], rank=rank, size=size, dim=0) for a, b in pairwise(cu)]
        rest = tokens - int(cu[-1])
        want.append(x[int(cu[-1]) :][rank * rest // size : (rank + 1) * rest // size])
        assert torch.equal(parts[rank], torch.cat(want))
        there = packed_positions(cu, tokens, rank=rank, size=size)
        starts = torch.searchsorted(cu.long(), parts[rank], right=True) - 1
        assert torch.equal(there, parts[rank] - cu.long()[starts])


@given(DOCUMENTS, st.sampled_from([(2, 1), (4, 1), (2, 2), (1, 2)]), st.integers(0, 3))
def test_neighbouring_ranks_together_are_one_larger_rank(lengths, shape, tail):
    ranks, others = shape
    _, cu = padded_cu_seqlens(lengths, ranks * others)
    tokens = int(cu[-1]) + tail * ranks * others
    for big in range(others):
        parts = [
            packed_index(cu, tokens, rank=big * ranks + r, size=ranks * others)
            for r in range(ranks)
        ]
        index = gathered_index(cu, tokens // (ranks * others), ranks=ranks, others=others)
        assert sorted(index.tolist()) == list(range(index.numel()))
        got = torch.cat(parts)[index]
        used = int(cu[-1]) // others
        assert torch.equal(got[:used], packed_index(cu, tokens, rank=big, size=others)[:used])


def test_padding():
    assert padded_lengths([0, 1, 8, 9], 2) == [0, 4, 8, 12]
    assert padded_lengths([3], 1) == [3]
    real, padded = padded_cu_seqlens([7, 5], 2)
    assert real.tolist() == [0, 7, 12] and padded.tolist() == [0, 8, 16]
    with pytest.raises(ValueError, match="pad it to 8"):
        packed_index(padded, 7, rank=0, size=2)


@pytest.mark.parametrize("size", [1, 2])
def test_a_pack_without_documents(size):
    real, padded = padded_cu_seqlens([], size)
    assert real.tolist() == padded.tolist() == [0]
    x = torch.arange(8)
    parts = [shard_packed(x, padded, rank=r, size=size) for r in range(size)]
    assert torch.equal(torch.cat(parts), x)
    assert torch.equal(unshard_packed(parts, padded), x)
    # No document's cut counts: tokens stay in order, rank after rank.
    assert gathered_index(padded, 8 // size, ranks=size).tolist() == list(range(8))
    at = [packed_positions(padded, 8, rank=r, size=size) for r in range(size)]
    assert torch.equal(torch.cat(at), x)


def test_agrees_with_megatron_cores_rotary_positions():
    """Core slices the angles of every document itself; the tokens must be the same ones."""
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    cu = torch.tensor([0, 8, 20], dtype=torch.int32)
    angles = torch.arange(64.0)
    for rank in range(2):
        local = torch.split(torch.zeros(10), [4, 6])
        theirs = [_get_thd_freqs_on_this_cp_rank(rank, 2, x, angles) for x in local]
        ours = packed_positions(cu, 20, rank=rank, size=2)
        assert torch.equal(torch.cat(theirs), ours.float())

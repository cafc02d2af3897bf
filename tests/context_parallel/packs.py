"""Which tokens of a pack a context-parallel rank holds, and packs cut and put together again.

What a data pipeline does with Megatron's own helper, in plain tensor operations; `packed` has the
shape legend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_patch.context_parallel.packed import at_least_one, documents_of


def packed_index(cu_padded: torch.Tensor, tokens: int, *, rank: int, size: int) -> torch.Tensor:
    """Global index, int64 [tokens / size], of every token ``rank`` holds, in its local order.

    Args:
        cu_padded: int32 [documents + 1] on any device; never read on the host.
        tokens: tokens of the whole pack, a multiple of ``size``.
    """
    assert tokens % size == 0, f"a pack of {tokens} tokens for {size} ranks"
    cu = at_least_one(cu_padded).long()
    here = torch.arange(tokens // size, device=cu.device)
    starts = cu // size
    document = documents_of(starts, here)
    first = cu[document]
    chunk = ((cu[document + 1] - first) // (2 * size)).clamp_(min=1)
    offset = here - starts[document]
    second = (offset >= chunk).long()
    piece = torch.where(second > 0, 2 * size - 1 - rank, rank)
    index = first + piece * chunk + offset - second * chunk
    end = starts[-1]
    tail = cu[-1] + rank * (tokens // size - end) + here - end
    return torch.where(here < end, index, tail)


def packed_positions(cu_padded: torch.Tensor, tokens: int, *, rank: int, size: int) -> torch.Tensor:
    """Position within its document, int64 [tokens / size], of every token ``rank`` holds.

    What rotary embeddings and position ids need. Tokens after the last document count from its end.
    """
    index = packed_index(cu_padded, tokens, rank=rank, size=size)
    cu = cu_padded.long()
    # Not `documents_of`: a token past the end belongs to no document and counts from cu[-1].
    return index - cu[(torch.searchsorted(cu, index, right=True) - 1).clamp_(0, cu.numel() - 1)]


def shard_packed(
    x: torch.Tensor, cu_padded: torch.Tensor, *, rank: int, size: int, dim: int = 0
) -> torch.Tensor:
    """The part of a packed ``x`` that ``rank`` of ``size`` ranks holds along ``dim``."""
    if size == 1:
        return x
    return x.index_select(dim, packed_index(cu_padded, x.shape[dim], rank=rank, size=size))


def unshard_packed(
    parts: Sequence[torch.Tensor], cu_padded: torch.Tensor, *, dim: int = 0
) -> torch.Tensor:
    """The whole pack from the parts of all ranks, in rank order."""
    size = len(parts)
    if size == 1:
        return parts[0]
    tokens = size * parts[0].shape[dim]
    index = [packed_index(cu_padded, tokens, rank=r, size=size) for r in range(size)]
    whole = torch.cat(list(parts), dim)
    return torch.empty_like(whole).index_copy_(dim, torch.cat(index), whole)

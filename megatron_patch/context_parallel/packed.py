"""Packed documents over context-parallel ranks: every document is cut in Megatron's zigzag order.

Shape legend: t tokens of the whole pack, n ranks; ``cu_padded`` int32 [documents + 1], offsets of
the padded documents in the whole pack (``PackedSeqParams.cu_seqlens_q_padded``). Each padded length
is a multiple of 2 n; rank r holds chunks r and 2 n - 1 - r of every document, document after
document. Tokens after the last document are shared out evenly, in order.

Transformer Engine's index helper does the same on a GPU; these are plain tensor operations that run
anywhere and never read a device value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def padded_lengths(lengths: Sequence[int], size: int) -> list[int]:
    """Each length rounded up to what ``size`` context-parallel ranks can share."""
    unit = 2 * size if size > 1 else 1
    return [-(-length // unit) * unit for length in lengths]


def padded_cu_seqlens(
    lengths: Sequence[int], size: int, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens, cu_seqlens_padded), int32 [documents + 1], of documents of these lengths."""
    zero = torch.zeros(1, dtype=torch.int32)
    real, padded = (
        torch.cat([zero, torch.tensor(x, dtype=torch.int32).cumsum(0, dtype=torch.int32)])
        for x in (list(lengths), padded_lengths(lengths, size))
    )
    return real.to(device), padded.to(device)


def at_least_one(cu: torch.Tensor) -> torch.Tensor:
    """Offsets ``cu``; those of a pack without documents get one that is empty, to be looked up."""
    return torch.cat([cu, cu]) if cu.numel() == 1 else cu


def documents_of(starts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Index of the document each token position belongs to; past the end: the last one."""
    last = starts.numel() - 2
    return (torch.searchsorted(starts, tokens, right=True) - 1).clamp_(0, max(0, last))


def packed_index(cu_padded: torch.Tensor, tokens: int, *, rank: int, size: int) -> torch.Tensor:
    """Global index, int64 [tokens / size], of every token ``rank`` holds, in its local order.

    Args:
        cu_padded: int32 [documents + 1] on any device; never read on the host.
        tokens: tokens of the whole pack.

    Raises ValueError: ``tokens`` is not a multiple of ``size``.
    """
    check_tokens(tokens, size)
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


def gathered_index(
    cu_padded: torch.Tensor, local_tokens: int, *, ranks: int, others: int = 1
) -> torch.Tensor:
    """Where the tokens of a group of ranks go when the group is treated as one rank.

    ``ranks`` neighbouring ranks of ``ranks * others`` each hold ``local_tokens`` tokens. Together
    they hold exactly what one of ``others`` ranks would. Returns int64 [ranks * local_tokens]:
    element u is the place, in the parts laid end to end, of token u of that larger rank. With
    ``others`` = 1 the larger rank is the whole pack in order. A permutation, whatever the offsets.
    """
    size = ranks * others
    cu = at_least_one(cu_padded).long()
    here = torch.arange(ranks * local_tokens, device=cu.device)
    starts = cu // others
    document = documents_of(starts, here)
    chunk = ((cu[document + 1] - cu[document]) // (2 * size)).clamp_(min=1)
    offset = here - starts[document]
    piece, within = offset // chunk, offset % chunk
    second = piece >= ranks
    source = torch.where(second, 2 * ranks - 1 - piece, piece)
    local = cu[document] // size + torch.where(second, chunk, 0) + within
    end = cu[-1] // size
    tail = (local_tokens - end).clamp(min=1)
    beyond = here - ranks * end
    in_tail = here >= ranks * end
    source = torch.where(in_tail, beyond // tail, source)
    local = torch.where(in_tail, end + beyond % tail, local)
    return source * local_tokens + local


def check_tokens(tokens: int, size: int) -> None:
    """ValueError unless ``size`` ranks can share ``tokens`` tokens."""
    if tokens % size:
        raise ValueError(
            f"a pack of {tokens} tokens cannot be shared by {size} context-parallel ranks; pad it "
            f"to {tokens + -tokens % size} (padded_lengths pads every document)"
        )

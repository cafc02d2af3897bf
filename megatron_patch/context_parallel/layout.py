"""Which tokens of a sequence a context-parallel rank holds: Megatron-Core's zigzag split.

A sequence is cut into 2 x cp equal chunks and rank r holds chunks r and 2 cp - 1 - r, so that under
a causal mask every rank has the same work. Rotary positions follow this layout inside
Megatron-Core, and so must the batch, the position ids and the mask: they come from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The two chunks of 2 x ``size`` that ``rank`` holds."""
    return rank, 2 * size - 1 - rank


def shard(x: torch.Tensor, *, rank: int, size: int, dim: int) -> torch.Tensor:
    """The part of ``x`` that ``rank`` of ``size`` context-parallel ranks holds along ``dim``.

    Raises ValueError: the length is not a multiple of 2 x ``size``.
    """
    if size == 1:
        return x
    length = x.shape[dim]
    if length % (2 * size):
        raise ValueError(
            f"sequence length {length} is not a multiple of 2 x {size} context-parallel ranks; "
            f"use {length - length % (2 * size)} or {length + -length % (2 * size)}"
        )
    pieces = x.chunk(2 * size, dim=dim)
    return torch.cat([pieces[c] for c in chunks_of(rank, size)], dim=dim)


def unshard(parts: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor:
    """The whole sequence from the parts of all ranks, in rank order."""
    size = len(parts)
    if size == 1:
        return parts[0]
    ordered: list[torch.Tensor | None] = [None] * (2 * size)
    for rank, part in enumerate(parts):
        for chunk, piece in zip(chunks_of(rank, size), part.chunk(2, dim=dim), strict=True):
            ordered[chunk] = piece
    return torch.cat([piece for piece in ordered if piece is not None], dim=dim)


def positions(
    length: int, *, rank: int, size: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Global positions, int64 [length / size], of the tokens ``rank`` holds."""
    return shard(torch.arange(length, device=device), rank=rank, size=size, dim=0)

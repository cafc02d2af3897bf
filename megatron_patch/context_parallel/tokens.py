"""Where the tokens of a shard lie, in the words of the chunk primitives.

Shape legend: s tokens of a dense shard ("sbhd": [s, b, heads, d]), t of a packed one ("thd":
[t, heads, d]); n ranks, of which this is ``rank``; documents: b of a pack.

A dense part is a slice of rows with one global position. A packed part is the whole buffer with
offsets: lengths, places in memory and global positions of each document's piece, all of them small
device tensors made without reading one on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_patch.context_parallel.layout import chunks_of
from megatron_patch.context_parallel.packed import at_least_one, documents_of, gathered_index
from megatron_patch.context_parallel.schedule import Part

Position = int | torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Some tokens of a tensor: rows of it, and which pieces of which documents they are."""

    rows: slice
    position: Position
    cu: torch.Tensor | None = None  # int32 [b + 1], lengths of the pieces as offsets
    starts: torch.Tensor | None = None  # int32 [b], where they begin in memory
    longest: int | None = None


def arguments(q: View, k: View, *, by_position: bool) -> dict[str, Any]:
    """Keywords of a chunk primitive for queries ``q`` on keys ``k``."""
    out: dict[str, Any] = {}
    if by_position:
        out |= {"q_position": q.position, "k_position": k.position}
    if q.cu is not None:
        out |= {
            "cu_seqlens_q": q.cu,
            "cu_seqlens_k": k.cu,
            "cu_seqlens_q_padded": q.starts,
            "cu_seqlens_k_padded": k.starts,
            "max_seqlen_q": q.longest,
            "max_seqlen_k": k.longest,
        }
    return out


Made = TypeVar("Made")


def remembered(method: Callable[..., Made]) -> Callable[..., Made]:
    """Keep what a method returned for these arguments for as long as its object lives."""

    @functools.wraps(method)
    def once(self: Any, *key: Any) -> Made:
        known = self.memory.get((method.__name__, *key))
        if known is None:
            known = self.memory[(method.__name__, *key)] = method(self, *key)
        return known

    return once


class Dense:
    """Shards [s, b, heads, d] of one sequence (the same cut for every batch row)."""

    layout = "sbhd"

    def __init__(self, *, length: int, size: int) -> None:
        """``length``: tokens of a shard, two chunks; ``size``: ranks."""
        self.size, self.length, self.chunk = size, length, length // 2

    def chunk_lengths(self) -> tuple[int, int]:
        """(shortest, longest) chunk; that of an empty sequence is planned for like any other."""
        return max(1, self.chunk), max(1, self.chunk)

    def local(self, rank: int, part: Part) -> View:
        """A part of a shard that holds both chunks of ``rank``."""
        first, second = chunks_of(rank, self.size)
        if part is Part.FIRST:
            return View(rows=slice(0, self.chunk), position=first * self.chunk)
        if part is Part.SECOND:
            return View(rows=slice(self.chunk, self.length), position=second * self.chunk)
        return View(rows=slice(0, self.length), position=first * self.chunk)

    def alone(self, rank: int, part: Part) -> View:
        """A chunk in a buffer of its own, as `take` makes it."""
        return View(rows=slice(0, self.chunk), position=self.local(rank, part).position)

    def side_by_side(self, rows: int) -> View:
        """Keys of several ranks in one buffer, all of them seen: positions do not matter."""
        return View(rows=slice(0, rows), position=0)

    def span(self, first: int, last: int) -> View:
        """Chunks [first, last) of the whole sequence in order."""
        # A rank alone may hold an odd number of tokens.
        end = self.length * self.size if last == 2 * self.size else last * self.chunk
        return View(rows=slice(first * self.chunk, end), position=first * self.chunk)

    def take(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        """One chunk of a shard (or the shard), contiguous."""
        return x[self.local(0, part).rows].contiguous()

    def rows_of(self, part: Part) -> int:
        return self.length if part is Part.BOTH else self.chunk

    def add(self, total: torch.Tensor, x: torch.Tensor, part: Part) -> None:
        """Add what `take` would have returned to its place in a shard."""
        total[self.local(0, part).rows].add_(x)

    def gather(self, parts: torch.Tensor) -> torch.Tensor:
        """Shards [ranks, s, ...] of neighbouring ranks as the shard of one rank of `larger`."""
        half = parts.shape[1] // 2
        return torch.cat([*parts[:, :half].unbind(0), *parts[:, half:].flip(0).unbind(0)], 0)

    def scatter(self, x: torch.Tensor, ranks: int) -> torch.Tensor:
        """Inverse of `gather`: [ranks, s, ...]."""
        low, high = x.unflatten(0, (2, ranks, -1)).unbind(0)
        return torch.cat([low, high.flip(0)], 1)

    def larger(self, ranks: int) -> Dense:
        """The geometry in which ``ranks`` neighbours count as one rank."""
        return Dense(length=self.length * ranks, size=self.size // ranks)

    def whole(self, part: Part) -> Part:
        """What of a shard travels back when ``part`` of it is asked for and no copy is wanted."""
        return part


class Packed:
    """Shards [t, heads, d] of a pack of documents, each cut like a sequence of its own."""

    layout = "thd"

    def __init__(
        self,
        *,
        cu: torch.Tensor,
        cu_padded: torch.Tensor,
        tokens: int,
        size: int,
        longest: int | None = None,
        padded: tuple[int, int] | None = None,
    ) -> None:
        """``cu``, ``cu_padded``: int32 [b + 1] of the whole pack; ``tokens`` of one shard.

        ``longest``: a bound of the real lengths. ``padded``: shortest and longest padded length of
        a document that is not empty. Both as far as the host knows them.
        """
        self.cu, self.cu_padded = at_least_one(cu), at_least_one(cu_padded)
        self.size, self.length = size, tokens
        self.longest, self.padded = longest, padded
        self._padded = self.cu_padded[1:] - self.cu_padded[:-1]
        self.memory: dict[Any, Any] = {}

    def chunk_lengths(self) -> tuple[int, int]:
        """(shortest, longest) chunk, as far as the host knows."""
        if self.padded is None:
            return 1, max(1, self.length // 2)
        return self.padded[0] // (2 * self.size), self.padded[1] // (2 * self.size)

    @remembered
    def _lengths(self, piece: int) -> torch.Tensor:
        """Real tokens of chunk ``piece`` of every document."""
        chunk = self._padded // (2 * self.size)
        real = self.cu[1:] - self.cu[:-1]
        zero = torch.zeros_like(chunk)
        return (real - piece * chunk).clamp(min=zero, max=chunk)

    @remembered
    def local(self, rank: int, part: Part) -> View:
        """A part of a shard that holds both chunks of ``rank``."""
        if self.size == 1 and part is Part.BOTH:
            return self.span(0, 2)  # Whole documents, whose lengths may be odd.
        first, second = chunks_of(rank, self.size)
        chunk = self._padded // (2 * self.size)
        starts = self.cu_padded[:-1] // self.size
        if part is Part.BOTH:
            # A document's second chunk has tokens only if its first is full: one prefix.
            lengths = self._lengths(first) + self._lengths(second)
            return self._view(lengths, starts, first * chunk, halves=2)
        if part is Part.SECOND:
            return self._view(self._lengths(second), starts + chunk, second * chunk)
        return self._view(self._lengths(first), starts, first * chunk)

    @remembered
    def alone(self, rank: int, part: Part) -> View:
        """A chunk in a buffer of its own, as `take` makes it."""
        there = self.local(rank, part)
        return View(
            rows=slice(None),
            position=there.position,
            cu=there.cu,
            starts=(self.cu_padded[:-1] // (2 * self.size)).contiguous(),
            longest=there.longest,
        )

    def span(self, first: int, last: int) -> View:
        """The whole pack in order: every document from its start."""
        zero = torch.zeros_like(self.cu[:-1])
        return View(
            rows=slice(None),
            position=zero,
            cu=self.cu,
            starts=self.cu_padded[:-1].contiguous(),
            longest=self._longest_document(),
        )

    def _longest_document(self) -> int:
        known = [x for x in (self.longest, self.padded and self.padded[1]) if x is not None]
        return min([self.length * self.size, *known])

    def _view(
        self, lengths: torch.Tensor, starts: torch.Tensor, position: torch.Tensor, halves: int = 1
    ) -> View:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])
        bounds = [self.length, self.chunk_lengths()[1] * halves]
        if self.longest is not None:
            bounds.append(self.longest)
        return View(
            rows=slice(None),
            position=position.contiguous(),
            cu=offsets,
            starts=starts.contiguous(),
            longest=min(bounds),
        )

    @remembered
    def _index(self, part: Part) -> torch.Tensor:
        """Local tokens of one chunk of every document, chunk after chunk; repeats at the end."""
        here = torch.arange(self.rows_of(part), device=self.cu.device)
        starts = self.cu_padded.long() // (2 * self.size)
        document = documents_of(starts, here)
        # A document's first chunk begins at 2 * start, its second one chunk later.
        chunk = starts[document + 1] - starts[document]
        index = here + starts[document] + (chunk if part is Part.SECOND else 0)
        return index.clamp_(max=self.length - 1)

    def take(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        """One chunk of every document (or the shard), contiguous."""
        return x.contiguous() if part is Part.BOTH else x.index_select(0, self._index(part))

    def rows_of(self, part: Part) -> int:
        return self.length if part is Part.BOTH else self.length // 2

    def add(self, total: torch.Tensor, x: torch.Tensor, part: Part) -> None:
        """Add what `take` would have returned to its place in a shard."""
        if part is Part.BOTH:
            total.add_(x)
        else:
            # Repeated places take rows of no document, which are zero.
            total.index_add_(0, self._index(part), x)

    def gather(self, parts: torch.Tensor) -> torch.Tensor:
        """Shards [ranks, t, ...] of neighbouring ranks as the shard of one rank of `larger`."""
        return parts.flatten(0, 1).index_select(0, self._permutation(parts.shape[0]))

    def scatter(self, x: torch.Tensor, ranks: int) -> torch.Tensor:
        index = self._permutation(ranks)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return out.index_copy_(0, index, x).unflatten(0, (ranks, -1))

    @remembered
    def _permutation(self, ranks: int) -> torch.Tensor:
        return gathered_index(self.cu_padded, self.length, ranks=ranks, others=self.size // ranks)

    def larger(self, ranks: int) -> Packed:
        """The geometry in which ``ranks`` neighbours count as one rank."""
        return Packed(
            cu=self.cu,
            cu_padded=self.cu_padded,
            tokens=self.length * ranks,
            size=self.size // ranks,
            longest=self.longest,
            padded=self.padded,
        )

    def whole(self, part: Part) -> Part:
        """What of a shard travels back when ``part`` of it is asked for and no copy is wanted."""
        return Part.BOTH


Tokens = Dense | Packed

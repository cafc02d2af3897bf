"""Which (query chunk, key chunk) pairs a context-parallel rank computes, and whose keys it needs.

A sequence is 2 n chunks over n ranks; rank r holds chunk r (`Part.FIRST`) and chunk 2 n - 1 - r
(`Part.SECOND`). Everything here follows from n, the mask and the chunk length, and touches no
tensor. The communication modes differ in how keys and values arrive; what is computed on them is
decided here alone.

Visibility: a query at position p sees keys p - left .. p + right, both ends included, -1 for no
bound; causal is right = 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_patch.context_parallel.layout import chunks_of


class Part(enum.IntEnum):
    """Which of a rank's two chunks: `BOTH` is the whole local shard."""

    FIRST = 0
    SECOND = 1
    BOTH = 2


class Mask(enum.Enum):
    """What a pair still has to mask."""

    NONE = "none"
    """Every query sees every key."""
    LOCAL = "local"
    """Causal in local order, which for a rank's own shard is the same as in global order."""
    GLOBAL = "global"
    """The mask of the whole sequence, by global positions."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One kernel launch: queries of one part against keys of one part of a rank's shard."""

    q: Part
    k: Part
    mask: Mask


@dataclass(frozen=True, slots=True)
class Span:
    """Queries of one part against chunks [first, last) of the whole sequence in order."""

    q: Part
    first: int
    last: int
    mask: Mask


@dataclass(frozen=True, slots=True)
class Bounds:
    """The mask of the whole sequence; -1 is no bound."""

    left: int
    right: int

    @property
    def causal(self) -> bool:
        return self.left < 0 and self.right == 0

    def distances(self, low: int, high: int) -> tuple[bool, bool]:
        """(any, all) of key - query distances low..high visible."""
        left = low if self.left < 0 else -self.left
        right = high if self.right < 0 else self.right
        return (high >= left and low <= right, low >= left and high <= right)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The pairs of rank ``rank`` of ``size``.

    ``short`` and ``long`` bound the length of a chunk: equal for a dense sequence, the extremes
    over the documents of a pack (1 and a large number where the host does not know them).
    ``by_position`` keeps the two chunks apart even where no mask needs it: dropout is keyed by
    global positions, and those of a rank's two chunks are not consecutive.
    """

    size: int
    rank: int
    bounds: Bounds
    short: int
    long: int
    by_position: bool

    @property
    def unmasked(self) -> bool:
        """Whether every launch on another rank's keys is free of masks, for all ranks alike."""
        return self.bounds.left < 0 and self.bounds.right in (-1, 0) and not self.by_position

    def sees(self, query_chunk: int, key_chunk: int) -> tuple[bool, bool]:
        """(some pair, every pair) of two chunks is visible."""
        some, every = [], []
        for length in {self.short, self.long}:
            low = (key_chunk - query_chunk - 1) * length + 1
            high = (key_chunk - query_chunk + 1) * length - 1
            one, all_ = self.bounds.distances(low, high)
            some.append(one)
            every.append(all_)
        return any(some), all(every)

    def needs(self, reader: int, source: int) -> Part | None:
        """Which keys of ``source`` rank ``reader`` has to see; None for none at all."""
        queries = chunks_of(reader, self.size)
        first, second = (
            any(self.sees(q, k)[0] for q in queries) for k in chunks_of(source, self.size)
        )
        if first and second:
            return Part.BOTH
        return Part.FIRST if first else Part.SECOND if second else None

    def pairs(self, source: int) -> tuple[Pair, ...]:
        """The launches of this rank on the keys of ``source``, as few as the mask allows."""
        queries, keys = chunks_of(self.rank, self.size), chunks_of(source, self.size)
        some = [[self.sees(q, k)[0] for k in keys] for q in queries]
        every = [[self.sees(q, k)[1] for k in keys] for q in queries]
        if not self.by_position:
            if self.bounds.causal and source == self.rank:
                return (Pair(Part.BOTH, Part.BOTH, Mask.LOCAL),)
            if all(every[0]) and all(every[1]):
                return (Pair(Part.BOTH, Part.BOTH, Mask.NONE),)
            for k in (0, 1):
                if every[0][k] and every[1][k] and not some[0][1 - k] and not some[1][1 - k]:
                    return (Pair(Part.BOTH, Part(k), Mask.NONE),)
        out: list[Pair] = []
        for q in (0, 1):
            if all(every[q]) and not self.by_position:
                out.append(Pair(Part(q), Part.BOTH, Mask.NONE))
                continue
            out += [Pair(Part(q), Part(k), self._mask(every[q][k])) for k in (0, 1) if some[q][k]]
        return tuple(out)

    def spans(self) -> tuple[Span, ...]:
        """The launches of this rank on the whole sequence's keys in order, one a query chunk."""
        total = 2 * self.size
        if self.size == 1:
            return (Span(Part.BOTH, 0, total, Mask.GLOBAL),)
        found = []
        for part, chunk in zip(
            (Part.FIRST, Part.SECOND), chunks_of(self.rank, self.size), strict=True
        ):
            seen = [k for k in range(total) if self.sees(chunk, k)[0]]
            # All chunks of the sequence and not only those in the span: a pack hands out whole
            # documents, so what lies outside the span is hidden by the mask alone. This costs no
            # launch its speed: part of a sequence is fully visible only to chunks of one token.
            every = all(self.sees(chunk, k)[1] for k in range(total))
            found.append(Span(part, seen[0], seen[-1] + 1, self._mask(every)))
        one, two = found
        alike = (one.first, one.last, one.mask) == (two.first, two.last, two.mask)
        if alike and one.mask is Mask.NONE:
            return (Span(Part.BOTH, one.first, one.last, Mask.NONE),)
        return tuple(found)

    def _mask(self, every: bool) -> Mask:
        return Mask.NONE if every and not self.by_position else Mask.GLOBAL

"""The schedule against brute force over positions: nothing missing, nothing sent in vain."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patch.context_parallel.layout import chunks_of, positions
from megatron_patch.context_parallel.schedule import Bounds, Mask, Part, Schedule

BOUNDS = st.builds(Bounds, st.integers(-1, 40), st.integers(-1, 40))


def seen(bounds: Bounds, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Boolean [queries, keys] by the definition."""
    distance = k[None, :] - q[:, None]
    ok = torch.ones_like(distance, dtype=torch.bool)
    if bounds.left >= 0:
        ok &= distance >= -bounds.left
    if bounds.right >= 0:
        ok &= distance <= bounds.right
    return ok


def halves(rank: int, size: int, chunk: int) -> list[torch.Tensor]:
    return [torch.arange(c * chunk, (c + 1) * chunk) for c in chunks_of(rank, size)]


def picked(part: Part, of: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(of) if part is Part.BOTH else of[part]


def covered(plan: Schedule, source: int, chunk: int) -> torch.Tensor:
    """How often every (local query, key of source) pair is computed."""
    size = plan.size
    queries, keys = halves(plan.rank, size, chunk), halves(source, size, chunk)
    mine, theirs = positions(2 * size * chunk, rank=plan.rank, size=size), torch.cat(keys)
    count = torch.zeros(len(mine), len(theirs), dtype=torch.int64)
    for pair in plan.pairs(source):
        q, k = picked(pair.q, queries), picked(pair.k, keys)
        if pair.mask is Mask.NONE:
            ok = torch.ones(len(q), len(k), dtype=torch.bool)
        elif pair.mask is Mask.LOCAL:
            ok = torch.ones(len(q), len(k), dtype=torch.bool).tril()
        else:
            assert pair.q is not Part.BOTH and pair.k is not Part.BOTH
            ok = seen(plan.bounds, q, k)
        count += ok[torch.searchsorted(q, mine).clamp(max=len(q) - 1)][
            :, torch.searchsorted(k, theirs).clamp(max=len(k) - 1)
        ] * (torch.isin(mine, q)[:, None] & torch.isin(theirs, k)[None, :])
    return count


@given(st.sampled_from([2, 3, 4]), st.integers(1, 9), BOUNDS, st.booleans())
@settings(max_examples=150)
def test_every_visible_pair_once_and_no_chunk_in_vain(size, chunk, bounds, by_position):
    for rank in range(size):
        plan = Schedule(size, rank, bounds, short=chunk, long=chunk, by_position=by_position)
        mine = positions(2 * size * chunk, rank=rank, size=size)
        for source in range(size):
            keys = halves(source, size, chunk)
            want = seen(bounds, mine, torch.cat(keys))
            assert torch.equal(covered(plan, source, chunk), want.long())
            # What is sent: exactly the chunks of which some query sees something.
            needed = [bool(seen(bounds, mine, k).any()) for k in keys]
            part = plan.needs(rank, source)
            sent = {None: [False, False], Part.BOTH: [True, True]}.get(
                part, [part is Part.FIRST, part is Part.SECOND]
            )
            assert sent == needed


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 9), BOUNDS, st.booleans())
@settings(max_examples=100)
def test_spans_cover_what_is_visible(size, chunk, bounds, by_position):
    total = 2 * size * chunk
    for rank in range(size):
        plan = Schedule(size, rank, bounds, short=chunk, long=chunk, by_position=by_position)
        queries = halves(rank, size, chunk)
        for span in plan.spans():
            q = picked(span.q, queries)
            ok = seen(bounds, q, torch.arange(total))
            inside = torch.zeros(total, dtype=torch.bool)
            inside[span.first * chunk : span.last * chunk] = True
            assert not ok[:, ~inside].any()
            if span.mask is Mask.NONE:
                # Also outside: of a pack the span hands out whole documents (`Packed.span`).
                assert ok.all()


def test_spans_without_a_mask_stay_whole_launches():
    """No bound at all, in a dense sequence as in a pack of unknown lengths."""
    for short in (1, 8):
        plan = Schedule(4, 1, Bounds(-1, -1), short=short, long=8, by_position=False)
        (span,) = plan.spans()
        assert (span.q, span.first, span.last, span.mask) == (Part.BOTH, 0, 8, Mask.NONE)


@given(st.sampled_from([2, 4]), st.integers(1, 6), st.integers(0, 6), BOUNDS)
@settings(max_examples=100)
def test_unknown_lengths_only_add(size, short, extra, bounds):
    """Documents of several lengths: what any of them needs is sent, and no mask is dropped."""
    long = short + extra
    for rank in range(size):
        loose = Schedule(size, rank, bounds, short=short, long=long, by_position=False)
        for source in range(size):
            for chunk in range(short, long + 1):
                tight = Schedule(size, rank, bounds, short=chunk, long=chunk, by_position=False)
                need = tight.needs(rank, source)
                assert need is None or loose.needs(rank, source) in (need, Part.BOTH)
                assert torch.equal(
                    (covered(loose, source, chunk) > 0).long(), covered(tight, source, chunk)
                )


def test_the_usual_causal_ring_is_one_launch_a_step():
    causal = Bounds(-1, 0)
    for rank in range(4):
        plan = Schedule(4, rank, causal, short=8, long=8, by_position=False)
        for source in range(4):
            (pair,) = plan.pairs(source)
            want = {
                -1: (Part.BOTH, Part.FIRST, Mask.NONE),
                0: (Part.BOTH, Part.BOTH, Mask.LOCAL),
                1: (Part.SECOND, Part.BOTH, Mask.NONE),
            }[(source > rank) - (source < rank)]
            assert (pair.q, pair.k, pair.mask) == want

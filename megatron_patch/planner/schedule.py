"""The order of forward and backward passes on one pipeline rank, as Megatron-Core runs them.

1F1B and its interleaved form: Narayanan et al. 2021, arXiv:2104.04473, sec. 2.2. Rank p of pp
starts with ``pp - p - 1`` forward passes (interleaved: ``2 (pp - p - 1) + (v - 1) pp`` of chunks),
then does one forward and one backward pass in turn, then the remaining backward passes.
"""

from __future__ import annotations

from collections.abc import Iterator

FORWARD, BACKWARD = "forward", "backward"


def passes(
    stage: int, stages: int, *, virtual: int, micro_batches: int
) -> Iterator[tuple[str, int]]:
    """(FORWARD or BACKWARD, chunk) in the order of rank ``stage``; ``virtual`` chunks a rank."""
    total = micro_batches * virtual
    if virtual == 1:
        warm = stages - stage - 1
    else:
        warm = 2 * (stages - stage - 1) + (virtual - 1) * stages
    warm = min(warm, total)
    for k in range(warm):
        yield FORWARD, _chunk(k, stages, virtual)
    for k in range(total - warm):
        yield FORWARD, _chunk(warm + k, stages, virtual)
        yield BACKWARD, virtual - 1 - _chunk(k, stages, virtual)
    for k in range(total - warm, total):
        yield BACKWARD, virtual - 1 - _chunk(k, stages, virtual)


def _chunk(k: int, stages: int, virtual: int) -> int:
    """Chunk of the k-th forward pass: groups of ``stages`` micro-batches visit chunk by chunk."""
    return k % (stages * virtual) // stages


def in_flight(stage: int, stages: int, *, virtual: int, micro_batches: int) -> int:
    """Largest number of forward passes (of chunks) that wait for their backward pass."""
    waiting = most = 0
    for what, _ in passes(stage, stages, virtual=virtual, micro_batches=micro_batches):
        waiting += 1 if what == FORWARD else -1
        most = max(most, waiting)
    return most


def bubble(stages: int, *, virtual: int, micro_batches: int) -> float:
    """Idle share of a step, over its ideal time: (pp - 1) / (v m) (Narayanan et al., sec. 2.2)."""
    return (stages - 1) / (virtual * micro_batches)

"""Small values between the ranks of the default process group; without one this process is alone.

What the first rank finds out, every rank goes by: results and refusals alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _started() -> Any:
    """`torch.distributed` where it has a process group; planning runs without importing it."""
    import torch.distributed as dist

    return dist if dist.is_available() and dist.is_initialized() else None


def from_first(value: Any) -> Any:
    """What rank 0 gives, on all ranks. Collective."""
    box, dist = [value], _started()
    if dist is not None:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def of_all[T](value: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    dist = _started()
    if dist is None:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first_rank[T](
    work: Callable[[], T],
    *errors: type[Exception],
    rank: int,
    to_all: Callable[[Any], Any] = from_first,
) -> T:
    """What ``work`` returns on the first rank, where alone it is called. Collective.

    Args:
        errors: raised on every rank when ``work`` raises them. Any other ends the first rank alone.
        rank: this one.
        to_all: the first rank's value, on every rank; default: over the process group.
    """
    result: Any = None
    problem: Exception | None = None
    if rank == 0:
        try:
            result = work()
        except errors as error:
            problem = error
    result, problem = to_all((result, problem))
    if problem is not None:
        raise problem
    return result

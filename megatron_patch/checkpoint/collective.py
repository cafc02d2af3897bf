"""The three collectives the checkpoint store needs, so that it knows nothing of torch.

Objects are small (digests, reasons, lists of names) and travel pickled between the ranks of one
job; nothing that comes from a checkpoint file is ever unpickled by them.
"""

from __future__ import annotations

from typing import Any


class Collective:
    """Ranks of one job that take every decision together: here a job of one rank.

    All ranks call every method, in the same order.
    """

    rank: int = 0
    size: int = 1

    def all_gather(self, value: Any) -> list[Any]:
        """One value of every rank, in rank order, on every rank."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value

    def barrier(self) -> None:
        """Return once every rank has called it."""


class TorchCollective(Collective):
    """All ranks of ``torch.distributed``, over a gloo group of their own. Collective.

    Gloo on GPUs too: these messages must not queue behind the training's NCCL streams, and a save
    that runs in the background must not touch the device.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        box = [value]
        self._dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)


def make_collective() -> Collective:
    """All ranks of the running job, or a single process where none is initialized."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Collective()
    return TorchCollective()

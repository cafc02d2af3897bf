"""The three collectives the checkpoint store needs, so that it knows nothing of torch.

Objects are small (digests, reasons, lists of names) and travel pickled between the ranks of one
job; nothing that comes from a checkpoint file is ever unpickled by them.
"""

from __future__ import annotations

from typing import Any, Protocol


class Collective(Protocol):
    """Ranks of one job that take every decision together."""

    rank: int
    size: int

    def all_gather(self, value: Any) -> list[Any]:
        """One value of every rank, in rank order, on every rank."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...


class SingleProcess:
    """A job of one rank."""

    rank = 0
    size = 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        return None


class TorchCollective:
    """``torch.distributed`` over a gloo group of all ranks.

    Gloo on GPUs too: these messages must not queue behind the training's NCCL streams, and a save
    that runs in the background must not touch the device.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self._first: int = dist.get_global_rank(group, 0) if group is not None else 0

    def all_gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=self._first, group=self.group)
        return box[0]

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.group)


def make_collective() -> Collective:
    """All ranks of the running job over gloo, or a single process where none is initialized."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SingleProcess()
    return TorchCollective(dist.new_group(backend="gloo"))

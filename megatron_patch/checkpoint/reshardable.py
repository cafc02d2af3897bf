"""Optimizer state for any layout, without any rank holding more than its share.

Core's ``fully_reshardable`` stores moments and main weights as whole parameters, which is what any
layout can load. Core 0.19.2 makes them by collecting all of a model-parallel shard on every
data-parallel rank: 12 bytes a parameter of the shard in host memory, on every rank, at a save and
at a load, and one rank writes all of it. With several communication buckets it also saves *wrong
values*: it drops the padding at the end of each bucket and then cuts parameters out at offsets that
count it. Here the same names, shapes and bits are made otherwise:

* saving: the rank that holds most of a parameter receives the rest of it, and writes it. A slice
  of the buffer cuts few parameters, so little travels (gloo, host memory), and all ranks write;
* loading: a rank asks for the parameters it holds a part of, and for no others.

Both replace one method of core's DistributedOptimizer while a request is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_patch.checkpoint.optimizer_state import parts
from megatron_patch.core_patches.replace import patched

METHOD = "sharded_param_state_fully_reshardable"
PREFIX = "optimizer.state"
MESSAGE = 1 << 26
"""Elements sent at once: 256 MiB."""


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter of a buffer and who holds it."""

    index: int
    """Core's number of the parameter, by which it finds it again at a load."""
    parameter: Any
    shares: tuple[tuple[int, int], ...]
    """(data-parallel rank, elements), in the order of the elements."""

    @property
    def owner(self) -> int:
        """The rank that writes it: the one with most of it, the first of those."""
        return max(self.shares, key=lambda share: (share[1], -share[0]))[0]


def places(part: Any) -> Iterator[Place]:
    """Every parameter of a DistributedOptimizer, in core's order; the same on all its ranks."""
    ranks = part.data_parallel_group.size()
    index = 0
    for buffer in part.buffers:
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            length = bucket.grad_data.numel() // ranks
            low, high = start - bucket.offset, end - bucket.offset
            shares = tuple(
                (rank, min(high, (rank + 1) * length) - max(low, rank * length))
                for rank in range(low // length, (high - 1) // length + 1)
            )
            yield Place(index, parameter, shares)
            index += 1


@contextmanager
def fitting(optimizer: Any) -> Iterator[None]:
    """Let the DistributedOptimizers inside ``optimizer`` build requests as described above."""
    sharded = [part for part in parts(optimizer) if hasattr(part, METHOD)]
    with patched(*((part, METHOD, _method(part)) for part in sharded)):
        yield


def _method(part: Any) -> Callable[..., dict[int, dict[str, Any]]]:
    def state(
        model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[int, dict[str, Any]]:
        return _request(part, _described(model_sharded_state_dict), loading=is_loading)

    return state


def _described(model: Any) -> dict[Any, Any]:
    """Name, global shape and offsets of every parameter, by the parameter."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded, _ = extract_sharded_tensors_and_factories(model)
    return {entry.data: entry for entry in nested_values(sharded)}


def _keys(part: Any) -> tuple[str, ...]:
    return ("param", *part.optimizer_state_keys)


def _entry(like: Any, key: str, data: torch.Tensor, *, replica: int) -> Any:
    """The sharded tensor of one ``key`` of state (``exp_avg`` ...), placed as ``like`` is.

    ``replica`` is 0 for the rank that speaks for the parameter in its data-parallel group.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    kind = {} if isinstance(like, ShardedTensorFactory) else {"dtype": data.dtype}
    entry = replace(
        like,
        key=f"{PREFIX}.{key}.{like.key}",
        data=data,
        replica_id=(*like.replica_id[:2], replica),
        **kind,
    )
    entry.validate_metadata_integrity()
    return entry


def _request(part: Any, described: dict[Any, Any], *, loading: bool) -> dict[int, dict[str, Any]]:
    """For a save the parameters this rank writes, whole: collective in the data-parallel group.

    For a load (``loading``) room for the parameters of which this rank holds a part; local.
    """
    rank, slices = part.data_parallel_group.rank(), _Slices(part)
    state: dict[int, dict[str, Any]] = {}
    for place in places(part):
        holders = [share[0] for share in place.shares]
        if rank not in holders:
            continue
        like, found, replica = described[place.parameter], {}, 0
        if loading:
            replica = holders.index(rank)
            found = {key: torch.empty(like.data.shape, dtype=torch.float32) for key in _keys(part)}
        else:
            tensors = part._get_main_param_and_optimizer_states(place.parameter)
            for key in _keys(part):
                if place.owner == rank:
                    found[key] = slices.collect(tensors[key], place).view(like.data.shape)
                else:
                    slices.send(tensors[key], place.owner)
        if found:
            state[place.index] = {
                key: _entry(like, key, data, replica=replica) for key, data in found.items()
            }
    slices.wait()
    return state


class _Slices:
    """Slices on their way between the ranks of a data-parallel group.

    All ranks go through the parameters in one order, so that what one sends and the other expects
    match; nothing is waited for before everything is on its way.
    """

    def __init__(self, part: Any) -> None:
        self._group = part.data_parallel_group_gloo
        self._rank = part.data_parallel_group.rank()
        self._waiting: list[Any] = []
        self._sent: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a slice to the rank that writes the parameter."""
        slice_ = tensor.detach().float().cpu().contiguous()
        self._sent.append(slice_)  # until it is sent
        for piece in slice_.split(MESSAGE):
            self._waiting.append(torch.distributed.isend(piece, group=self._group, group_dst=rank))

    def collect(self, mine: torch.Tensor, place: Place) -> torch.Tensor:
        """The whole parameter, flat: this rank's slice, and room that others' fill by `wait`."""
        mine = mine.detach().float()
        if len(place.shares) == 1:
            return mine
        whole = torch.empty(sum(count for _, count in place.shares), dtype=torch.float32)
        slices = whole.split([count for _, count in place.shares])
        for (rank, _), slice_ in zip(place.shares, slices, strict=True):
            if rank == self._rank:
                slice_.copy_(mine)
                continue
            for piece in slice_.split(MESSAGE):
                self._waiting.append(
                    torch.distributed.irecv(piece, group=self._group, group_src=rank)
                )
        return whole

    def wait(self) -> None:
        """Until everything has arrived."""
        for work in self._waiting:
            work.wait()
        self._sent.clear()

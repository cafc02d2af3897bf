"""Megatron-Core's data-parallel wrappers: the model inside, and this rank's own part of buffers."""

from __future__ import annotations

from typing import Any

import torch


def unwrap(chunk: Any) -> Any:
    """The model inside precision and data-parallel wrappers, which hold it as ``module``."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def own_values(buffer: Any) -> list[tuple[torch.nn.Parameter, int, int]]:
    """(parameter, first, last) of the buffer's values whose reduced gradient this rank counts.

    With the distributed optimizer its shard of every bucket; else all of them, on the first rank.
    """
    group = buffer.data_parallel_group
    rank, size = group.rank(), group.size()
    if not buffer.ddp_config.use_distributed_optimizer:
        if rank != 0:
            return []
        return [(p, *buffer.param_index_map[p][:2]) for p in buffer.params]
    shards = []
    for bucket in buffer.buckets:
        length = bucket.grad_data.numel() // size
        first = bucket.offset + rank * length
        shards.append((first, first + length))
    found = []
    for parameter in buffer.params:
        begin, end, bucket = buffer.param_index_map[parameter]
        low, high = max(begin, shards[bucket][0]), min(end, shards[bucket][1])
        if low < high:
            found.append((parameter, low, high))
    return found

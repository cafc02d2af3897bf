"""Scenarios of ranks that share one optimizer: what each holds, and where parameters lie."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import scenarios
import torch

from megatron_patch.checkpoint import content, host_memory, reshardable, writer
from megatron_patch.checkpoint.errors import CheckpointError
from megatron_patch.checkpoint.train_state import TrainState


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _requested(state: Any) -> list[torch.Tensor]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded, _ = extract_sharded_tensors_and_factories(state["optimizer"])
    return [entry.data for entry in nested_values(sharded)]


def shares(root: str, *, changes: dict[str, Any]) -> dict[str, Any]:
    """Bytes that this rank writes at a save and makes room for at a load, and what was foreseen."""
    run = scenarios.config(**changes)
    live = scenarios.Live(run, root)
    live.train(1, 1)
    foreseen = host_memory.of_rank(live.checkpointer.parts, run.checkpoint.optimizer_sharding)
    with mock.patch.object(host_memory, "limit", return_value=1000):
        line, problems = host_memory.check(
            live.checkpointer.parts, run.checkpoint.optimizer_sharding, live.checkpointer.ranks
        )
    written: list[tuple[str, torch.Tensor]] = []
    stage, add = writer.Plan.stage, content.add_optimizer

    def stage_and_count(self: Any, *, copy: bool) -> None:
        stage(self, copy=copy)
        for _, _, (_, tensors) in self._buckets:
            written.extend((item.index.fqn, t) for item, t in tensors)

    requested: list[torch.Tensor] = []

    def add_and_count(state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        add(state, *args, **kwargs)
        requested[:] = _requested(state)

    with mock.patch.object(writer.Plan, "stage", stage_and_count):
        live.checkpointer.save(TrainState(step=1))
    with mock.patch.object(content, "add_optimizer", add_and_count):
        live.checkpointer.load()
    sizes = [p.numel() for chunk in live.chunks for p in chunk.parameters()]
    return {
        "parameters": sum(sizes),
        "largest": max(sizes),
        "written": _bytes(t for name, t in written if "optimizer." in name),
        "staged": _bytes(t for _, t in written),
        "foreseen": foreseen,
        "line": line,
        "problems": [f"{problem.path}: {problem.message}" for problem in problems],
        "requested": _bytes(requested),
    }


def several_buckets(root: str, *, bucket: int, core: bool, precision: str) -> dict[str, Any]:
    """Train with small communication buckets, save (as ``core`` does), spoil the state, load."""
    from megatron.core.distributed import DistributedDataParallelConfig

    run = scenarios.config(
        "dp", parallel={"overlap_grad_reduce": True}, training={"precision": precision}
    )
    small = partial(DistributedDataParallelConfig, bucket_size=bucket)
    with mock.patch("megatron.core.distributed.DistributedDataParallelConfig", small):
        live = scenarios.Live(run, root)
    live.chunks[0].config.no_sync_func = live.chunks[0].no_sync
    live.train(1, 2)
    with mock.patch.object(reshardable, "fitting", nullcontext) if core else nullcontext():
        live.checkpointer.save(TrainState(step=2))
    before = live.moments()
    for part in live.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].fill_(7.0)
    try:
        live.checkpointer.load()
    except CheckpointError as error:
        return {"error": str(error)}
    buckets = live.chunks[0].buffers[0].buckets
    return {
        "before": before,
        "after": live.moments(),
        "buckets": len(buckets),
        "padded": sum(b.grad_data.numel() - b.numel_unpadded for b in buckets),
    }

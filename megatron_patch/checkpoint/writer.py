"""Writing a sharded state dict through ``megatron.core.dist_checkpointing``, step by step.

Core plans (collective), this module writes (local, in this thread or another) and finishes (rank 0
writes the index). Taken apart because core's own sequence hangs when one rank fails between two of
its barriers, starts a helper process for one queue, and offers background writing only by forking a
process that holds CUDA and network state. A thread needs neither: writing releases Python's lock.
"""

from __future__ import annotations

import queue
import warnings
from pathlib import Path
from typing import Any

import torch

from megatron_patch.checkpoint.errors import BadCheckpoint
from megatron_patch.checkpoint.safe_reader import inspect_archive

BACKEND, BACKEND_VERSION = "torch_dist", 1
INDEX, FORMAT = ".metadata", "metadata.json"


class Plan:
    """What this rank writes for one checkpoint."""

    def __init__(self, writer: Any, metadata: Any) -> None:
        self._writer = writer
        self._metadata = metadata  # of the whole checkpoint; rank 0 only
        self._buckets: list[Any] = list(writer.write_buckets)
        self._results: list[Any] = []

    @property
    def names(self) -> list[str]:
        """Files of this rank."""
        return [bucket[1] for bucket in self._buckets]

    def stage(self, *, copy: bool) -> None:
        """Bring tensors to host memory; ``copy`` also those that are there already.

        With ``copy`` training may go on and change the originals while `write` runs.

        Raises BadCheckpoint: an object could not be loaded again, because it is more than data.
        """
        staged = []
        for path, name, (objects, tensors) in self._buckets:
            for item, data in objects:
                try:
                    inspect_archive(data, len(data.getbuffer()))
                except BadCheckpoint as bad:
                    raise BadCheckpoint(bad.kind, f"{item.index.fqn}: {bad.reason}") from None
            host = [(item, t.detach().to("cpu", copy=copy or t.is_cuda)) for item, t in tensors]
            staged.append((path, name, (objects, host)))
        self._buckets = staged

    def write(self) -> None:
        """Write and fsync this rank's files.

        Raises OSError: and whatever else writing raises.
        """
        for index, bucket in enumerate(self._buckets):
            answer = self._writer.write_preloaded_data(
                [self._writer.transforms],
                index,
                bucket,
                results_queue=None,
                count_queue=None,
                use_fsync=True,
            )
            if isinstance(answer[1], BaseException):
                raise answer[1]
            self._results += answer[1]
        self._buckets = [(path, name, ([], [])) for path, name, _ in self._buckets]

    @property
    def results(self) -> list[Any]:
        """Where in which file every item lies; the index is made of all ranks' results."""
        return self._results

    def finish(self, results: list[list[Any]], folder: Path) -> list[str]:
        """Rank 0, after every rank's `write`: the index; returns the names of the files written."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(BACKEND, BACKEND_VERSION), str(folder))
        return [INDEX, FORMAT]


def plan(state: dict[str, Any], folder: Path) -> Plan:
    """Plan who writes what. Collective; ``state`` is consumed."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    made: list[Plan] = []

    class Planner(TorchDistSaveShardedStrategy):
        def _get_save_and_finalize_callbacks(
            self, writer: Any, save_state_dict_ret: Any, async_strategy: str
        ) -> Any:
            made.append(Plan(writer, save_state_dict_ret[1]))
            return AsyncRequest(None, (), [])

    # Core would start a manager process for a queue that is not used here.
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # about their own future
        dist_checkpointing.save(
            state, str(folder), Planner(), async_sharded_save=True, async_strategy="mcore"
        )
    return made[0]

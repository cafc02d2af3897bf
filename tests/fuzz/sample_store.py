"""A store of small checkpoints, also for the child process whose save is killed."""

from __future__ import annotations

import random
from pathlib import Path

from megatron_patch.checkpoint.manifest import PAGE_BYTES
from megatron_patch.checkpoint.store import CheckpointStore

SHARDS = {"__0_0.distcp": 2 * PAGE_BYTES + 4321, "__1_0.distcp": 70_000, ".metadata": 3_000}


def write_files(folder: Path, step: int) -> list[str]:
    """Shards that differ from step to step, as a writer would leave them."""
    noise = random.Random(step)
    for name, size in SHARDS.items():
        (folder / name).write_bytes(noise.randbytes(size))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return [*SHARDS, "metadata.json"]


def save(store: CheckpointStore, step: int) -> Path:
    """One complete checkpoint."""
    attempt = store.begin(step)
    return store.commit(attempt, store.hash_files(attempt, write_files(attempt.path, step)), {})

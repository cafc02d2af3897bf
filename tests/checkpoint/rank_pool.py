"""Rank processes that import torch and Megatron once and then play one scenario after another.

A scenario is a function in ``scenarios.py`` (or ``module.function`` of this folder) called on every
rank with keyword arguments; it starts its own process group. Importing costs far more than playing.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import forked
from free_port import free_port

TIMEOUT = 600


def _serve(connection: Any, path: list[str], cpu: bool) -> None:
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's and core's own deprecations
    if cpu:
        from megatron_patch.core_patches import cpu_mode

        cpu_mode.install()
    scenarios = importlib.import_module("scenarios")

    def play(name: str, environment: dict[str, str], arguments: dict[str, Any]) -> Any:
        os.environ.update(environment)
        try:
            module, _, function = name.rpartition(".")
            room = importlib.import_module(module) if module else scenarios
            return getattr(room, function)(**arguments)
        finally:
            scenarios.leave()

    forked.answer_calls(connection, play)


class RankPool(forked.Served):
    """``size`` idle ranks; `play` gives the first ``world`` of them a scenario."""

    def __init__(self, size: int, *, cpu: bool = True) -> None:
        self.size = size
        super().__init__(_serve, [(cpu,)] * size, cpu=cpu)

    def play(self, scenario: str, *, world: int = 1, **arguments: Any) -> list[Any]:
        """Run a scenario on ``world`` ranks; what each rank returned."""
        port = str(free_port())
        for rank, pipe in enumerate(self.pipes[:world]):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            pipe.send((scenario, environment, arguments))
        return self.answers(scenario, range(world), TIMEOUT)


def save(
    pool: RankPool, root: Any, step: int, *, stop: int | None = None, world: int = 1, **changes: Any
) -> list[Any]:
    """Train to ``stop`` without a break, saving at ``step``; what each rank had and has."""
    return pool.play(
        "train_and_save", world=world, root=str(root), save_at=step, stop_at=stop or step,
        changes=changes,
    )  # fmt: skip


def load(pool: RankPool, root: Any, *, stop: int, world: int = 1, **changes: Any) -> list[Any]:
    """Load the newest checkpoint into other weights and train on to ``stop``."""
    return pool.play("load_and_train", world=world, root=str(root), stop_at=stop, changes=changes)


def convert(pool: RankPool, source: Any, target: Any, *, world: int = 1, **changes: Any) -> Any:
    """Load what ``source`` holds on this layout and save it, unchanged, under ``target``."""
    return pool.play(
        "convert", world=world, source=str(source), target=str(target), changes=changes
    )


def newest(root: Path) -> Path:
    return root / (root / "latest").read_text().strip()


def contents(pool: RankPool, root: Path) -> dict[str, Any]:
    """Every tensor of the newest checkpoint, whole, by its name in the file."""
    (found,) = pool.play("contents", path=str(newest(root)))
    return found

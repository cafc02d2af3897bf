"""Rank processes that import torch and Megatron once and then play one scenario after another.

A scenario is a function in ``scenarios.py`` (or ``module.function`` of this folder) called on every
rank with keyword arguments; it starts its own process group. Importing costs far more than playing.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import traceback
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
    while True:
        call = connection.recv()
        if call is None:
            return
        name, environment, arguments = call
        os.environ.update(environment)
        try:
            module, _, function = name.rpartition(".")
            room = importlib.import_module(module) if module else scenarios
            answer = (True, getattr(room, function)(**arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            scenarios.leave()
        connection.send(answer)


class RankPool:
    """``size`` idle ranks; `play` gives the first ``world`` of them a scenario."""

    def __init__(self, size: int, *, cpu: bool = True) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.size = size
        context = forked.context() if cpu else multiprocessing.get_context("spawn")
        self._ranks = []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, list(sys.path), cpu), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        for _, connection in self._ranks:
            with contextlib.suppress(OSError):  # a rank that was killed
                connection.send(None)
        for process, _ in self._ranks:
            process.join(10)
            if process.is_alive():
                process.kill()

    def play(self, scenario: str, *, world: int = 1, **arguments: Any) -> list[Any]:
        """Run a scenario on ``world`` ranks; what each rank returned."""
        port = str(free_port())
        for rank, (_, connection) in enumerate(self._ranks[:world]):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            connection.send((scenario, environment, arguments))
        answers = []
        for rank, (_, connection) in enumerate(self._ranks[:world]):
            if not connection.poll(TIMEOUT):
                raise TimeoutError(f"rank {rank} of {scenario} gave no answer in {TIMEOUT} s")
            answers.append(connection.recv())
        for rank, (good, value) in enumerate(answers):
            if not good:
                raise AssertionError(f"rank {rank} of {scenario}:\n{value}")
        return [value for _, value in answers]


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

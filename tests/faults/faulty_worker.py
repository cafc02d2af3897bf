"""`tests/training/worker.py` with two more faults, planted before it runs.

``MP_STUCK=STEP:RANK`` stops that rank before the reduction of that step, ``STEP:RANK:forward`` in
its forward pass; ``MP_SLOW=RANK:SECONDS`` delays each of its micro-batches in runs named ``slow``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

import worker

RANK = int(os.environ["RANK"])


def plant_stuck(step: int, rank: int, where: str) -> None:
    from megatron_patch.runtime.heartbeat import PULSE
    from megatron_patch.training import step as steps
    from megatron_patch.training.finite import StepGuard

    if where == "forward":
        place = steps.place

        def no_batch(batch: Any, layout: Any) -> Any:
            if (PULSE.now.step, RANK) == (step, rank):
                time.sleep(600)
            return place(batch, layout)

        steps.place = no_batch
        return
    before = StepGuard.before_reduction

    def stuck(self: Any, chunks: Any) -> None:
        if (self.step, RANK) == (step, rank):
            time.sleep(600)
        before(self, chunks)

    StepGuard.before_reduction = stuck  # type: ignore[method-assign]


def plant_slow(rank: int, seconds: float) -> None:
    from megatron_patch.training import step, trainer

    place, names = step.place, [""]
    train = trainer.train

    def named(loaded: Any) -> int:
        names[0] = loaded.config.name
        return train(loaded)

    def late(batch: Any, layout: Any) -> Any:
        if rank == RANK and names[0] == "slow":
            time.sleep(seconds)
        return place(batch, layout)

    trainer.train, step.place = named, late


if __name__ == "__main__":
    if text := os.environ.get("MP_STUCK"):
        at, number, *rest = text.split(":")
        plant_stuck(int(at), int(number), rest[0] if rest else "reduction")
    if text := os.environ.get("MP_SLOW"):
        number, _, delay = text.partition(":")
        plant_slow(int(number), float(delay))
    worker.main()

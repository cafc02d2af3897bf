"""Rules between ``optimizer:`` and other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.schema.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.schema.run import RunConfig


def problems(run: RunConfig) -> Iterator[Problem]:
    """A warm-up, a decay and a run that do not fit into each other."""
    o = run.optimizer
    decay = o.decay_steps or run.training.train_steps
    if decay >= 1 and o.warmup_steps >= decay:
        yield Problem(
            "optimizer.warmup_steps",
            f"{o.warmup_steps}: the warm-up must end before the decay does, at step {decay} "
            "(optimizer.decay_steps, by default training.train_steps)",
        )
    if o.schedule != "wsd":
        return
    path = "optimizer.wsd_decay_steps"
    if o.wsd_decay_steps is None:
        yield Problem(path, "is required by schedule wsd: the length of the final decay")
    elif not 1 <= o.wsd_decay_steps <= decay - o.warmup_steps:
        yield Problem(
            path,
            f"{o.wsd_decay_steps}: must be between 1 and {decay - o.warmup_steps}, the "
            "steps between the end of the warm-up and the end of the decay",
        )

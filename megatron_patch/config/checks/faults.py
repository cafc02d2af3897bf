"""Rules between ``faults:`` and other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.schema.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.schema.run import RunConfig


def problems(run: RunConfig) -> Iterator[Problem]:
    """A rewind that has no checkpoint to go back to."""
    spike, checkpoint = run.faults.spike, run.checkpoint
    if spike.action != "rewind":
        return
    if checkpoint.interval is None:
        yield Problem(
            "faults.spike.action",
            "rewind needs checkpoints to go back to; set checkpoint.interval",
        )
    elif checkpoint.keep_last is not None:
        kept = checkpoint.interval * (checkpoint.keep_last - 1)
        if spike.rewind_margin > kept:
            yield Problem(
                "faults.spike.rewind_margin",
                f"{spike.rewind_margin}: the oldest of checkpoint.keep_last "
                f"{checkpoint.keep_last} checkpoints can be {kept} steps old only; raise "
                "keep_last",
            )

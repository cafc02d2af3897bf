"""Rules between ``data:`` and other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.schema.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.schema.run import RunConfig


def problems(run: RunConfig) -> Iterator[Problem]:
    """An evaluation that is asked for and has no data."""
    data, interval = run.data, run.training.eval_interval
    if interval is None:
        return
    if not data.blend and data.train and not data.valid:
        yield Problem(
            "data.valid",
            f"training.eval_interval is {interval}, but there is no "
            "validation data: name a dataset, or remove eval_interval",
        )
    elif data.blend and not any(data._split_problems()) and data.split[1] == 0:
        yield Problem(
            "data.split",
            f"{data.split} leaves nothing for training.eval_interval "
            f"{interval}; give valid a share, or remove eval_interval",
        )

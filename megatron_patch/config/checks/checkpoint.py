"""Rules between ``checkpoint:`` and other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.checkpoint.manifest import read_key
from megatron_patch.schema.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.schema.run import RunConfig


def problems(run: RunConfig) -> Iterator[Problem]:
    """An optimizer format without its optimizer, a key file that cannot serve."""
    c = run.checkpoint
    if c.optimizer_sharding == "dp_reshardable" and not run.parallel.use_distributed_optimizer:
        yield Problem(
            "checkpoint.optimizer_sharding",
            "dp_reshardable belongs to the distributed optimizer; set "
            "parallel.use_distributed_optimizer: true, or fully_reshardable here",
        )
    if c.hmac_key_file is not None:
        try:
            read_key(c.hmac_key_file)
        except ValueError as error:
            yield Problem("checkpoint.hmac_key_file", str(error))

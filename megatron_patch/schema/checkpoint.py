"""The ``checkpoint:`` section: when state is saved, how it is verified, what is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron_patch.schema.kinds import MEANING
from megatron_patch.schema.paths import PathText
from megatron_patch.schema.problem import Problem

Carried = Literal["optimizer", "step", "data"]
CARRIED: tuple[Carried, ...] = ("optimizer", "step", "data")
"""What a start from another run's checkpoint may take over beside the weights: moments; counters,
schedule, random streams and records; the position in each dataset."""


@dataclass(kw_only=True, frozen=True, slots=True)
class CheckpointConfig:
    """Saving, verifying, resuming."""

    interval: int | None = 500
    """Steps between checkpoints; null: only at the end and on a graceful stop."""
    directory: PathText | None = None
    """Where checkpoints go; default: ``<run_dir>/checkpoints``."""
    keep_last: int | None = 3
    """Complete checkpoints kept, beside those from before a `danger` of the early warning (two at
    most). null: all."""
    async_save: bool = False
    """Write in the background while training goes on."""
    resume: Literal["auto", "never", "required"] = "auto"
    """auto: continue from the newest good checkpoint if there is one; required: fail without."""
    load_from: PathText | None = None
    """Start from this checkpoint (another run's, any layout) when the run has none."""
    load_step: int | None = None
    """With ``load_from``: its checkpoint of this step; null: the newest."""
    load_weights_only: bool = False
    """With ``load_from``: weights only; optimizer, schedule and data start fresh."""
    carry_over: list[Carried] = field(default_factory=lambda: list(CARRIED))
    """With ``load_from``: what goes on beside the weights; without step, schedule and steps start
    at 0."""
    intended_changes: list[str] = field(default_factory=list)
    """Keys that may change what loaded weights mean."""
    optimizer_sharding: Literal["fully_reshardable", "dp_reshardable"] = "fully_reshardable"
    """fully_reshardable loads on any layout; dp_reshardable on some other DP sizes."""
    verify: Literal["full", "sampled"] = "full"
    """Hash every byte before loading, or (huge files) a fixed sample of pages and all sizes."""
    hmac_key_file: PathText | None = None
    """File with a secret key: manifests are signed, unsigned or forged ones refused."""

    def problems(self) -> Iterator[Problem]:
        for name in ("interval", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(f"checkpoint.{name}", f"is {value}; use at least 1, or null")
        if self.directory is not None and os.path.isfile(self.directory):
            yield Problem("checkpoint.directory", f"{self.directory!r} is a file")
        if self.load_weights_only and self.load_from is None:
            yield Problem("checkpoint.load_weights_only", "has no effect without load_from")
        if self.load_step is not None and self.load_from is None:
            text = f"{self.load_step} has no effect without load_from; a run goes back with "
            yield Problem("checkpoint.load_step", f"{text}'megatron-patch checkpoint rollback'")
        yield from self._carried()
        yield from self._intended()
        if self.load_from is not None and self.resume == "required":
            yield Problem(
                "checkpoint.load_from",
                "is never read with resume: required, which fails without a checkpoint of the "
                "run's own; use resume: auto",
            )

    @property
    def carried(self) -> frozenset[Carried]:
        """What a start from ``load_from`` takes over beside the weights."""
        return frozenset(() if self.load_weights_only else self.carry_over)

    def _carried(self) -> Iterator[Problem]:
        path = "checkpoint.carry_over"
        if sorted(self.carry_over) == sorted(CARRIED):
            return
        if self.load_weights_only:
            yield Problem(path, "contradicts load_weights_only, which is []: leave one out")
        elif self.load_from is None:
            yield Problem(path, f"{self.carry_over} has no effect without load_from")
        if len(set(self.carry_over)) != len(self.carry_over):
            yield Problem(path, f"{self.carry_over}: name each once")

    def _intended(self) -> Iterator[Problem]:
        path = "checkpoint.intended_changes"
        if self.intended_changes and self.load_from is None:
            yield Problem(path, "has no effect without load_from: leave it out")
        for number, key in enumerate(self.intended_changes):
            if key not in MEANING:
                yield Problem(
                    f"{path}[{number}]",
                    f"{key[:60]!r} is no key that decides what a checkpoint's weights mean; "
                    f"allowed: {', '.join(MEANING)}",
                )
            elif key in self.intended_changes[:number]:
                yield Problem(f"{path}[{number}]", f"{key} is named twice")

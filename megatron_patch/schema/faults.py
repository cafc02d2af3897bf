"""The ``faults:`` section: what is watched for while a run goes on, and what happens then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron_patch.schema.problem import Problem, at_least, more_than_0


@dataclass(kw_only=True, frozen=True, slots=True)
class SpikeConfig:
    """Spikes of the loss and of the gradient norm, judged in every step."""

    action: Literal["off", "record", "skip", "rewind"] = "record"
    """record: note it; skip: also drop the update; rewind: also go back to the last checkpoint
    and leave the data in between out."""
    window: int = 128
    """Steps the median and the median absolute deviation are taken from."""
    min_history: int = 32
    """Steps that must be in the window before anything is judged."""
    loss_z: float | None = 8.0
    """A loss this many robust deviations above the median is a spike; null: not judged."""
    grad_norm_z: float | None = 20.0
    """The same for the gradient norm before clipping, which has longer tails; null: not judged."""
    rewind_margin: int = 0
    """rewind: the checkpoint must be at least this many steps older than the spike."""
    rewind_skip: int | None = None
    """rewind: global batches left out, up to the spike's; null: all since the checkpoint."""
    max_rewinds: int = 3
    """rewind: the run stops (exit code 7) at the spike after this many."""


@dataclass(kw_only=True, frozen=True, slots=True)
class FaultsConfig:
    """Hangs, stragglers, loss spikes."""

    hang_seconds: float | None = 45.0
    """Limit of a phase, at least 4 times the longest step of this attempt; null: no detection."""
    hang_startup_seconds: float = 1800.0
    """The same until the first step has ended: loading, compiling, first connections."""
    hang_pause_seconds: float = 900.0
    """The same for evaluations, saves and the end of the run."""
    straggler_interval: int | None = 100
    """Steps between two comparisons of the ranks' speed; null: none."""
    straggler_mads: float = 5.0
    """A rank is slow at this many (scaled) median absolute deviations above the median, and ..."""
    straggler_ratio: float = 1.1
    """... at least this many times the median."""
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    """Loss spikes."""

    def problems(self) -> Iterator[Problem]:
        if self.hang_seconds is not None and not self.hang_seconds >= 1:
            yield Problem("faults.hang_seconds", f"{self.hang_seconds}: at least 1, or null")
        floor = self.hang_seconds or 0
        for name in ("hang_startup_seconds", "hang_pause_seconds"):
            value = getattr(self, name)
            if not value >= max(floor, 1):
                text = f"{value}: must not be below faults.hang_seconds ({floor:g})"
                yield Problem(f"faults.{name}", text)
        if self.straggler_interval is not None and self.straggler_interval < 1:
            text = f"{self.straggler_interval}: at least 1, or null"
            yield Problem("faults.straggler_interval", text)
        yield from more_than_0("faults", self, "straggler_mads")
        yield from at_least("faults", self, {"straggler_ratio": 1})
        yield from self._spike()

    def _spike(self) -> Iterator[Problem]:
        s = self.spike
        for name in ("loss_z", "grad_norm_z"):
            value = getattr(s, name)
            if value is not None and not value > 0:
                yield Problem(f"faults.spike.{name}", f"{value}: must be more than 0, or null")
        if not 8 <= s.window <= 100_000:
            yield Problem("faults.spike.window", f"{s.window}: must be between 8 and 100000")
        elif not 4 <= s.min_history <= s.window:
            text = f"{s.min_history}: must be between 4 and faults.spike.window ({s.window})"
            yield Problem("faults.spike.min_history", text)
        least = {"rewind_margin": 0, "rewind_skip": 1, "max_rewinds": 1}
        yield from at_least("faults.spike", s, least)
        if s.action in ("skip", "rewind") and s.loss_z is None and s.grad_norm_z is None:
            text = f"{s.action}, but neither loss_z nor grad_norm_z is judged; set one of them"
            yield Problem("faults.spike.action", text)

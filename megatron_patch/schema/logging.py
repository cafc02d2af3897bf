"""The ``logging:`` section: what a person sees while a run is going on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron_patch.schema.problem import Problem, at_least, more_than_0


@dataclass(kw_only=True, frozen=True, slots=True)
class WandbConfig:
    """Weights & Biases; needs the ``wandb`` extra."""

    enabled: bool = False
    """Send metrics to Weights & Biases as well."""
    project: str | None = None
    """Project name."""
    entity: str | None = None
    """Team or user."""
    mode: Literal["online", "offline"] = "online"
    """offline keeps the data in the run directory."""


@dataclass(kw_only=True, frozen=True, slots=True)
class LoggingConfig:
    """Console, log file, TensorBoard, Weights & Biases."""

    interval: int = 10
    """Steps between log lines."""
    progress: Literal["auto", "on", "off"] = "auto"
    """Progress bar with time left; auto: only on a terminal."""
    tensorboard: bool = True
    """Write TensorBoard events to ``<run_dir>/tensorboard``."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    peak_tflops: float | None = None
    """Dense BF16 peak of one device, for MFU; default: known from the device's name."""

    def problems(self) -> Iterator[Problem]:
        yield from at_least("logging", self, {"interval": 1})
        yield from more_than_0("logging", self, "peak_tflops")

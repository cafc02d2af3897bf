"""Small records for tests: files of a run as telemetry writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_patch.stability import record
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer

L, H = 3, 4
EVERY = Rule(confirm_steps=0)
"""Counts records, for tests whose records are few."""


def meta(attention: str = "stable_flash/none") -> dict:
    return record.make_meta(layers=L, heads=H, interval=10, rule=EVERY, attention=attention)


def heads(value: float) -> dict[str, np.ndarray]:
    return {
        name: np.full((L, H), value + i, np.float32)
        for i, name in enumerate(HEAD_METRICS)
        if not name.endswith(("_norm", "_sum"))
    }


def write(folder: Path, steps: list[int], *, start: int = 0, value: float = 0.0) -> Writer:
    writer = Writer(folder, meta(), start_step=start)
    for step in steps:
        add(writer, step, value=value)
    return writer


def add(writer: Writer, step: int, *, value: float = 0.0) -> None:
    scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3 + value, "grad_norm_max": 0.5}
    layers = {"grad_norm": np.arange(L, dtype=np.float32) + step}
    writer.write(step, scalars=scalars, layers=layers, heads=heads(step + value))

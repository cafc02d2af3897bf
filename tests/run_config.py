"""A small RunConfig for unit tests; sections are overridden by keyword."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_patch.schema.data import DataConfig, DatasetConfig
from megatron_patch.schema.model import ModelConfig
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import OptimizerConfig, TrainingConfig


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """Configuration of a tiny CPU run; ``run_config(optimizer={"lr": 0.0})`` changes one key."""
    run = RunConfig(
        name="tiny",
        model=ModelConfig(
            num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, ffn_hidden_size=128
        ),
        training=TrainingConfig(
            train_steps=20, global_batch_size=8, micro_batch_size=2, device="cpu", precision="fp32"
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(blend=[DatasetConfig(path="tiny")]),
    )
    for name, values in sections.items():
        run = replace(run, **{name: replace(getattr(run, name), **values)})
    return run

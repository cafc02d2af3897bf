"""The whole configuration of a run: one dataclass per room, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_patch.attention.config import AttentionConfig
from megatron_patch.checkpoint.config import CheckpointConfig
from megatron_patch.data.config import DataConfig
from megatron_patch.model.config import ModelConfig
from megatron_patch.monitor.config import LoggingConfig
from megatron_patch.parallel.config import ParallelConfig
from megatron_patch.training.config import OptimizerConfig, TrainingConfig


@dataclass(kw_only=True, frozen=True, slots=True)
class RunConfig:
    """A training run."""

    name: str
    """Name of the run: letters, digits, ``.``, ``_`` and ``-``."""
    run_dir: str | None = None
    """Directory of the run (configuration, logs, checkpoints); default: ``runs/<name>``."""
    model: ModelConfig
    """The shape of the GPT."""
    training: TrainingConfig
    """The loop."""
    optimizer: OptimizerConfig
    """AdamW and the learning-rate schedule."""
    data: DataConfig
    """Token files, blends, tokenizer."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Backend and numerics of core attention."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout over ranks."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """What a person sees."""

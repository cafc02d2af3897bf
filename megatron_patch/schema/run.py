"""The whole configuration of a run: one dataclass per section, and one that knows its origins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_patch.schema import render
from megatron_patch.schema.attention import AttentionConfig
from megatron_patch.schema.checkpoint import CheckpointConfig
from megatron_patch.schema.cluster import ClusterConfig
from megatron_patch.schema.data import DataConfig
from megatron_patch.schema.faults import FaultsConfig
from megatron_patch.schema.logging import LoggingConfig
from megatron_patch.schema.model import ModelConfig
from megatron_patch.schema.parallel import ParallelConfig
from megatron_patch.schema.paths import PathText
from megatron_patch.schema.problem import Place, Problem
from megatron_patch.schema.stability import StabilityConfig
from megatron_patch.schema.training import OptimizerConfig, TrainingConfig

# Goes into file names, job names and dashboards: nothing that a shell or a path could read.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(kw_only=True, frozen=True, slots=True)
class RunConfig:
    """A training run."""

    name: str
    """Name of the run: letters, digits, ``.``, ``_`` and ``-``."""
    run_dir: PathText | None = None
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
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    """What is watched about attention, and what the verdict may do."""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    """Hangs, stragglers, loss spikes."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """How it is started on a Slurm cluster."""

    @property
    def directory(self) -> Path:
        """``run_dir``, or ``runs/<name>``."""
        return Path(self.run_dir) if self.run_dir is not None else Path("runs") / self.name

    @property
    def checkpoint_directory(self) -> Path:
        """``checkpoint.directory``, or ``checkpoints`` in the run directory."""
        if self.checkpoint.directory is not None:
            return Path(self.checkpoint.directory)
        return self.directory / "checkpoints"

    def problems(self) -> Iterator[Problem]:
        """What is wrong outside the sections; each section checks itself."""
        if not NAME.fullmatch(self.name):
            yield Problem(
                "name",
                f"{self.name[:60]!r} cannot name a run; use at most 128 of A-Z a-z 0-9 . _ -, "
                "the first a letter or digit",
            )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that passed every check, and where each of its values comes from."""

    config: RunConfig
    """The typed tree."""
    origins: dict[str, Place]
    """Dotted path of every value (elements of lists too) -> file and line, --set, or default."""
    tree: dict[str, Any]
    """The same values as plain dicts and lists; paths expanded, a ``$`` in one written ``$$``."""

    def dump_yaml(self) -> str:
        """The resolved configuration as YAML; loading it again gives the same values."""
        return render.dump(self.tree)

    def render(self, *, origins: bool = True) -> str:
        """``dump_yaml()`` with the origin of each value in a comment beside it."""
        return render.dump(self.tree, self.origins if origins else None)

    def dump_origins(self) -> str:
        """``path: origin`` lines, one a value, as YAML."""
        return "".join(
            f"{render.quote(path)}: {render.quote(place.short)}\n"
            for path, place in self.origins.items()
        )

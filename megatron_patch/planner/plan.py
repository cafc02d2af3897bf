"""One plan: a configuration on a number of GPUs, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.planner.communication import Traffic, traffic_of
from megatron_patch.planner.compute import Speed, speed_of
from megatron_patch.planner.hardware import Gpu
from megatron_patch.planner.layout import Layout, layout_of
from megatron_patch.planner.memory import GIB, StageMemory, memory_of, save_bytes
from megatron_patch.planner.parameters import Counts, model_counts
from megatron_patch.schema.model import padded_vocab_size
from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.schema.run import RunConfig

ASSUMED_VOCABULARY = 128_256, "Llama 3's"
"""Among the largest in use: assumed, and said so, where the tokenizer is not here."""
ASSUMED_WITH_LEARNED_POSITIONS = 50_257, "GPT-2's"
"""The same where positions are learned, as in GPT-2 and in none of the later families."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs to plan for."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids, rows of the padded tables, and where the number comes from."""

    ids: int
    padded: int
    origin: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the report shows."""

    run: RunConfig
    machine: Machine
    layout: Layout
    vocabulary: Vocabulary
    counts: Counts
    stages: list[StageMemory]
    speed: Speed

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda s: s.total)

    @property
    def room(self) -> float:
        """GiB left on the fullest GPU; negative where it does not fit."""
        return self.machine.gpu.memory - self.worst.total / GIB

    @property
    def fits(self) -> bool:
        return self.room >= 0

    @property
    def save_bytes(self) -> int:
        """Host memory of a checkpoint, on the node that holds most of it."""
        return save_bytes(self.run, self.layout, self.vocabulary.padded)

    def traffic(self, stage: int) -> list[Traffic]:
        return traffic_of(self.run, self.layout, stage, self.vocabulary.padded)


def vocabulary_of(run: RunConfig, given: int | None) -> Vocabulary:
    """The number of token ids: as given, else the tokenizer's, else assumed.

    Raises:
        ConfigError: ``given`` is no positive number.
        DataError: the tokenizer's file is there and cannot be read.
    """
    tokenizer = run.data.tokenizer
    if given is not None:
        if given < 1:
            raise ConfigError([Problem("--vocab-size", f"{given}: must be at least 1")])
        ids, origin = given, "--vocab-size"
    elif tokenizer.vocab_size is not None:
        ids, origin = tokenizer.vocab_size, "data.tokenizer.vocab_size"
    elif tokenizer.kind == "bytes" or Path(tokenizer.path or "").is_file():
        from megatron_patch.data.tokenizers import build

        ids, origin = build(tokenizer).vocab_size, tokenizer.path or "bytes tokenizer"
    else:
        learned = run.model.position_embedding == "learned_absolute"
        ids, whose = ASSUMED_WITH_LEARNED_POSITIONS if learned else ASSUMED_VOCABULARY
        origin = f"ASSUMED {whose}: {tokenizer.path} is not here; --vocab-size N says otherwise"
    return Vocabulary(ids, padded(run, ids), origin)


def padded(run: RunConfig, ids: int) -> int:
    """Rows of the embedding, over all ranks."""
    return padded_vocab_size(run.model, ids, ranks=run.parallel.tensor_model_parallel_size)


def problems_of(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    """What keeps ``run`` from starting on these GPUs, memory aside."""
    from megatron_patch.parallel.setup import world_size_problems

    if machine.nodes < 1:
        yield Problem("--nodes", f"{machine.nodes}: must be at least 1")
    elif machine.gpus_per_node < 1:
        yield Problem("--gpus-per-node", f"{machine.gpus_per_node}: must be at least 1")
    else:
        yield from world_size_problems(run, machine.world)


def make_plan(run: RunConfig, machine: Machine, vocabulary: Vocabulary) -> Plan:
    """The plan of a run that `problems_of` has nothing against."""
    layout = layout_of(run, machine.nodes, machine.gpus_per_node)
    rows = padded(run, vocabulary.ids)
    counts, stages = model_counts(run, rows), memory_of(run, layout, rows)
    speed = speed_of(run, layout, machine.gpu, rows)
    named = Vocabulary(vocabulary.ids, rows, vocabulary.origin)
    return Plan(run, machine, layout, named, counts, stages, speed)

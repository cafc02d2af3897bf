"""Layouts that do fit, where the configured one does not: neighbors in every direction, ranked.

Model, global batch, optimizer and number of GPUs stay; what may change is how they are divided
(TP with sequence parallelism, CP, PP), the micro-batch, and recompute. Candidates pass the same
checks as a configuration. If nothing fits, the same is tried on more nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron_patch.config import checks
from megatron_patch.planner.layout import layout_of
from megatron_patch.planner.memory import CONTEXT, GIB, WORKSPACE, memory_of
from megatron_patch.planner.plan import Machine, Plan, Vocabulary, make_plan, padded, problems_of
from megatron_patch.planner.states import states_of
from megatron_patch.schema import render
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import RecomputeConfig

SIZES = (1, 2, 4, 8, 16, 32)
MAX_NODES = 1024
RECOMPUTE = (
    RecomputeConfig(),
    RecomputeConfig(granularity="selective", modules=["mlp"]),
    RecomputeConfig(granularity="full", method="uniform", num_layers=1),
)
PARALLEL = (
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "hierarchical_context_parallel_sizes",
)  # fmt: skip
"""Keys of ``parallel`` that a candidate may change."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layout that fits, and the keys that lead to it."""

    plan: Plan
    changes: dict[str, str]

    @property
    def arguments(self) -> str:
        return " ".join(f"--set {key}={value}" for key, value in self.changes.items())


def alternatives(
    run: RunConfig, machine: Machine, vocabulary: Vocabulary, *, most: int = 5
) -> list[Alternative]:
    """Layouts of ``run`` that fit ``machine``, fastest first by the estimate; at most ``most``."""
    fitting = []
    for candidate in _candidates(run, machine):
        if not _fits(candidate, machine, vocabulary):
            continue
        plan = make_plan(candidate, machine, vocabulary)
        fitting.append(Alternative(plan, _changes(run, candidate)))
    # Among equals, the one that changes least.
    fitting.sort(key=lambda a: (-round(a.plan.speed.tokens_per_second, -1), len(a.changes)))
    return fitting[:most]


def more_nodes(run: RunConfig, machine: Machine, vocabulary: Vocabulary) -> list[Alternative]:
    """The same on twice the nodes, four times ... until something fits."""
    nodes = 2 * machine.nodes
    while nodes <= MAX_NODES:
        found = alternatives(run, replace(machine, nodes=nodes), vocabulary, most=3)
        if found:
            return found
        nodes *= 2
    return []


def _candidates(run: RunConfig, machine: Machine) -> Iterator[RunConfig]:
    """Every division of the GPUs that passes the configuration's own checks."""
    p, world = run.parallel, machine.world
    tps = [n for n in SIZES if n <= machine.gpus_per_node]
    own = p.pipeline_model_parallel_size
    pps = [n for n in SIZES if n == own or run.model.num_layers % n == 0]
    cps = [n for n in SIZES if n <= p.context_parallel_size or run.model.seq_length // n >= 4096]
    for tp, pp, cp in product(tps, pps, cps):
        if world % (tp * pp * cp):
            continue
        # What belongs to a number of stages, or of context-parallel ranks, goes with it.
        gone = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last") if pp != own]
        gone += ["hierarchical_context_parallel_sizes"] * (cp != p.context_parallel_size)
        sizes: dict[str, Any] = dict.fromkeys(gone)
        parallel = replace(
            p, tensor_model_parallel_size=tp, sequence_parallel=tp > 1, context_parallel_size=cp,
            pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=_virtual(run, pp),
            **sizes,
        )  # fmt: skip
        dp = world // (tp * pp * cp)
        own_way = run.training.recompute
        ways = [own_way, *(way for way in RECOMPUTE if way != own_way)]
        for micro, recompute in product(_micro_batches(run, dp), ways):
            training = replace(run.training, micro_batch_size=micro, recompute=recompute)
            candidate = replace(run, parallel=parallel, training=training)
            sections = ("parallel", "model", "training", "attention")
            if not any((*checks.problems(candidate, sections), *problems_of(candidate, machine))):
                yield candidate


def _virtual(run: RunConfig, pp: int) -> int | None:
    """The configured virtual stages where they still divide the layers."""
    wanted = run.parallel.virtual_pipeline_model_parallel_size
    if pp == run.parallel.pipeline_model_parallel_size:
        return wanted
    if wanted is None or pp == 1 or run.model.num_layers % (pp * wanted):
        return None
    return wanted


def _micro_batches(run: RunConfig, dp: int) -> list[int]:
    """The configured micro-batch and its halves, as far as the global batch allows."""
    sizes, size = [], run.training.micro_batch_size
    while size >= 1:
        if run.training.global_batch_size % (size * dp) == 0:
            sizes.append(size)
        if size % 2:
            break
        size //= 2
    return sizes


def _fits(run: RunConfig, machine: Machine, vocabulary: Vocabulary) -> bool:
    """Whether every stage fits; looks at the state alone first, which is quick."""
    layout = layout_of(run, machine.nodes, machine.gpus_per_node)
    rows = padded(run, vocabulary.ids)
    budget = machine.gpu.memory * GIB
    for stage in {0, layout.pp - 1}:
        if states_of(run, layout, stage, rows).total + CONTEXT + WORKSPACE > budget:
            return False
    return all(stage.total <= budget for stage in memory_of(run, layout, rows))


def _changes(run: RunConfig, candidate: RunConfig) -> dict[str, str]:
    """Keys of ``candidate`` that differ from ``run``, as ``--set`` takes them."""
    changed: dict[str, object] = {}
    for section, names in (("parallel", PARALLEL), ("training", ("micro_batch_size",))):
        for name in names:
            old, new = (getattr(getattr(r, section), name) for r in (run, candidate))
            if old != new:
                changed[f"{section}.{name}"] = new
    before, after = run.training.recompute, candidate.training.recompute
    for name in ("granularity", "modules", "method", "num_layers"):
        kept = after.granularity == "none" and name != "granularity"
        if getattr(before, name) != getattr(after, name) and not kept:
            changed[f"training.recompute.{name}"] = getattr(after, name)
    # Without spaces, which a shell would split at.
    return {key: render.scalar(value).replace(", ", ",") for key, value in changed.items()}

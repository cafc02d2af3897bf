"""The ``parallel:`` section: how the model is laid out over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_patch.schema.problem import Problem, at_least

TIMEOUT_MINUTES = 0.01, 525_600
"""PyTorch counts milliseconds: of less it makes 0, which is over at once."""

CpCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]


@dataclass(kw_only=True, frozen=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel groups; data parallelism takes the ranks that are left."""

    tensor_model_parallel_size: int = 1
    """Ranks one layer's matrices are split over."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline rank (interleaved schedule); null: one."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the stage with the embedding; null: as the others."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the stage with the output projection; null: as the others."""
    context_parallel_size: int = 1
    """Ranks one sequence is split over."""
    cp_comm_type: CpCommType | list[CpCommType] = "p2p"
    """How those ranks exchange keys, values or heads: one value, or one per layer."""
    hierarchical_context_parallel_sizes: list[int] | None = None
    """[a2a size, p2p size] for ``cp_comm_type: a2a+p2p``; a2a takes neighboring ranks."""
    cp_gradient_wire: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients of keys and values travel; bf16 halves them and rounds every sum. No
    effect under a2a, and refused where no layer uses another mode."""
    expert_model_parallel_size: int = 1
    """Ranks the experts of an MoE layer are spread over."""
    expert_tensor_parallel_size: int | None = None
    """Ranks one expert's matrices are split over; default: tensor_model_parallel_size."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap parameter gathering with the forward pass (distributed optimizer only)."""
    distributed_timeout_minutes: float = 10.0
    """A collective that waits longer than this fails the run."""

    def problems(self) -> Iterator[Problem]:
        yield from self._sizes()
        yield from self._pipeline()
        yield from self._overlap()
        yield from self._hierarchy()

    def _sizes(self) -> Iterator[Problem]:
        kinds = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context",
                 "expert_model", "expert_tensor")  # fmt: skip
        yield from at_least("parallel", self, {f"{kind}_parallel_size": 1 for kind in kinds})
        shortest, longest = TIMEOUT_MINUTES
        if not shortest <= self.distributed_timeout_minutes <= longest:
            yield Problem(
                "parallel.distributed_timeout_minutes",
                f"{self.distributed_timeout_minutes}: must be from {shortest} to {longest:,}, a "
                "year; a run whose collectives may wait that long is not watched",
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield Problem(
                "parallel.sequence_parallel",
                "true splits activations over tensor-parallel ranks and needs "
                "parallel.tensor_model_parallel_size of 2 or more; it is 1",
            )

    def _pipeline(self) -> Iterator[Problem]:
        for end in ("first", "last"):
            key = f"num_layers_in_{end}_pipeline_stage"
            value = getattr(self, key)
            if value is not None and value < 1:
                yield Problem(f"parallel.{key}", f"{value}: must be at least 1")
            elif value is not None and self.pipeline_model_parallel_size == 1:
                text = f"{value} has no effect with one pipeline stage: leave it out"
                yield Problem(f"parallel.{key}", text)
        chunks = self.virtual_pipeline_model_parallel_size
        path = "parallel.virtual_pipeline_model_parallel_size"
        if chunks is None:
            return
        if chunks == 1:
            yield Problem(path, "1: leave it out for one model chunk per rank")
        elif self.pipeline_model_parallel_size == 1:
            yield Problem(
                path,
                f"{chunks} model chunks per rank need parallel.pipeline_model_parallel_size of 2 "
                "or more; it is 1",
            )

    def stage_layers(self, layers: int) -> list[int] | None:
        """How many of the layers every pipeline stage holds; None: they cannot be dealt out."""
        first = self.num_layers_in_first_pipeline_stage
        last = self.num_layers_in_last_pipeline_stage
        given = [n for n in (first, last) if n is not None]
        others = self.pipeline_model_parallel_size - len(given)
        rest = layers - sum(given)
        if min(others, rest, *given) < 0 or (rest % others if others else rest):
            return None
        middle = [rest // others] * others if others else []
        counts = [n for n in (first, *middle, last) if n is not None]
        chunks = self.virtual_pipeline_model_parallel_size or 1
        return counts if min(counts) > 0 and not any(n % chunks for n in counts) else None

    def chunk_layers(self, layers: int, *, stage: int, virtual: int) -> range:
        """The 1-based layers of a model chunk; `stage_layers` must have an answer."""
        counts = self.stage_layers(layers)
        assert counts is not None
        chunks = self.virtual_pipeline_model_parallel_size or 1
        begin = 1 + (virtual * layers + sum(counts[:stage])) // chunks
        return range(begin, begin + counts[stage] // chunks)

    def _overlap(self) -> Iterator[Problem]:
        if not self.overlap_param_gather:
            return
        path = "parallel.overlap_param_gather"
        if not self.use_distributed_optimizer:
            yield Problem(path, "true needs parallel.use_distributed_optimizer: true")
        if not self.overlap_grad_reduce:
            yield Problem(path, "true needs parallel.overlap_grad_reduce: true")

    @property
    def cp_comm_types(self) -> list[CpCommType]:
        """The context-parallel modes in use, without repeats; none with one rank."""
        if self.context_parallel_size == 1:
            return []
        kinds = self.cp_comm_type if isinstance(self.cp_comm_type, list) else [self.cp_comm_type]
        return list(dict.fromkeys(kinds))

    def a2a_size(self, kind: CpCommType) -> int:
        """Ranks that divide the heads of a layer among themselves under a context-parallel mode."""
        if kind == "a2a":
            return self.context_parallel_size
        sizes = self.hierarchical_context_parallel_sizes
        return sizes[0] if kind == "a2a+p2p" and sizes else 1

    def _hierarchy(self) -> Iterator[Problem]:
        sizes = self.hierarchical_context_parallel_sizes
        path = "parallel.hierarchical_context_parallel_sizes"
        used = "a2a+p2p" in self.cp_comm_types
        if sizes is None:
            if used:
                yield Problem(
                    "parallel.cp_comm_type",
                    f"a2a+p2p needs {path}: [a2a, p2p], two sizes of at least 2 whose product is "
                    f"parallel.context_parallel_size ({self.context_parallel_size})",
                )
        elif len(sizes) != 2 or min(sizes) < 2 or sizes[0] * sizes[1] != self.context_parallel_size:
            yield Problem(
                path,
                f"{sizes}: two sizes [a2a, p2p] of at least 2 whose product is "
                f"parallel.context_parallel_size ({self.context_parallel_size}) are needed; one "
                "level alone is cp_comm_type a2a or p2p",
            )
        elif not used:
            yield Problem(
                path,
                f"{sizes} has no effect under parallel.cp_comm_type {self.cp_comm_type}: leave it "
                "out, or use a2a+p2p",
            )

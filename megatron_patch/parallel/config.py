"""The ``parallel:`` section: how the model is laid out over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_patch.config.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.config.root import RunConfig

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
    context_parallel_size: int = 1
    """Ranks one sequence is split over."""
    cp_comm_type: CpCommType | list[CpCommType] = "p2p"
    """How keys and values travel under context parallelism; one value or one per layer."""
    hierarchical_context_parallel_sizes: list[int] | None = None
    """[a2a size, p2p size] for ``cp_comm_type: a2a+p2p``."""
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

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Everything about this section that can be checked without a GPU."""
        yield from self._sizes()
        yield from self._pipeline()
        yield from self._overlap()
        yield from self._context()
        if self.expert_model_parallel_size > 1 and run.model.moe is None:
            yield Problem(
                "parallel.expert_model_parallel_size",
                f"{self.expert_model_parallel_size} needs an MoE model (section model.moe); a "
                "dense model has no experts to spread",
            )

    def _sizes(self) -> Iterator[Problem]:
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(f"parallel.{name}", f"{value}: must be at least 1")
        if not self.distributed_timeout_minutes > 0:
            yield Problem(
                "parallel.distributed_timeout_minutes",
                f"{self.distributed_timeout_minutes}: must be more than 0",
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield Problem(
                "parallel.sequence_parallel",
                "true splits activations over tensor-parallel ranks and needs "
                "parallel.tensor_model_parallel_size of 2 or more; it is 1",
            )

    def _pipeline(self) -> Iterator[Problem]:
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

    def _overlap(self) -> Iterator[Problem]:
        if not self.overlap_param_gather:
            return
        path = "parallel.overlap_param_gather"
        if not self.use_distributed_optimizer:
            yield Problem(path, "true needs parallel.use_distributed_optimizer: true")
        if not self.overlap_grad_reduce:
            yield Problem(path, "true needs parallel.overlap_grad_reduce: true")

    def _context(self) -> Iterator[Problem]:
        sizes, path = self.hierarchical_context_parallel_sizes, "parallel.cp_comm_type"
        kinds = self.cp_comm_type if isinstance(self.cp_comm_type, list) else [self.cp_comm_type]
        if sizes is None:
            if "a2a+p2p" in kinds and self.context_parallel_size > 1:
                yield Problem(
                    path, "a2a+p2p needs parallel.hierarchical_context_parallel_sizes: [a2a, p2p]"
                )
            return
        product = 1
        for size in sizes:
            product *= size
        if len(sizes) != 2 or product != self.context_parallel_size:
            yield Problem(
                "parallel.hierarchical_context_parallel_sizes",
                f"{sizes}: two sizes [a2a, p2p] whose product is parallel.context_parallel_size "
                f"({self.context_parallel_size}) are needed",
            )

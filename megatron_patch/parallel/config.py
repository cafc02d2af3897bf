"""The ``parallel:`` section: how the model is laid out over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.config.problem import Problem
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
    """Model chunks per pipeline rank (interleaved schedule); none: one."""
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
        yield from ()

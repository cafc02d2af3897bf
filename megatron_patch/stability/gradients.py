"""Gradient norm of every layer, from the reduced gradients, before they are clipped.

A model that is not in Megatron's DistributedDataParallel has them in ``main_grad`` or ``grad``, the
same on all data-parallel ranks, of which the first counts. Else core's data-parallel buffers hold
them after the reduction. Each value must count once over all ranks, so that one SUM over the world
is right:

- with the distributed optimizer a rank holds the reduced gradients of its shard of every bucket
  only; the rest of its buffer is unreduced and does not count;
- without it all ranks of a data-parallel group hold all of it, and the first one counts;
- parameters replicated over tensor parallelism count on the first of those ranks, and the copy of
  the tied embedding on the last pipeline stage does not count: core's own rule for the norm.

Shape legend: L layers of the whole model; one more slot holds what is outside the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_patch.parallel.buffers import own_values
from megatron_patch.stability.observe import Watched


class LayerNorms:
    """Sums of squares by layer.

    Args:
        watched: whose chunks are measured.
        device: where the sums live.
        first: whether this rank counts what all data-parallel ranks have.
    """

    def __init__(self, watched: Watched, *, device: torch.device, first: bool = True) -> None:
        self._watched, self._first = watched, first
        self.squares = torch.zeros(watched.layers + 1, dtype=torch.float64, device=device)
        self.measured = False
        self._find()

    def _find(self) -> None:
        """Whose gradients count here, in which layer."""
        watched, layers = self._watched, self._watched.layers
        self._known = self._parameters()
        self._pieces: list[tuple[Any, int, int]] = []  # buffer, first and last value
        slots: list[int] = []
        for chunk, root in zip(watched.chunks, watched.roots, strict=True):
            slot_of = {}
            for name, parameter in root.named_parameters():
                layer = watched.layer_of(root, name)
                slot_of[id(parameter)] = layers if layer is None else layer
            if not hasattr(chunk, "expert_parallel_buffers"):
                sharded = parallel_state.model_parallel_is_initialized()
                for parameter in root.parameters() if self._first else ():
                    if not sharded or counts_here(parameter):
                        self._pieces.append((_Gradient(parameter), 0, parameter.numel()))
                        slots.append(slot_of[id(parameter)])
                continue
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for parameter, begin, end in own_values(buffer):
                    if counts_here(parameter):
                        self._pieces.append((buffer, begin, end))
                        slots.append(slot_of.get(id(parameter), layers))
        self._slots = torch.tensor(slots, dtype=torch.int64, device=self.squares.device)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for root in self._watched.roots for p in root.parameters()]

    def clear(self) -> None:
        """Begin another observation, of the parameters that there are now: adapters come, too."""
        self.squares.zero_()
        self.measured = False
        if [*map(id, self._parameters())] != [*map(id, self._known)]:
            self._find()

    @torch.no_grad()
    def measure(self) -> None:
        """This rank's share; call between the reduction and the optimizer's step. The last call of
        a step counts, where a closure of the optimizer is evaluated more than once."""
        self.measured = True
        if not self._pieces:
            return
        self.squares.zero_()
        grads = [(buffer.grad_data, *ends) for buffer, *ends in self._pieces]
        values = [x[begin:end] for x, begin, end in grads if x is not None]
        if not values:
            return
        # Summed in float32, without a float32 copy of 16-bit gradients.
        norms = iter(torch._foreach_norm(values, 2, dtype=torch.float32))
        nothing = self.squares.new_zeros((), dtype=torch.float32)
        every = torch.stack([nothing if x is None else next(norms) for x, *_ in grads])
        self.squares.index_add_(0, self._slots, every.double().pow(2))


@dataclass(frozen=True, slots=True)
class _Gradient:
    """The gradient of one parameter, as a buffer; None where there is none, or none of this step:
    parameters are frozen and thawed while they train, and frozen ones may be of any type."""

    parameter: torch.nn.Parameter

    @property
    def grad_data(self) -> torch.Tensor | None:
        found = getattr(self.parameter, "main_grad", None)
        found = self.parameter.grad if found is None else found
        if found is None or not self.parameter.requires_grad:
            return None
        return found.coalesce().values().flatten() if found.is_sparse else found.flatten()


def counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank's part of a parameter is neither another rank's copy nor a shared one."""
    expert_group = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
    unique = param_is_not_tensor_parallel_duplicate(parameter, expert_tp_group=expert_group)
    return param_is_not_shared(parameter) and unique

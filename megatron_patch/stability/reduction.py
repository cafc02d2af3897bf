"""An observation's way to the host: reduced over all ranks, copied to pinned memory, read when the
next step is done. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_patch.stability.groups import add_up, largest_of_all


@dataclass(frozen=True, slots=True)
class Arrived:
    """The reduced values of one observation, the same on all ranks."""

    step: int
    lr: float
    sums: list[np.ndarray]
    """Float64, with the shapes that were sent."""
    maxima: np.ndarray


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    lr: float
    shapes: list[torch.Size]
    total: torch.Tensor
    maxima: torch.Tensor
    event: Any


class Reduction:
    """At most one observation is on its way."""

    def __init__(self) -> None:
        self._pending: _Pending | None = None
        self._pinned: dict[int, torch.Tensor] = {}

    @property
    def step(self) -> int | None:
        """Of what is on its way."""
        return None if self._pending is None else self._pending.step

    def send(
        self, step: int, *, lr: float, sums: Sequence[torch.Tensor], maxima: torch.Tensor
    ) -> None:
        """Reduce float64 ``sums`` and ``maxima`` and start the copy to the host. Collective."""
        total = add_up(torch.cat([x.flatten() for x in sums]))
        maxima, event = largest_of_all(maxima), None
        if total.is_cuda:
            total, maxima = self._to_host(0, total), self._to_host(1, maxima)
            event = torch.cuda.Event()
            event.record()
        self._pending = _Pending(step, lr, [x.shape for x in sums], total, maxima, event)

    def _to_host(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory that arrives later; it is read before the slot's next one.

        The memory is kept: allocating pinned memory waits for the device.
        """
        kept = self._pinned.get(slot)
        if kept is None or kept.numel() < x.numel():
            kept = self._pinned[slot] = torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
        host = kept[: x.numel()].view(x.shape)
        host.copy_(x, non_blocking=True)
        return host

    def drain(self) -> Arrived | None:
        """What is on its way, if anything is."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if pending.event is not None:
            pending.event.synchronize()
        parts = pending.total.split([shape.numel() for shape in pending.shapes])
        sums = [part.view(shape).numpy() for part, shape in zip(parts, pending.shapes, strict=True)]
        return Arrived(pending.step, pending.lr, sums, pending.maxima.numpy())

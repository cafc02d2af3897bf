"""The update's gate: on the device, so that the host need not know before the update is launched.

Whether a step's update may be taken, and by how much its gradients are clipped, is known on the
device as soon as the gradient norm is. A host that reads both before it launches the update leaves
the device without work for as long as reading and launching take, and is behind from then on: the
next forward pass is launched into an idle device. With the gate the host launches the update first
and reads then, while the update runs.

PyTorch's fused AdamW has the two inputs this takes, made for loss scaling: `found_inf`, which
leaves weights, moments and step counters as they are where it is 1, and `grad_scale`, by which it
divides the gradients. Everything else (Transformer Engine, Apex, unfused kernels, parameters that
are clipped by a norm of their own) has no gate, and the host waits before the update.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patch.core_patches.optimizer import clips

EPSILON = 1.0e-6
"""Megatron-Core's, in the denominator of the clipping factor."""


class Gate:
    """Closes or clips (0: never) the next update of some of PyTorch's fused AdamW."""

    def __init__(self, optimizers: list[torch.optim.AdamW], *, clip: float) -> None:
        self._optimizers, self._clip = optimizers, clip

    @torch.no_grad()
    def set(self, norm: torch.Tensor, closed: torch.Tensor | None) -> None:
        """Decide about the next update. Does not wait for the device.

        Args:
            norm: gradient norm before clipping, one value on the device.
            closed: 1.0 on the device where the update must not be taken, else 0.0; None: taken.
        """
        scale = None
        if self._clip > 0.0:
            scale = ((norm.float() + EPSILON) / self._clip).clamp(min=1.0).reshape(())
            # As core: a norm that is no number clips nothing, and one bad gradient stays one.
            scale = scale.nan_to_num(nan=1.0, posinf=torch.inf)
        found = None if closed is None else closed.float().reshape(())
        for optimizer in self._optimizers:
            optimizer.grad_scale, optimizer.found_inf = scale, found  # type: ignore[attr-defined]


def gate_of(optimizer: Any) -> Gate | None:
    """The gate of Megatron-Core's chained optimizer; None if one of its parts cannot have one."""
    from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS

    if not clips() or any(map(optimizer.has_grad_norm_group, SEPARATE_GRAD_NORM_GROUPS)):
        return None
    found, limits = [], set()
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        inner = part.optimizer
        if type(inner) is not torch.optim.AdamW or getattr(part, "grad_scaler", None) is not None:
            return None
        if not all(group["fused"] for group in inner.param_groups):
            return None
        found.append(inner)
        limits.add(part.config.clip_grad)
    return Gate(found, clip=limits.pop()) if len(limits) == 1 else None

"""What all ranks know of a step before its update, from one reduction and one wait for the device.

Loss, gradient norm, whether either is not finite, and requests to stop: everything that decides
about the update, and what the record of the step needs, travels as one vector in one sum. Waiting
for the device costs more than the figures are worth on a small model: while the host waits it
launches nothing, and the device runs dry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_patch.training.signals import NO_STOP, REASONS

if TYPE_CHECKING:
    from megatron_patch.parallel.setup import Layout

CODES = sorted(REASONS)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The same on every rank."""

    loss: float
    """Mean loss of the global batch's tokens, nats."""
    grad_norm: float
    """The first rank's gradient norm."""
    loss_bad: bool
    """A rank's loss is not finite."""
    norm_bad: bool
    """A rank's gradient norm is not finite."""
    stop_code: int
    """The largest stop code of any rank (`signals`)."""


class Agreement:
    """Built up during a step: ``report`` when the loss is known, ``reduce`` when the norm is."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._report: torch.Tensor | None = None

    def begin(self) -> None:
        """A new step."""
        self._report = None

    @torch.no_grad()
    def report(self, report: torch.Tensor | None) -> None:
        """This rank's [sum of token losses, tokens]; None where there is no loss. Does not wait."""
        if report is None:
            return
        values = report.double()
        bad = values[:1].isfinite().logical_not().double()
        if not self._layout.reports_loss:  # another rank has the same figures and adds them
            values = torch.zeros_like(values)
        self._report = torch.cat([values, bad])

    @torch.no_grad()
    def reduce(self, norm: torch.Tensor | float, stop_code: int) -> Agreed:
        """Bring everything together. Collective; waits for the device.

        Args:
            norm: this rank's gradient norm, the same on all ranks unless something is broken.
            stop_code: this rank's request to stop.
        """
        device, value = self._layout.device, float(norm)
        known = [value if self._layout.rank == 0 else 0.0, float(not math.isfinite(value))]
        known += [float(stop_code == code) for code in CODES]
        report = self._report
        if report is None:
            report = torch.zeros(3, dtype=torch.float64, device=device)
        here = torch.tensor(known, dtype=torch.float64).to(device, non_blocking=True)
        everything = torch.cat([report, here])
        torch.distributed.all_reduce(everything)
        total, tokens, loss_bad, grad_norm, norm_bad, *stops = everything.tolist()
        asked = [code for code, ranks in zip(CODES, stops, strict=True) if ranks]
        return Agreed(
            loss=total / max(tokens, 1.0),
            grad_norm=grad_norm,
            loss_bad=loss_bad > 0,
            norm_bad=norm_bad > 0,
            stop_code=max(asked, default=NO_STOP),
        )

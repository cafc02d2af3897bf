"""What all ranks know of a step, from one reduction and one wait for the device.

Loss, gradient norm, whether either is not finite, and requests to stop: everything that decides
about the update, and what the record of the step needs, travels as one vector in one sum. A wait
costs more than the figures are worth on a small model: while the host waits it launches nothing,
and the device runs dry, unless the update lies before it already (`gate`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_patch.parallel.setup import Layout
from megatron_patch.training.signals import NO_STOP, REASONS

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
    """Built up during a step: ``report`` when the loss is known, ``send`` when the norm is, then
    ``receive``. Only the last waits for the device."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._report: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._here: torch.Tensor | None = None
        self._pinned: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def begin(self) -> None:
        """A new step."""
        self._report = self._sent = self._here = None

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
    def send(self, norm: torch.Tensor | float, stop_code: int) -> None:
        """Bring this rank's gradient norm and stop code together. Collective; does not wait."""
        device = self._layout.device
        stops = torch.tensor([float(stop_code == code) for code in CODES], dtype=torch.float64)
        value = torch.as_tensor(norm, dtype=torch.float64).reshape(1).to(device, non_blocking=True)
        bad = value.isfinite().logical_not().double()
        if self._layout.rank != 0:
            value = torch.zeros_like(value)
        report = self._report
        if report is None:
            report = torch.zeros(3, dtype=torch.float64, device=device)
        sent = torch.cat([report, value, bad, stops.to(device, non_blocking=True)])
        torch.distributed.all_reduce(sent)
        self._sent = self._here = sent
        if sent.is_cuda:
            # Pinned, and read behind an event: what is launched after this is not waited for.
            if self._pinned is None:
                self._pinned = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
            self._here = self._pinned.copy_(sent, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def grad_norm(self) -> torch.Tensor:
        """The first rank's gradient norm, on the device; after ``send``."""
        assert self._sent is not None, "sent"
        return self._sent[3]

    @torch.no_grad()
    def bad(self) -> torch.Tensor:
        """1.0 on the device where a rank's loss or norm is not finite, else 0.0; after ``send``."""
        assert self._sent is not None, "sent"
        return ((self._sent[2] + self._sent[4]) > 0.0).float()

    def receive(self) -> Agreed:
        """What was agreed on. Waits for the device, up to the reduction and no further."""
        assert self._here is not None, "sent"
        if self._arrived is not None:
            self._arrived.synchronize()
        total, tokens, loss_bad, grad_norm, norm_bad, *stops = self._here.tolist()
        asked = [code for code, ranks in zip(CODES, stops, strict=True) if ranks]
        return Agreed(
            loss=total / max(tokens, 1.0),
            grad_norm=grad_norm,
            loss_bad=loss_bad > 0,
            norm_bad=norm_bad > 0,
            stop_code=max(asked, default=NO_STOP),
        )

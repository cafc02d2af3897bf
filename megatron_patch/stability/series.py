"""Loss and gradient norm of the steps since the last record, across resumes.

They are sums of every rank until a record adds them up. A checkpoint in between carries them added
up, so that the record after a resume is of the same steps as that of a run not interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.runtime.watcher import StepResult


class Series:
    """The steps since the last record, on this rank.

    Args:
        interval: steps between two records.
        layout: coordinates of this rank.
    """

    def __init__(self, interval: int, layout: Layout) -> None:
        self._interval, self._layout = interval, layout
        self._before = torch.zeros(0, 2, dtype=torch.float64, device=layout.device)
        """[n, 2] of the steps that `restore` knows: sum of token losses, tokens."""
        self._reports: list[torch.Tensor] = []
        """The same of every step after them, each its own tensor as the step made it: nothing is
        launched between two records, when the device waits for the next step."""
        self._norms: list[float] = []
        """Gradient norms: they are on the host already, and a copy of a single one to the device
        would wait for the update."""
        self._settled: list[list[float]] = []

    def note(self, result: StepResult) -> None:
        """Loss of one step, which stays on the device, and its gradient norm."""
        if result.report is not None and self._layout.reports_loss:
            self._reports.append(result.report)
        self._norms.append(result.grad_norm)

    def _losses(self) -> torch.Tensor:
        """[n, 2] of this rank; zeros on one that reports no loss."""
        if self._reports:
            return torch.cat([self._before, torch.stack(self._reports).double()])
        rest = self._before.new_zeros(len(self._norms) - len(self._before), 2)
        return torch.cat([self._before, rest])

    def take(self) -> torch.Tensor:
        """[n, 3] of this rank, to be added up over all of them; the next step is the first."""
        losses = self._losses()
        norms = losses.new_zeros(len(losses), 1)
        if self._layout.rank == 0:
            known = torch.tensor(self._norms, dtype=torch.float64)[:, None]
            norms.copy_(known, non_blocking=True)
        self._before, self._reports, self._norms = self._before[:0], [], []
        return torch.cat([losses, norms], dim=1)

    def settle(self) -> None:
        """Before a save: add up what `state` tells. Collective; waits for the device."""
        sums = self._losses()
        if len(sums):
            torch.distributed.all_reduce(sums)
        self._settled = sums.tolist()

    def state(self) -> dict[str, Any]:
        """Of all ranks, as of `settle`: plain data, the same on every rank and for any layout."""
        return {"losses": self._settled, "grad_norms": list(self._norms)}

    def restore(self, saved: dict[str, Any] | None, step: int) -> None:
        """Go on after ``step`` with what its checkpoint has; None: an older version's has nothing.

        Of another interval, steps that its next record is not of are left out.
        """
        count = 0 if saved is None else min(len(saved["grad_norms"]), step % self._interval)
        if saved is None or not count:
            return
        self._norms = [float(norm) for norm in saved["grad_norms"][-count:]]
        self._before = self._before.new_zeros(count, 2)
        if self._layout.rank == 0:  # the others add nothing to them
            losses = torch.tensor(saved["losses"][-count:], dtype=torch.float64)
            self._before = losses.to(self._layout.device)

"""Loss and gradient norm of the steps since the last record, across resumes.

They are sums of every rank until a record adds them up. A checkpoint in between carries them added
up, so that the record after a resume is of the same steps as that of a run not interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.training.step import StepResult


class Series:
    """The steps since the last record, on this rank.

    Args:
        interval: steps between two records.
        layout: coordinates of this rank.
    """

    def __init__(self, interval: int, layout: Layout) -> None:
        self._interval, self._layout = interval, layout
        # [n, 3]: sum of token losses, tokens, gradient norm.
        self._sums = torch.zeros(interval, 3, dtype=torch.float64, device=layout.device)
        self._norms: list[float] = []
        """Gradient norms: they are on the host already, and a copy of a single one to the device
        would wait for the update."""
        self._settled: list[list[float]] = []

    def note(self, result: StepResult) -> None:
        """Loss of one step, into the device buffer, and its gradient norm."""
        if result.report is not None and self._layout.reports_loss:
            self._sums[len(self._norms), :2] = result.report.double()
        self._norms.append(result.grad_norm)

    def take(self) -> torch.Tensor:
        """[n, 3] of this rank, to be added up over all of them; the next step is the first."""
        norms, self._norms = self._norms, []
        n = len(norms)
        if self._layout.rank == 0:
            known = torch.tensor(norms, dtype=torch.float64)
            self._sums[:n, 2] = known.to(self._layout.device, non_blocking=True)
        taken = self._sums[:n].clone()
        self._sums.zero_()
        return taken

    def settle(self) -> None:
        """Before a save: add up what `state` tells. Collective; waits for the device."""
        sums = self._sums[: len(self._norms), :2].clone()
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
        if self._layout.rank == 0:  # the others add nothing to them
            losses = torch.tensor(saved["losses"][-count:], dtype=torch.float64)
            self._sums[:count, :2] = losses.to(self._layout.device)

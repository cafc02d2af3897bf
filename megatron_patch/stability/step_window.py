"""Loss and gradient norm of the steps since the last record, across resumes.

They are sums of every rank until a record adds them up. A checkpoint in between carries them added
up, so that the record after a resume is of the same steps as that of a run not interrupted.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patch.stability.groups import Groups, add_up


class StepWindow:
    """The steps since the last record, on this rank.

    Args:
        interval: steps between two records.
        groups: coordinates of this rank.
    """

    def __init__(self, interval: int, groups: Groups) -> None:
        self._interval, self._groups = interval, groups
        self._before = torch.zeros(0, 2, dtype=torch.float64, device=groups.device)
        """[n, 2] of the steps that `restore` knows: sum of token losses, tokens."""
        self._reports: list[torch.Tensor] = []
        """The same of every step after them, each its own tensor as the step made it: nothing is
        launched between two records, when the device waits for the next step."""
        self._norms: list[float | torch.Tensor] = []
        """Gradient norms, where the loop has them: a copy of a single one to the device would wait
        for the update, and so would the value of a tensor."""
        self._synchronized: list[list[float]] = []

    def observe(self, report: torch.Tensor | float | None, grad_norm: torch.Tensor | float) -> None:
        """Of one step, on whichever side of the bus it is.

        Args:
            report: [sum of token losses, tokens] of this rank, or a mean loss, which counts as one
                token, the same kind in all steps; None: this rank has none.
            grad_norm: over all ranks, before clipping.

        Raises ValueError: of another shape than that, or of another than in the steps before.
        """
        grad_norm = _shaped("grad_norm", grad_norm)
        if report is not None and self._groups.reports_loss:
            report = _shaped("loss", report, 2)
            dim = report.dim() if isinstance(report, torch.Tensor) else 0
            if self._reports and dim != self._reports[0].dim():
                raise ValueError(
                    f"loss is {report}, and was {self._reports[0]} before; give a mean in every "
                    "step, or [sum of token losses, tokens] in every step"
                )
            if not isinstance(report, torch.Tensor):  # a fill, not a copy
                report = torch.full((), report, dtype=torch.float64, device=self._groups.device)
            elif not report.dim():  # one launch; a loop may write the next one where this one is
                report = report.detach().to(torch.float64, copy=True)
            self._reports.append(report)
        self._norms.append(grad_norm)

    def _losses(self) -> torch.Tensor:
        """[n, 2] of this rank; zeros on one that reports no loss."""
        if self._reports:
            found = torch.stack(self._reports).double()
            if found.dim() == 1:  # means
                found = torch.stack([found, torch.ones_like(found)], 1)
            return torch.cat([self._before, found])
        rest = self._before.new_zeros(len(self._norms) - len(self._before), 2)
        return torch.cat([self._before, rest])

    def drain(self) -> torch.Tensor:
        """[n, 3] of this rank, to be added up over all of them; the next step is the first."""
        losses = self._losses()
        norms = losses.new_zeros(len(losses), 1)
        if self._groups.rank == 0:
            if any(isinstance(norm, torch.Tensor) for norm in self._norms):
                every = [torch.as_tensor(norm, device=losses.device) for norm in self._norms]
                norms = torch.stack([norm.double() for norm in every])[:, None]
            else:
                known = torch.tensor(self._norms, dtype=torch.float64)[:, None]
                norms.copy_(known, non_blocking=True)
        self._before, self._reports, self._norms = self._before[:0], [], []
        return torch.cat([losses, norms], dim=1)

    def synchronize(self) -> None:
        """Before a save: add up what `state` returns. Collective; waits for the device."""
        sums = self._losses()
        if len(sums):
            add_up(sums)
        self._synchronized = sums.tolist()

    def state(self) -> dict[str, Any]:
        """Of all ranks, as of `synchronize`: plain data, the same on every rank, for any layout."""
        return {"losses": self._synchronized, "grad_norms": [float(norm) for norm in self._norms]}

    def restore(self, saved: dict[str, Any] | None, step: int) -> None:
        """Go on after ``step`` with what its checkpoint has; None: an older version's has nothing.

        Of another interval, steps that its next record is not of are left out.
        """
        count = 0 if saved is None else min(len(saved["grad_norms"]), step % self._interval)
        if saved is None or not count:
            return
        self._norms = [float(norm) for norm in saved["grad_norms"][-count:]]
        self._before = self._before.new_zeros(count, 2)
        if self._groups.rank == 0:  # the others add nothing to them
            losses = torch.tensor(saved["losses"][-count:], dtype=torch.float64)
            self._before = losses.to(self._groups.device)


def _shaped(name: str, value: Any, *sizes: int) -> Any:
    """A number, or a tensor of none or of the ``sizes``; of one number it is that. No launch."""
    if isinstance(value, torch.Tensor):
        value = value.reshape(()) if value.numel() == 1 else value
        found, fits = f"shape {tuple(value.shape)}", value.shape in ((), *((n,) for n in sizes))
    else:
        found, fits = f"type {type(value).__name__}", not isinstance(value, (list, tuple, dict))
    if not fits:
        pair = ", or the tensor [sum of token losses, tokens]" if sizes else ""
        raise ValueError(f"{name} is of {found}; allowed: one number{pair}: give the mean")
    return value

"""Records as the early warning reads them, and what it compares a new one with. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from megatron_patch.stability.names import bias_to_signal, error_to_signal
from megatron_patch.stability.warning import NOWHERE, Point, Rule, Spot


class History:
    """Records as the warning rule reads them; what it compares a new one with.

    Args:
        rule: of the run.
        compensated: whether that is what the run computes with, at all of these records.
    """

    def __init__(self, rule: Rule, *, compensated: bool = False) -> None:
        self.rule, self.compensated = rule, compensated
        self.points: list[Point] = []
        self._norms: list[tuple[int, dict[str, np.ndarray]]] = []

    def add(
        self, *, step: int, scalars: Mapping[str, float], heads: Mapping[str, np.ndarray]
    ) -> Point:
        """Take in a record; ``heads``: of those `READ` names, [layers, heads]."""
        kappa = heads["kappa"]
        point = Point(
            step=step,
            loss=scalars["loss_mean"],
            grad_norm=scalars["grad_norm_mean"],
            grad_norm_max=scalars["grad_norm_max"],
            bias=_largest(bias_to_signal(heads["used_error_mean"], kappa)),
            error=_largest(error_to_signal(heads["used_error_rms"], kappa)),
            logit=_largest(np.asarray(heads["max_logit"])),
            growth=self._growth(step, heads),
            compensated=self.compensated,
        )
        self.points.append(point)
        return point

    def forget(self, before: int) -> None:
        """Drop points of steps before this one: the rule does not look back that far."""
        self.points = [p for p in self.points if p.step >= before]

    def _growth(self, step: int, heads: Mapping[str, np.ndarray]) -> Spot:
        """Head growth of a new record."""
        if step <= self.rule.settle_steps:
            return NOWHERE
        now = {name: np.array(heads[name], np.float64) for name in NORMS if name in heads}
        old = [entry for entry in self._norms if entry[0] <= step - self.rule.head_steps]
        # Only the latest of the old ones is needed, now and later.
        self._norms = [*self._norms[max(0, len(old) - 1) :], (step, now)]
        if not old:
            return NOWHERE
        small = np.array(heads["max_logit"]) < self.rule.head_logit
        return head_growth(now, old[-1][1], without=small)


NORMS = ("wq_norm", "wk_norm")
READ = ("used_error_mean", "used_error_rms", "kappa", "max_logit", *NORMS)


def head_growth(
    now: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray], *, without: np.ndarray
) -> Spot:
    """The head whose W_Q or W_K grew most against the median head.

    ``without``, bool [layers, heads]: heads that do not count, though they do for the median.
    `NOWHERE` where nothing was measured (layers without a fused QKV projection) or nothing counts.
    """
    worst = NOWHERE
    for name in now:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = now[name] / before[name]
            ratio[~np.isfinite(ratio)] = np.nan
            if np.isnan(ratio).all():
                continue
            found = _largest(np.where(without, np.nan, ratio / np.nanmedian(ratio)))
        # `not >=`: also where there is none yet, and that is NaN.
        if math.isfinite(found.value) and not worst.value >= found.value:
            worst = found
    return worst


def _largest(values: np.ndarray) -> Spot:
    """Of [layers, heads]."""
    if not np.isfinite(values).any():
        return NOWHERE
    layer, head = (int(i) for i in np.unravel_index(np.nanargmax(values), values.shape))
    return Spot(float(values[layer, head]), layer, head)

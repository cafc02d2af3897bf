"""What a run's metrics.csv says: when its gradients grew, whether and when it exploded.

All figures are means over windows of ``window`` steps, of the steps that were logged in them
(``logging.interval: 1`` logs all). A window is named by its last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocol import ExplosionConfig

from megatron_patch.runtime import records

FINAL_STEPS = 200


@dataclass(frozen=True, slots=True)
class Window:
    """Means over the logged steps of one window; NaN where none was logged."""

    step: int
    loss: float
    grad_norm: float
    loss_max: float
    grad_norm_max: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Figures of one run."""

    steps: int
    """Last logged step."""
    first_large_gradient: int | None
    """First window, after ``from_step``, whose mean gradient norm exceeds the limit."""
    exploded_at: int | None
    """First window whose mean loss exceeds the limit after having been below it."""
    largest_grad_norm: float | None
    """Largest window mean of the gradient norm after ``from_step``."""
    largest_single_grad_norm: float | None
    """Largest single logged gradient norm after ``from_step``."""
    final_loss: float | None
    """Mean loss of the last ``FINAL_STEPS`` steps."""
    lowest_loss: float | None
    """Smallest window mean."""
    eval_loss: float | None
    """Last validation loss."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


Row = dict[str, float]


def read_rows(path: Path) -> list[Row]:
    """Rows of a metrics.csv that count: step, loss, grad_norm, and eval_loss where there is one.

    Non-finite figures stay what they are.
    """
    rows: list[Row] = []
    for row in records.read_rows(path):
        try:
            found = {name: float(row[name]) for name in ("step", "loss", "grad_norm")}
            if row.get("eval_loss"):
                found["eval_loss"] = float(row["eval_loss"])
        except (KeyError, TypeError, ValueError):
            continue
        rows.append(found)
    return rows


def windows(rows: Iterable[Row], size: int) -> list[Window]:
    """Rows gathered into windows (size * k, size * (k + 1)]; the last one may be incomplete."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(max(0, (int(row["step"]) - 1) // size), []).append(row)
    return [
        Window(
            step=int(max(r["step"] for r in group)),
            loss=_mean(group, "loss"),
            grad_norm=_mean(group, "grad_norm"),
            loss_max=_largest(group, "loss"),
            grad_norm_max=_largest(group, "grad_norm"),
        )
        for _, group in sorted(groups.items())
    ]


def judge(rows: list[Row], rule: ExplosionConfig) -> Verdict:
    """The verdict on a run's rows."""
    found = windows(rows, rule.window)
    if found and found[-1].step % rule.window and math.isfinite(found[-1].loss):
        # A window that is not over yet: the mean of one or two steps is a spike, not a verdict.
        found.pop()
    late = [w for w in found if w.step >= rule.from_step]
    exploded, below = None, False
    for window in found:
        below = below or window.loss < rule.loss
        if below and window.step >= rule.from_step and not window.loss <= rule.loss:
            exploded = window.step
            break
    last = int(rows[-1]["step"]) if rows else 0
    evaluated = [r["eval_loss"] for r in rows if "eval_loss" in r]
    return Verdict(
        steps=last,
        first_large_gradient=next(
            (w.step for w in late if not w.grad_norm <= rule.grad_norm), None
        ),
        exploded_at=exploded,
        largest_grad_norm=_extreme([w.grad_norm for w in late], max),
        largest_single_grad_norm=_extreme([w.grad_norm_max for w in late], max),
        final_loss=_final(rows, last),
        lowest_loss=_extreme([w.loss for w in found], min),
        eval_loss=evaluated[-1] if evaluated else None,
    )


def _final(rows: list[Row], last: int) -> float | None:
    tail = [r["loss"] for r in rows if r["step"] > last - FINAL_STEPS]
    return sum(tail) / len(tail) if tail else None


def _mean(group: list[Row], name: str) -> float:
    return sum(row[name] for row in group) / len(group)


def _largest(group: list[Row], name: str) -> float:
    values = [row[name] for row in group]
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def _extreme(values: list[float], pick: Any) -> float | None:
    """max or min; NaN wins, because it is the worst there is."""
    if not values:
        return None
    return math.nan if any(math.isnan(v) for v in values) else pick(values)

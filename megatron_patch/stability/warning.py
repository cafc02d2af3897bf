"""The early warning: one pure function over the telemetry's history. No torch.

Two things have announced the explosions that this project recorded, hundreds of steps before the
loss moved (research/report.md has the figures), and no run that stayed stable has shown them:

    head growth = spectral norm of one head's W_Q or W_K / what it was `head_steps` steps ago,
                  over the median of the same ratio over all heads
    error = what the run's own numerics get wrong in one head's delta / the signal it disturbs

Danger is confirmed by `CONFIRM` records that span `confirm_steps`, so that a short
``stability.interval`` is not judged by its noise. Weights grow in every run, early and fast; one
head that leaves all others behind, with large logits, is what an explosion looks like from inside.
The error looks back on nothing, so it also speaks of weights that were sick before the run began.
Where the numerics are `compensated` already it is no danger but something to watch: heads saturated
beyond what float32 scores resolve, which no switch cures. What else the heads show (how coherent
the error is, how large the logits are) names a place and raises `ok` to `watch`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from megatron_patch.schema.stability import RuleConfig, StabilityConfig
from megatron_patch.stability.names import LEVELS

SMOOTH = 5  # records that a spike is compared with, at least
CONFIRM = 2  # records in a row that must agree on danger, at least
UNMEASURED = "no head was measured, nothing is known of attention"
FLICKER = 200
"""Steps at `ok` over which a stretch of signs goes on."""


@dataclass(frozen=True, slots=True)
class Spot:
    """The head with the largest value of something; NaN and -1 where nothing was measured."""

    value: float = math.nan
    layer: int = -1
    head: int = -1

    def __str__(self) -> str:
        return f"layer {self.layer} head {self.head}"


NOWHERE = Spot()


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What the rule reads of one record."""

    step: int
    loss: float
    grad_norm: float
    """Mean over the record's steps."""
    grad_norm_max: float
    bias: Spot = NOWHERE
    """|used_error_mean| x kappa: coherent error of delta over its signal."""
    error: Spot = NOWHERE
    """used_error_rms x kappa: the whole error of delta over the same signal."""
    logit: Spot = NOWHERE
    """max_logit."""
    growth: Spot = NOWHERE
    """Of W_Q or W_K; NaN while there is nothing to compare with."""
    compensated: bool = False
    """The numerics of this record: whether the guard's remedy is what the run computes with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(RuleConfig):
    """Thresholds; chosen on some seeds and judged on others by research/analysis/early_warning.py.

    Single heads leave others behind early in every run, with small logits, hence `head_logit`;
    errors grow with the logits.
    """

    settle_steps: int = 0
    """Steps before the rule looks at growth: the learning rate's warm-up."""
    head_signal: float = 0.005
    """`Point.bias` from which a head is named. Of the synthetic regimes of docs/numerics.md the
    saturated and the tied sinks reach it with a plain kernel; `compensated` stays below 1e-4."""

    @classmethod
    def of(cls, options: StabilityConfig, *, warmup_steps: int) -> Rule:
        """The rule that ``stability.rule`` describes."""
        chosen = {item.name: getattr(options.rule, item.name) for item in fields(RuleConfig)}
        return cls(settle_steps=warmup_steps, **chosen)

    def reach(self, more: int) -> int:
        """Steps that `judge` looks back on, and ``more``: the first of the records that confirm
        has its growth from so far back."""
        return self.head_steps + self.confirm_steps + more


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One line for people and programs."""

    level: str
    reason: str

    @property
    def code(self) -> int:
        """0 ok, 1 watch, 2 danger."""
        return LEVELS.index(self.level)

    @property
    def kind(self) -> tuple[str, bool]:
        """What a line is logged for, where it changes."""
        return self.level, self.reason == UNMEASURED

    def line(self) -> str:
        """As the console says it."""
        return f"attention: {self.level} ({self.reason})"


def judge(history: Sequence[Point], rule: Rule) -> Verdict:
    """The verdict after the last record of ``history`` (in order of steps).

    Deterministic in its arguments: every rank computes it from the same numbers.
    """
    if not history:
        return Verdict(level="ok", reason="nothing recorded yet")
    return _verdict(_confirming(history, len(history), rule), rule)


def verdicts(history: Sequence[Point], rule: Rule) -> Iterator[Verdict]:
    """What `judge` says after every record, in time that grows as their number does."""
    for i in range(1, len(history) + 1):
        yield _verdict(_confirming(history, i, rule), rule)


def _confirming(history: Sequence[Point], end: int, rule: Rule) -> Sequence[Point]:
    """The records before ``end`` that have to agree, fewer while there are not enough."""
    first = max(0, end - CONFIRM)
    while first > 0 and history[end - 1].step - history[first].step < rule.confirm_steps:
        first -= 1
    return history[first:end]


def _verdict(last: Sequence[Point], rule: Rule) -> Verdict:
    """From the records that have to agree, fewer while there are not enough."""
    now = last[-1]
    if not (math.isfinite(now.grad_norm) and math.isfinite(now.loss)):
        return Verdict(level="danger", reason=f"loss or gradient norm not finite at {now.step:,}")
    coherent = f"{now.bias}: coherent error of delta {_times(now.bias)} the signal"
    large = f"{now.logit}: logits up to {now.logit.value:,.0f}"
    signs = [_grown(last, rule), _wrong(last, rule)]
    signs += [("watch", coherent)] * _reaches(now.bias, rule.head_signal)
    signs += [("watch", large)] * _reaches(now.logit, rule.watch_logit)
    named = [sign for level in LEVELS[:0:-1] for sign in signs if sign[0] == level]
    if not named:
        measured = any(math.isfinite(x.value) for x in (now.bias, now.error, now.logit, now.growth))
        return Verdict(level="ok", reason="no head shows anything" if measured else UNMEASURED)
    return Verdict(level=named[0][0], reason="; ".join(text for _, text in named))


def _grown(points: Sequence[Point], rule: Rule) -> tuple[str, str]:
    """(level, text) of the head whose weights leave all others behind, at the last records."""
    now = points[-1].growth
    text = (
        f"{now}: W_Q or W_K grew {now.value:.2f}x as much as the median head's in "
        f"{rule.head_steps:,} steps"
    )
    if _confirmed([(p.step, p.growth) for p in points], rule.danger_head_growth, rule):
        return "danger", text
    return ("watch" if _reaches(now, rule.watch_head_growth) else "ok"), text


def _wrong(points: Sequence[Point], rule: Rule) -> tuple[str, str]:
    """(level, text) of the head whose numerics disturb its own gradient most, at the last ones."""
    now, limit = points[-1], rule.danger_error
    text = f"{now.error}: error of delta {_times(now.error)} the signal"
    if _confirmed([(p.step, p.error) for p in points], limit, rule) and not now.compensated:
        return "danger", text
    return ("watch" if _reaches(now.error, limit) else "ok"), text


def _times(spot: Spot) -> str:
    """0.14x, 7,430x."""
    return f"{spot.value:,.0f}x" if spot.value >= 100 else f"{spot.value:.2g}x"


def _reaches(spot: Spot, limit: float | None) -> bool:
    return limit is not None and spot.value >= limit


def _confirmed(spots: Sequence[tuple[int, Spot]], limit: float | None, rule: Rule) -> bool:
    span = spots[-1][0] - spots[0][0]
    enough = len(spots) >= CONFIRM and span >= rule.confirm_steps
    return enough and all(_reaches(spot, limit) for _, spot in spots)


def spike_score(values: Sequence[float], largest: float) -> float:
    """How far ``largest`` lies above the median of ``values``, in robust standard deviations.

    1.4826 x the median absolute deviation estimates the standard deviation of a normal sample and
    ignores the spikes themselves. NaN with fewer than `SMOOTH` values.
    """
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < SMOOTH:
        return math.nan
    middle = statistics.median(finite)
    spread = 1.4826 * statistics.median(abs(v - middle) for v in finite)
    if spread == 0:
        return 0.0 if largest == middle else math.inf
    return (largest - middle) / spread

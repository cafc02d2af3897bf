"""The early warning: one pure function over the telemetry's history. No torch.

Three things have announced the explosions that this project recorded, hundreds of steps before the
loss moved (research/report.md has the figures), and no run that stayed stable has shown them:

    growth = smoothed gradient norm / its minimum over the last `reference_steps` steps
    head growth = spectral norm of one head's W_Q or W_K / what it was `head_steps` steps ago,
                  over the median of the same ratio over all heads
    error = what the run's own numerics get wrong in one head's delta / the signal it disturbs

smoothed: the median of the last `SMOOTH` records, each the mean of its steps, so that single
spikes, which stable runs have too, do not count; of more where those span less than
`Rule.smooth_steps`, so that a short `stability.interval` is not judged by its noise, and danger is
likewise confirmed over `Rule.confirm_steps`. The minimum is looked for after the warm-up and in
a window, because norms also drift over tens of thousands of steps. Weights grow in every run, early
and fast; one head that leaves all others behind, with large logits, is what an explosion looks like
from inside, even while the gradient norm stands still. The error looks back on nothing, so it also
speaks of weights that were sick before the run began. Where the numerics are `compensated` already
it is no danger but something to watch: heads saturated beyond what float32 scores resolve, which no
switch cures. Nor is the growth of the norm there, and with any numerics where that error is
measured and no head shows anything: such a rise is none of attention's. What else the heads show
(how coherent the error is, how large the logits are) names a place and raises `ok` to `watch`.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megatron_patch.stability.names import LEVELS

if TYPE_CHECKING:
    from megatron_patch.schema.stability import StabilityConfig

SMOOTH = 5  # records the gradient norm is smoothed over, at least
CONFIRM = 2  # records in a row that must agree on danger, at least


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
class Rule:
    """Thresholds; chosen on some seeds and judged on others by benchmarks/early_warning.py."""

    watch_growth: float = 1.25
    danger_growth: float = 1.3
    reference_steps: int = 4000
    settle_steps: int = 0
    """Steps before the rule looks: the learning rate's warm-up."""
    smooth_steps: int = 200
    """Steps from the first to the last record of a smoothed norm, at least: `SMOOTH` records of 50
    steps, on which the thresholds were chosen."""
    confirm_steps: int = 50
    """The same of the records that agree on danger: `CONFIRM` of 50 steps."""
    head_signal: float = 0.005
    """`Point.bias` from which a head is named. Of the synthetic regimes of docs/numerics.md the
    saturated and the tied sinks reach it with a plain kernel; `compensated` stays below 1e-4."""
    watch_head_growth: float = 1.5
    danger_head_growth: float = 2.0
    head_steps: int = 500
    """How far back head growth looks: at least this many steps, over records."""
    head_logit: float = 100.0
    """Largest logit from which a head's growth counts. Single heads leave others behind early in
    every run, with small logits (research/report.md); errors grow with the logits."""
    danger_error: float | None = 0.1
    """`Point.error` from which it is danger, and under `compensated` watch; None: never."""
    watch_logit: float | None = 1000.0
    """`Point.logit` for watch; None: never."""
    norm_needs_head: bool = True
    """Whether growth of the norm is no danger where heads clear attention of it (`_cleared`)."""

    @classmethod
    def of(cls, options: StabilityConfig, *, warmup_steps: int) -> Rule:
        """The rule that the keys of ``stability:`` describe."""
        names = [item.name for item in fields(cls) if hasattr(options, item.name)]
        chosen = {name: getattr(options, name) for name in names}
        return cls(settle_steps=warmup_steps, **chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One line for people and programs."""

    level: str
    reason: str

    @property
    def code(self) -> int:
        """0 ok, 1 watch, 2 danger."""
        return LEVELS.index(self.level)

    def line(self) -> str:
        """As the console says it."""
        return f"attention: {self.level} ({self.reason})"


def smoothed(values: Sequence[float]) -> list[float]:
    """Medians over the last `SMOOTH` values, one for every value from the `SMOOTH`-th on."""
    n = len(values)
    return [statistics.median(values[i - SMOOTH + 1 : i + 1]) for i in range(SMOOTH - 1, n)]


class Trend:
    """Growth of the smoothed gradient norm, record by record.

    A record costs the same however many came before it: a report judges all records of a run.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.rises: deque[tuple[int, float]] = deque()
        """(step, growth) at the records that confirm (fewer while there are not enough), oldest
        first."""
        self._norms: deque[tuple[int, float]] = deque()
        self._ordered: list[float] = []  # the norms of these: a short interval has many of them
        # (step, median) that can still be the window's lowest, now or later: both increase.
        self._lowest: deque[tuple[int, float]] = deque()

    def add(self, point: Point) -> None:
        """Take in the next record, in order of steps."""
        if point.step <= self.rule.settle_steps or not math.isfinite(point.grad_norm):
            return
        self._norms.append((point.step, point.grad_norm))
        bisect.insort(self._ordered, point.grad_norm)
        for gone in _surplus(self._norms, SMOOTH, self.rule.smooth_steps):
            del self._ordered[bisect.bisect_left(self._ordered, gone)]
        if not _spans(self._norms, SMOOTH, self.rule.smooth_steps):
            return
        half = len(self._ordered) // 2
        median = (self._ordered[half] + self._ordered[-half - 1]) / 2
        while self._lowest and self._lowest[-1][1] >= median:
            self._lowest.pop()
        self._lowest.append((point.step, median))
        while self._lowest[0][0] < point.step - self.rule.reference_steps:
            self._lowest.popleft()
        lowest = self._lowest[0][1]
        # A norm of zero is one that nobody computed, or of a model that learns nothing.
        self.rises.append((point.step, median / lowest if lowest > 0 else 1.0))
        for _ in _surplus(self.rises, CONFIRM, self.rule.confirm_steps):
            pass


def _surplus(window: deque[tuple[int, float]], records: int, steps: int) -> Iterator[float]:
    """Cut a window (step, value) to the last records that are so many and span so much."""
    while len(window) > records and window[-1][0] - window[1][0] >= steps:
        yield window.popleft()[1]


def _spans(window: Sequence[tuple[int, object]], records: int, steps: int) -> bool:
    """Whether records (step, value) are so many and span so much."""
    return len(window) >= records and window[-1][0] - window[0][0] >= steps


def growth(history: Sequence[Point], rule: Rule) -> list[float]:
    """Growth at the records that confirm (fewer while there are not enough), oldest first."""
    trend = Trend(rule)
    for point in history:
        trend.add(point)
    return [rise for _, rise in trend.rises]


def judge(history: Sequence[Point], rule: Rule) -> Verdict:
    """The verdict after the last record of ``history`` (in order of steps).

    Deterministic in its arguments: every rank computes it from the same numbers.
    """
    if not history:
        return Verdict(level="ok", reason="nothing recorded yet")
    trend = Trend(rule)
    for point in history:
        trend.add(point)
    return _verdict(_confirming(history, len(history), rule), trend.rises, rule)


def verdicts(history: Sequence[Point], rule: Rule) -> Iterator[Verdict]:
    """What `judge` says after every record, in time that grows as their number does."""
    trend = Trend(rule)
    for i, point in enumerate(history, start=1):
        trend.add(point)
        yield _verdict(_confirming(history, i, rule), trend.rises, rule)


def _confirming(history: Sequence[Point], end: int, rule: Rule) -> Sequence[Point]:
    """The records before ``end`` that have to agree, fewer while there are not enough."""
    first = max(0, end - CONFIRM)
    while first > 0 and history[end - 1].step - history[first].step < rule.confirm_steps:
        first -= 1
    return history[first:end]


def _verdict(last: Sequence[Point], rises: Sequence[tuple[int, float]], rule: Rule) -> Verdict:
    """From the records that have to agree and their rises, fewer while there are not enough."""
    now = last[-1]
    if not (math.isfinite(now.grad_norm) and math.isfinite(now.loss)):
        return Verdict(level="danger", reason=f"loss or gradient norm not finite at {now.step:,}")
    heads = _heads(last, rule)
    if not rises:
        return _strongest(("ok", "too few records after the warm-up for a trend"), *heads)
    rise = rises[-1][1]
    text = f"gradient norm {rise:.2f}x its minimum of the last {rule.reference_steps:,} steps"
    confirmed = _spans(rises, CONFIRM, rule.confirm_steps)
    rose = confirmed and min(rise for _, rise in rises) >= rule.danger_growth
    clear = rose and rule.norm_needs_head and any(_cleared(point, rule) for point in last)
    danger = rose and not now.compensated and not clear
    if clear and _cleared(now, rule):
        text += ", and no head shows anything"
    level = "danger" if danger else "watch" if rise >= rule.watch_growth else "ok"
    return _strongest((level, text), *heads)


def _strongest(*signs: tuple[str, str]) -> Verdict:
    """The verdict of several signs (level, text), the worst first; the first one is always told."""
    ranked = sorted(signs, key=lambda sign: -LEVELS.index(sign[0]))  # stable: ties keep their order
    told = [text for level, text in ranked if level != "ok" or (level, text) == signs[0]]
    return Verdict(level=ranked[0][0], reason="; ".join(told))


def _heads(points: Sequence[Point], rule: Rule) -> tuple[tuple[str, str], ...]:
    """(level, text) of every sign that heads can show, at the last records."""
    now = points[-1]
    return _grown(points, rule), _wrong(points, rule), _place(now, rule), _large(now, rule)


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


def _place(now: Point, rule: Rule) -> tuple[str, str]:
    """(level, text) of the head in which that error is most coherent."""
    text = f"{now.bias}: coherent error of delta {_times(now.bias)} the signal"
    return ("watch" if _reaches(now.bias, rule.head_signal) else "ok"), text


def _large(now: Point, rule: Rule) -> tuple[str, str]:
    """(level, text) of the head with the largest logits."""
    text = f"{now.logit}: logits up to {now.logit.value:,.0f}"
    return ("watch" if _reaches(now.logit, rule.watch_logit) else "ok"), text


def _cleared(point: Point, rule: Rule) -> bool:
    """Whether heads clear attention of what the norm does: the error of the run's own numerics is
    measured and judged, and no head is at `watch`. Logits and their growth alone would not do:
    where something bounds logits they never speak."""
    measured = rule.danger_error is not None and math.isfinite(point.error.value)
    return measured and all(level == "ok" for level, _ in _heads([point], rule))


def _times(spot: Spot) -> str:
    """0.14x, 7,430x."""
    return f"{spot.value:,.0f}x" if spot.value >= 100 else f"{spot.value:.2g}x"


def _reaches(spot: Spot, limit: float | None) -> bool:
    return limit is not None and spot.value >= limit


def _confirmed(spots: Sequence[tuple[int, Spot]], limit: float | None, rule: Rule) -> bool:
    enough = _spans(spots, CONFIRM, rule.confirm_steps)
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

"""The early-warning rule on histories made up here; the recorded ones: benchmarks/early_warning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patch.stability import telemetry
from megatron_patch.stability.warning import (
    CONFIRM,
    SMOOTH,
    Point,
    Rule,
    Spot,
    growth,
    judge,
    smoothed,
    spike_score,
    verdicts,
)

INTERVAL = 50
RULE = Rule(settle_steps=2000)


def history(
    norm: Callable[[int], float], *, steps: int = 12_000, noise: float = 0.0, seed: int = 0
) -> list[Point]:
    """Records every INTERVAL steps of a run whose gradient norm is ``norm(step)``, with noise."""
    random = np.random.default_rng(seed)
    return [
        Point(
            step=s,
            loss=3.0,
            grad_norm=norm(s) * math.exp(noise * random.standard_normal()),
            grad_norm_max=norm(s),
        )
        for s in range(INTERVAL, steps + 1, INTERVAL)
    ]


def levels(points: list[Point], rule: Rule = RULE) -> dict[int, str]:
    return {points[i].step: judge(points[: i + 1], rule).level for i in range(len(points))}


def first(points: list[Point], level: str) -> int | None:
    return next((s for s, found in levels(points).items() if found == level), None)


def falling(step: int) -> float:
    """A stable run: large at first, then a floor."""
    return 0.26 + 2.0 * math.exp(-step / 700)


def exploding(step: int) -> float:
    """The same until 6,000 steps, then a doubling every 600."""
    return falling(step) * 2 ** max(0.0, (step - 6000) / 600)


@pytest.mark.parametrize("seed", range(5))
def test_a_stable_run_never_leaves_ok(seed: int) -> None:
    assert set(levels(history(falling, noise=0.05, seed=seed)).values()) == {"ok"}


@pytest.mark.parametrize("seed", range(5))
def test_a_rise_is_watched_and_then_called_danger(seed: int) -> None:
    points = history(exploding, noise=0.05, seed=seed)
    watch, danger = first(points, "watch"), first(points, "danger")
    assert watch is not None and danger is not None and watch <= danger
    # 1.3x is reached after 230 steps; the smoothing and the confirmation cost 3 records more.
    assert 6000 < danger <= 6000 + 230 + (SMOOTH // 2 + CONFIRM + 1) * INTERVAL


@pytest.mark.parametrize("interval", [1, 10, 50, 200])
def test_how_often_it_is_looked_does_not_decide(interval: int) -> None:
    """Noise of steps, of which a record is the mean, is no danger, and a rise is one in time."""
    for seed in range(5):
        random = np.random.default_rng(seed)
        steps = range(interval, 9001, interval)
        noise = np.exp(0.25 / math.sqrt(interval) * random.standard_normal(len(steps)))
        points = [
            Point(step=s, loss=3.0, grad_norm=exploding(s) * x, grad_norm_max=1.0)
            for s, x in zip(steps, noise, strict=True)
        ]
        found = zip(points, verdicts(points, RULE), strict=True)
        danger = next(point.step for point, verdict in found if verdict.level == "danger")
        assert 6000 < danger < 6000 + 650 + 4 * interval
    for spot in ({"growth": Spot(2.5, 1, 8)}, {"error": Spot(0.2, 1, 8)}):
        until = 2 * max(interval, 50)
        points = [replace(p, **spot) for p in points if p.step <= until]
        levels = {p.step: v.level for p, v in zip(points, verdicts(points, RULE), strict=True)}
        assert next(step for step, level in levels.items() if level == "danger") == (
            until if interval >= 50 else 50 + interval
        )


@pytest.mark.parametrize("interval", [1, 10, 12, 30, 50])
@pytest.mark.parametrize("rule", [Rule(), Rule(smooth_steps=1000, confirm_steps=500)])
def test_the_trainer_keeps_what_the_rule_looks_back_on(interval: int, rule: Rule) -> None:
    """A climb that is danger by its oldest records: without them it would be watched."""
    points = [
        Point(step=s, loss=3.0, grad_norm=1.302 ** (s / rule.reference_steps), grad_norm_max=1.0)
        for s in range(interval, 7001, interval)
    ]
    trainer: Any = SimpleNamespace(rule=rule, options=SimpleNamespace(interval=interval))
    reach = telemetry.Stability._reach.fget(trainer)  # type: ignore[attr-defined]
    kept = [p for p in points if p.step >= points[-1].step - reach]
    whole = judge(points, rule)
    assert len(kept) < len(points) and judge(kept, rule) == whole
    assert whole.level == "danger"


def test_a_norm_that_grows_under_the_remedy_is_watched() -> None:
    """There is nothing to switch to, and no head that shows anything; a head still is danger."""
    points = [replace(p, compensated=True) for p in history(exploding)]
    assert set(levels(points).values()) == {"ok", "watch"}
    assert judge([replace(p, growth=Spot(2.5, 1, 8)) for p in points], RULE).level == "danger"


def test_a_norm_that_grows_while_no_head_shows_anything_is_watched() -> None:
    """As in two runs with plain numerics and QK-norm (research/report.md)."""
    shown, calm = Spot(1200.0, 1, 8), Spot(37.0, 3, 1)
    points = [replace(p, logit=calm, error=Spot(0.01, 3, 1)) for p in history(exploding)]
    assert set(levels(points).values()) == {"ok", "watch"}
    assert judge(points, RULE).reason.endswith("4,000 steps, and no head shows anything")
    alone, expected = replace(RULE, norm_needs_head=False), first(history(exploding), "danger")
    assert expected is not None
    for told, rule in (
        ([replace(p, logit=shown) for p in points], RULE),
        ([replace(p, bias=Spot(0.006, 1, 8)) for p in points], RULE),
        (points, alone),
        (points, replace(RULE, danger_error=None)),  # what would they clear it by?
        ([replace(p, error=Spot()) for p in points], RULE),  # with dropout, say
        (history(exploding), RULE),  # no head is measured
    ):
        assert next(s for s, level in levels(told, rule).items() if level == "danger") == expected


def test_a_head_that_shows_something_in_one_record_makes_no_danger_of_a_norm() -> None:
    """All records that have to agree must do so, as for every other sign."""
    calm = [replace(p, logit=Spot(37.0, 3, 1), error=Spot(0.01, 3, 1)) for p in history(exploding)]
    for sign in ({"logit": Spot(1200.0, 1, 8)}, {"error": Spot()}):
        once = [replace(p, **sign) if p.step == 7000 else p for p in calm]
        twice = [replace(p, **sign) if p.step in (7000, 7050) else p for p in calm]
        assert "danger" not in levels(once).values()
        assert first(twice, "danger") == 7050
        up_to = [p for p in once if p.step <= 7000]
        assert "no head shows anything" not in judge(up_to, RULE).reason


def test_single_spikes_are_no_danger() -> None:
    """Without the median a 300x spike, which stable runs have too, would be one."""
    points = history(lambda s: falling(s) * (300 if s in (4000, 7000) else 1))
    assert set(levels(points).values()) == {"ok"}


def test_a_drift_over_a_long_run_is_no_danger() -> None:
    points = history(lambda s: falling(s) * (1 + s / 100_000), steps=60_000)
    assert set(levels(points).values()) == {"ok"}
    no_window = Rule(settle_steps=2000, reference_steps=10**9)
    assert judge(points, no_window).level == "danger"


def test_the_warm_up_is_not_looked_at() -> None:
    points = history(lambda s: 0.1 if s <= 1000 else falling(s))
    assert set(levels(points).values()) == {"ok"}
    assert judge(points[:40], Rule(settle_steps=0)).level == "danger"


def test_not_finite_is_danger_at_once() -> None:
    points = history(falling, steps=3000)
    for bad in (math.nan, math.inf):
        broken = [*points, Point(step=3050, loss=3.0, grad_norm=bad, grad_norm_max=bad)]
        assert judge(broken, RULE).level == "danger"
        broken = [*points, Point(step=3050, loss=bad, grad_norm=0.3, grad_norm_max=0.3)]
        assert judge(broken, RULE).level == "danger"


def test_norms_that_nobody_computed_are_no_rise() -> None:
    assert set(levels(history(lambda s: 0.0)).values()) == {"ok"}


def test_a_record_that_was_not_finite_does_not_blind_the_rule() -> None:
    """training.check_finite: false goes on after such a step."""
    points = history(falling, steps=4000)
    points[-3] = Point(step=3900, loss=3.0, grad_norm=math.nan, grad_norm_max=math.nan)
    assert judge(points, RULE).level == "ok"


def test_a_head_that_disturbs_itself_is_named_and_watched() -> None:
    points = history(falling, steps=4000)
    bad = Point(
        step=4050, loss=3.0, grad_norm=0.27, grad_norm_max=0.3, bias=Spot(0.4, layer=2, head=8)
    )
    verdict = judge([*points, bad], RULE)
    assert verdict.level == "watch" and "layer 2 head 8" in verdict.line()


def growing(*values: float) -> list[Point]:
    """A calm history that ends with records of these head growths."""
    end = [
        Point(step=4000 + INTERVAL * (i + 1), loss=3.0, grad_norm=0.27, grad_norm_max=0.3,
              growth=Spot(value, layer=1, head=8))
        for i, value in enumerate(values)
    ]  # fmt: skip
    return [*history(falling, steps=4000), *end]


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ((1.2, 1.3), "ok"),
        ((1.2, 1.6), "watch"),
        ((1.2, 7.0), "watch"),  # one record is not confirmed
        ((2.1, 2.1), "danger"),
        ((2.1, 1.9), "watch"),
        ((math.nan, math.nan), "ok"),
        ((math.nan, 2.5), "watch"),
    ],
)
def test_a_head_that_leaves_the_others_behind(values: tuple[float, ...], level: str) -> None:
    """Danger while the gradient norm stands still: it moves a thousand steps later."""
    verdict = judge(growing(*values), RULE)
    assert verdict.level == level
    assert ("layer 1 head 8" in verdict.line()) == (level != "ok")
    assert "gradient norm 1.00x its minimum" in verdict.line()


@pytest.mark.parametrize(
    ("values", "compensated", "level"),
    [
        ((0.02, 0.09), False, "ok"),
        ((0.02, 5.0), False, "watch"),  # one record is not confirmed
        ((0.1, 0.1), False, "danger"),
        ((5.0, 0.09), False, "ok"),
        ((math.nan, math.nan), False, "ok"),
        ((math.nan, 5.0), False, "watch"),
        ((5.0, 5.0), True, "watch"),  # there is nothing better to switch to
    ],
)
@pytest.mark.parametrize("before", [0, 4000])
def test_an_error_as_large_as_the_signal(
    values: tuple[float, ...], compensated: bool, level: str, before: int
) -> None:
    """A run that begins on sick weights has no history, and its norm stands still for a while."""
    end = [
        Point(step=before + INTERVAL * (i + 1), loss=3.0, grad_norm=0.27, grad_norm_max=0.3,
              error=Spot(value, layer=1, head=8), compensated=compensated)
        for i, value in enumerate(values)
    ]  # fmt: skip
    points = [*history(falling, steps=before), *end]
    verdict = judge(points, RULE)
    assert verdict.level == level
    assert ("layer 1 head 8: error of delta" in verdict.line()) == (level != "ok")
    assert judge(points, replace(RULE, danger_error=None)).level == "ok"


def test_errors_are_told_in_figures_people_read() -> None:
    end = Point(step=50, loss=3.0, grad_norm=0.3, grad_norm_max=0.3, bias=Spot(0.012345, 0, 1))
    told = judge([replace(end, error=Spot(7432.1, 1, 8))], RULE).reason
    assert "error of delta 7,432x the signal" in told and "coherent error of delta 0.012x" in told


def test_large_logits_are_watched() -> None:
    points = history(falling, steps=4000)
    for logit, level in ((300.0, "ok"), (1000.0, "watch"), (1e6, "watch"), (math.nan, "ok")):
        verdict = judge([*points, replace(points[-1], logit=Spot(logit, 1, 8))], RULE)
        assert verdict.level == level
    assert (
        "layer 1 head 8: logits up to 1,000"
        in judge([*points, replace(points[-1], logit=Spot(1000.0, 1, 8))], RULE).line()
    )
    off = replace(RULE, watch_logit=None)
    assert judge([*points, replace(points[-1], logit=Spot(1e6, 1, 8))], off).level == "ok"


def test_both_signs_are_told_the_worse_first() -> None:
    points = growing(1.6, 1.6)
    rising = [replace(p, grad_norm=p.grad_norm * 2) for p in points[-6:]]
    verdict = judge([*points[:-6], *rising], RULE)
    assert verdict.level == "danger"
    assert verdict.reason.startswith("gradient norm 1.98x") and "head 8: W_Q" in verdict.reason
    verdict = judge(
        [*points[:-6], *(replace(p, growth=Spot(2.5, 1, 8)) for p in points[-6:])], RULE
    )
    assert verdict.level == "danger" and verdict.reason.startswith("layer 1 head 8")


def test_short_histories_and_nothing() -> None:
    assert judge([], RULE).level == "ok"
    points = history(exploding, steps=2000 + (SMOOTH - 1) * INTERVAL)
    assert growth(points, RULE) == [] and judge(points, RULE).level == "ok"


@settings(max_examples=60)
@given(
    norms=st.lists(st.floats(1e-3, 1e3), min_size=SMOOTH + CONFIRM, max_size=60),
    scale=st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]),
)
def test_the_verdict_knows_no_unit_and_only_looks_back(norms: list[float], scale: float) -> None:
    points = history(lambda s: norms[s // INTERVAL - 1], steps=len(norms) * INTERVAL)
    larger = history(lambda s: norms[s // INTERVAL - 1] * scale, steps=len(norms) * INTERVAL)
    rule = Rule()
    assert judge(points, rule) == judge(larger, rule)
    ancient = [Point(step=-10_000, loss=3.0, grad_norm=1e-9, grad_norm_max=1e-9)] * SMOOTH
    assert judge(ancient + points, rule).level == judge(points, rule).level


def slow_growth(points: list[Point], rule: Rule) -> list[float]:
    """The definition: medians over the whole history, and their minimum in the window."""
    seen = [p for p in points if p.step > rule.settle_steps and math.isfinite(p.grad_norm)]
    medians = smoothed([p.grad_norm for p in seen])
    steps = [p.step for p in seen[SMOOTH - 1 :]]
    found = []
    for last in range(max(0, len(medians) - CONFIRM), len(medians)):
        start = steps[last] - rule.reference_steps
        lowest = min(m for m, s in zip(medians[: last + 1], steps, strict=False) if s >= start)
        found.append(medians[last] / lowest if lowest > 0 else 1.0)
    return found


def recent(points: list[Point], rule: Rule) -> list[Point]:
    """As many records as the trainer keeps."""
    return [p for p in points if p.step >= points[-1].step - rule.reference_steps - 20 * INTERVAL]


@settings(max_examples=150)
@given(
    norms=st.lists(
        st.sampled_from([0.0, 0.2, 0.3, 0.31, 0.4, math.nan]) | st.floats(0.1, 1.0),
        min_size=1,
        max_size=120,
    ),
    window=st.sampled_from([0, 100, 400, 2000]),
    settle=st.sampled_from([0, 300]),
    seed=st.integers(0, 99),
)
def test_one_pass_gives_the_verdicts_of_the_definition(
    norms: list[float], window: int, settle: int, seed: int
) -> None:
    rule = Rule(reference_steps=window, settle_steps=settle)
    random = np.random.default_rng(seed)
    points = [
        replace(
            p,
            growth=Spot(float(random.choice([math.nan, 1.0, 1.6, 2.1, 3.0]))),
            error=Spot(float(random.choice([math.nan, 0.01, 0.2]))),
        )
        for p in history(lambda s: norms[s // INTERVAL - 1], steps=len(norms) * INTERVAL)
    ]
    found = list(verdicts(points, rule))
    assert len(found) == len(points)
    for i, verdict in enumerate(found):
        seen = points[: i + 1]
        assert growth(seen, rule) == slow_growth(seen, rule)
        assert verdict == judge(seen, rule)
        # Where the trainer's records are finite it says the same of the few that it keeps.
        if not math.isnan(sum(p.grad_norm for p in seen[-40:])):
            assert verdict == judge(recent(seen, rule), rule)


def test_spike_score_is_robust() -> None:
    calm = [0.30, 0.31, 0.29, 0.30, 0.32, 0.31, 0.30]
    assert spike_score(calm, 0.31) < 2 < 50 < spike_score([*calm, 40.0], 30.0)
    assert math.isnan(spike_score(calm[:2], 1.0))
    assert spike_score([0.3] * 6, 0.3) == 0.0 and spike_score([0.3] * 6, 0.4) == math.inf

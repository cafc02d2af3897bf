"""The early-warning rule on histories made up here; recorded runs: test_early_warning.py."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_patch.stability.warning import (
    NOWHERE,
    UNMEASURED,
    Point,
    Rule,
    Spot,
    judge,
    spike_score,
    verdicts,
)

INTERVAL = 50
RULE = Rule(settle_steps=2000)


def calm(steps: int, interval: int = INTERVAL) -> list[Point]:
    """Records of a run that shows nothing."""
    return [
        Point(step=s, loss=3.0, grad_norm=0.27, grad_norm_max=0.3, logit=Spot(30.0, 1, 8))
        for s in range(interval, steps + 1, interval)
    ]


@pytest.mark.parametrize("interval", [1, 10, 50, 200])
def test_how_often_it_is_looked_does_not_decide(interval):
    for spot in ({"growth": Spot(2.5, 1, 8)}, {"error": Spot(0.2, 1, 8)}):
        until = 2 * max(interval, 50)
        points = [replace(p, **spot) for p in calm(until, interval)]
        levels = {p.step: v.level for p, v in zip(points, verdicts(points, RULE), strict=True)}
        assert next(step for step, level in levels.items() if level == "danger") == (
            until if interval >= 50 else 50 + interval
        )


@pytest.mark.parametrize("interval", [1, 12, 50])
@pytest.mark.parametrize("rule", [Rule(), Rule(confirm_steps=500)])
def test_the_monitor_keeps_what_the_rule_looks_back_on(interval, rule):
    points = [replace(p, error=Spot(0.2, 1, 8)) for p in calm(7000, interval)]
    kept = [p for p in points if p.step >= points[-1].step - rule.reach(0)]
    assert len(kept) < len(points) and judge(kept, rule) == judge(points, rule)
    assert judge(kept, rule).level == "danger"


def test_a_rising_gradient_norm_is_no_sign_of_attention():
    points = [replace(p, grad_norm=p.grad_norm * 1.1**i) for i, p in enumerate(calm(4000))]
    assert {v.level for v in verdicts(points, RULE)} == {"ok"}
    assert judge(points, RULE).reason == "no head shows anything"


def test_a_record_without_measurements_is_not_taken_for_a_healthy_one():
    blind = [replace(p, logit=NOWHERE) for p in calm(200)]
    assert judge(blind, RULE).line() == f"attention: ok ({UNMEASURED})"
    for name in ("bias", "error", "logit", "growth"):
        seen = [*blind[:-1], replace(blind[-1], **{name: Spot(1e-9, 0, 0)})]
        assert judge(seen, RULE).reason == "no head shows anything"


def test_not_finite_is_danger_at_once():
    points = calm(3000)
    for bad in (math.nan, math.inf):
        broken = [*points, Point(step=3050, loss=3.0, grad_norm=bad, grad_norm_max=bad)]
        assert judge(broken, RULE).level == "danger"
        broken = [*points, Point(step=3050, loss=bad, grad_norm=0.3, grad_norm_max=0.3)]
        assert judge(broken, RULE).level == "danger"
        # training.check_finite: false goes on after such a step.
        assert judge([*broken, Point(step=3100, loss=3.0, grad_norm=0.3, grad_norm_max=0.3)],
                     RULE).level == "ok"  # fmt: skip


def test_a_head_that_disturbs_itself_is_named_and_watched():
    bad = Point(
        step=4050, loss=3.0, grad_norm=0.27, grad_norm_max=0.3, bias=Spot(0.4, layer=2, head=8)
    )
    verdict = judge([*calm(4000), bad], RULE)
    assert verdict.level == "watch" and "layer 2 head 8" in verdict.line()


def growing(*values: float) -> list[Point]:
    """A calm history that ends with records of these head growths."""
    end = [
        Point(step=4000 + INTERVAL * (i + 1), loss=3.0, grad_norm=0.27, grad_norm_max=0.3,
              growth=Spot(value, layer=1, head=8))
        for i, value in enumerate(values)
    ]  # fmt: skip
    return [*calm(4000), *end]


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
def test_a_head_that_leaves_the_others_behind(values, level):
    """Danger while the gradient norm stands still: it moves a thousand steps later."""
    verdict = judge(growing(*values), RULE)
    assert verdict.level == level
    assert ("layer 1 head 8" in verdict.line()) == (level != "ok")


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
def test_an_error_as_large_as_the_signal(values, compensated, level, before):
    """A run that begins on sick weights has no history, and its norm stands still for a while."""
    end = [
        Point(step=before + INTERVAL * (i + 1), loss=3.0, grad_norm=0.27, grad_norm_max=0.3,
              error=Spot(value, layer=1, head=8), compensated=compensated)
        for i, value in enumerate(values)
    ]  # fmt: skip
    points = [*calm(before), *end]
    verdict = judge(points, RULE)
    assert verdict.level == level
    assert ("layer 1 head 8: error of delta" in verdict.line()) == (level != "ok")
    assert judge(points, replace(RULE, danger_error=None)).level == "ok"


def test_errors_are_told_in_figures_people_read():
    end = Point(step=50, loss=3.0, grad_norm=0.3, grad_norm_max=0.3, bias=Spot(0.012345, 0, 1))
    told = judge([replace(end, error=Spot(7432.1, 1, 8))], RULE).reason
    assert "error of delta 7,432x the signal" in told and "coherent error of delta 0.012x" in told


def test_large_logits_are_watched():
    points = calm(4000)
    for logit, level in ((300.0, "ok"), (1000.0, "watch"), (1e6, "watch"), (math.nan, "ok")):
        verdict = judge([*points, replace(points[-1], logit=Spot(logit, 1, 8))], RULE)
        assert verdict.level == level
    assert (
        "layer 1 head 8: logits up to 1,000"
        in judge([*points, replace(points[-1], logit=Spot(1000.0, 1, 8))], RULE).line()
    )
    off = replace(RULE, watch_logit=None)
    assert judge([*points, replace(points[-1], logit=Spot(1e6, 1, 8))], off).level == "ok"


def test_every_sign_is_told_the_worse_first():
    signs = {"growth": Spot(1.6, 1, 8), "error": Spot(0.2, 3, 1)}
    verdict = judge([replace(p, **signs) for p in calm(200)], RULE)
    assert verdict.level == "danger"
    assert verdict.reason.startswith("layer 3 head 1: error") and "head 8: W_Q" in verdict.reason


def test_nothing_recorded():
    assert judge([], RULE).level == "ok" and math.isnan(NOWHERE.value)


def test_verdicts_are_those_that_were_given_record_by_record():
    random = np.random.default_rng(0)
    points = [
        replace(
            p,
            growth=Spot(float(random.choice([math.nan, 1.0, 1.6, 2.1, 3.0]))),
            error=Spot(float(random.choice([math.nan, 0.01, 0.2]))),
        )
        for p in calm(20_000)
    ]
    found = list(verdicts(points, RULE))
    assert found == [judge(points[: i + 1], RULE) for i in range(len(points))]
    assert {v.level for v in found} == {"ok", "watch", "danger"}


def test_spike_score_is_robust():
    calm = [0.30, 0.31, 0.29, 0.30, 0.32, 0.31, 0.30]
    assert spike_score(calm, 0.31) < 2 < 50 < spike_score([*calm, 40.0], 30.0)
    assert math.isnan(spike_score(calm[:2], 1.0))
    assert spike_score([0.3] * 6, 0.3) == 0.0 and spike_score([0.3] * 6, 0.4) == math.inf

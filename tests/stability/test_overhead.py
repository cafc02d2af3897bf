"""The plan by which the telemetry's cost is measured, and what is made of its times."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import benchmark_scripts
import pytest

from megatron_patch.schema.stability import StabilityConfig


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("telemetry_overhead")


def test_every_stretch_holds_the_observations_it_should(script: Any) -> None:
    """One in the middle of ``watched``, so that its record is read in the same stretch."""
    stretches = script.plan(3)
    assert stretches[0][1] == script.WARM_UP + 1
    assert all(b[1] == a[2] + 1 for a, b in itertools.pairwise(stretches))
    for kind, first, last in stretches:
        if kind == script.WATCHED:
            seen = [n for n in range(first, last + 1) if n % script.SHORT == 0]
            assert len(seen) == 1 and first + 3 < seen[0] < last - 3


def test_the_telemetry_is_on_where_the_plan_says(script: Any) -> None:
    """Observed steps, and times that begin and end with a stretch; the buffer never overflows."""
    seen: list[int] = []

    class Base:
        def __init__(self) -> None:
            self.options = StabilityConfig()
            self.filled = 0

        def before_step(self, step: int) -> None:
            self.observing = self.options.enabled and step % self.options.interval == 0

        def grads_reduced(self) -> None:
            pass

        def after_step(self, step: int, result: Any) -> None:
            self.filled += self.options.enabled
            assert self.filled <= script.INTERVAL  # as of a record in any run
            if self.observing:
                seen.append(step)
                self.filled = 0

        def flush(self, step: int) -> None:
            pass

    times: dict[str, list[float]] = {"stretches": [], "calls": [], "begins": []}
    watched = script.watched_by(Base, 2, times, device="cpu")()
    last = script.plan(2)[-1][2]
    for step in range(1, last + 1):
        watched.before_step(step)
        watched.grads_reduced()
        watched.after_step(step, SimpleNamespace())
    assert len(times["stretches"]) == len(script.plan(2))
    assert len(times["calls"]) == 2 * 2 * script.SHORT
    assert len(times["begins"]) == last - script.WARM_UP
    wanted = [1, 2]
    for kind, first, end in script.plan(2):
        if kind == script.WATCHED:
            wanted += [n for n in range(first, end + 1) if n % script.SHORT == 0]
    assert seen == wanted


def test_drift_cancels_in_a_round(script: Any) -> None:
    """A machine that slows down by 1 % a stretch hides no cost of 0.5 % from a round."""
    times: dict[str, list[float]] = {name: [] for name in ("without", "watched", "idle")}
    for i, (kind, _, _) in enumerate(script.plan(4)):
        cost = {script.WATCHED: 1.025, script.IDLE: 1.001}.get(kind, 1.0)
        times[kind].append(0.2 * (1 + 0.01 * i) * cost)
    begins = [0.2 * step for step in range(4 * 60)]
    found = script.summary(times | {"calls": [1e-4, 2e-4, 1e-4], "begins": begins})
    assert found["paired_difference"] == pytest.approx((10 * 0.025 + 40 * 0.001) / 50, abs=2e-5)
    assert found["paired_standard_error"] < 1e-4
    assert found["idle_difference"] == pytest.approx(0.001, abs=2e-5)
    assert found["observation_seconds"] == pytest.approx(10 * 0.024 * 0.2, rel=0.2)
    assert found["share_every_50_steps"] == pytest.approx(0.024 / 5, rel=0.2)
    assert found["idle_call_seconds"] == pytest.approx(4e-4 / 3)


def test_the_median_has_an_interval_by_the_order_of_the_rounds(script: Any) -> None:
    """Of ten values the second and the ninth: 0.979 (tables of the sign test); of five none."""
    assert script.median_and_interval([9.0, 1, 2, 3, 4, 5, 6, 7, 8, 1000]) == (5.5, [2, 9.0])
    assert script.median_and_interval([1.0] * 5) == (1.0, None)
    assert script.median_and_interval([float(n) for n in range(6)]) == (2.5, [0.0, 5.0])


def test_single_slow_steps_hide_nothing_from_the_medians(script: Any) -> None:
    """Every seventh step takes three times as long, whatever its kind; stretches end in waits."""
    clock, begins = 0.0, [0.0]
    for kind, first, last in script.plan(12):
        for step in range(first, last + 1):
            took = 0.08 * (1.002 if kind == script.IDLE else 1.0)
            if kind == script.WATCHED:
                took += 0.012 * (step % script.SHORT == 0) + 0.004 * (step % script.SHORT == 1)
            took *= 3 if step % 7 == 0 and step % script.SHORT not in (0, 1) else 1
            clock += took + 0.05 * (step in (first, last))
            begins.append(clock)
    found = script.by_steps(begins[:-1], 12)  # the step after the last may never begin
    assert found["observation"] == pytest.approx(0.016)
    assert found["idle"] == pytest.approx(0.002)
    assert found["total"] == pytest.approx(0.016 / 0.08 / 50 + 0.002)
    low, high = found["total_interval"]
    assert low <= found["total"] <= high

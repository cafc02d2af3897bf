"""The plan by which the telemetry's cost is measured, and what is made of its times."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import benchmark_scripts
import pytest

from megatron_patch.stability.config import StabilityConfig


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("telemetry_overhead")


def test_every_stretch_holds_the_observations_it_should(script: Any) -> None:
    """One in the middle of ``default``, so that its record is read in the same stretch."""
    stretches = script.plan(3)
    assert stretches[0][1] == script.WARM_UP + 1
    assert all(b[1] == a[2] + 1 for a, b in itertools.pairwise(stretches))
    for kind, first, last in stretches:
        if kind == script.DEFAULT:
            seen = [n for n in range(first, last + 1) if n % script.INTERVAL == 0]
            assert len(seen) == 1 and first + 5 < seen[0] < last - 5


def test_the_telemetry_is_on_where_the_plan_says(script: Any) -> None:
    """Observed steps, and times that begin and end with a stretch; the buffer never overflows."""
    seen: list[int] = []

    class Base:
        def __init__(self) -> None:
            self.options = StabilityConfig()
            self.filled = 0

        def begin(self, step: int) -> None:
            self.observing = self.options.enabled and step % self.options.interval == 0

        def finish(self, step: int, result: Any) -> None:
            self.filled += self.options.enabled
            assert self.filled <= script.INTERVAL  # rows of the device buffer
            if self.observing:
                seen.append(step)
                self.filled = 0

        def flush(self, step: int) -> None:
            pass

    seconds: list[float] = []
    watched = script.watched_by(Base, 2, seconds, "cpu")()
    last = script.plan(2)[-1][2]
    for step in range(1, last + 1):
        watched.begin(step)
        watched.finish(step, SimpleNamespace())
    assert len(seconds) == len(script.plan(2))
    wanted = [1, 2]
    for kind, first, end in script.plan(2):
        every = {script.DEFAULT: script.INTERVAL, script.EACH: 1}.get(kind)
        wanted += [n for n in range(first, end + 1) if every and n % every == 0]
    assert seen == wanted


def test_drift_cancels_in_a_round(script: Any) -> None:
    """A machine that slows down by 1 % a stretch hides a cost of 0.5 % from no pair of pairs."""
    times: dict[str, list[float]] = {name: [] for name in ("without", "default", "every step")}
    times["beside"] = []
    for i, (kind, first, last) in enumerate(script.plan(4)):
        speed = 0.2 * (1 + 0.01 * i)
        short = kind == script.WITHOUT and last - first + 1 < script.INTERVAL
        cost = {script.DEFAULT: 1.005, script.EACH: 1.25}.get(kind, 1.0)
        times["beside" if short else kind].append(speed * cost)
    found = script.summary(times)
    assert found["paired_difference"] == pytest.approx(0.005, abs=2e-4)
    assert found["paired_standard_error"] < 1e-3
    assert found["share_every_50_steps"] == pytest.approx(0.25 / 50, rel=0.1)

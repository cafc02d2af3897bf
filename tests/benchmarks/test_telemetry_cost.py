"""`benchmarks/telemetry_cost.py`: its plan, and what is made of its times and of runs."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_scripts
import numpy as np
import pytest

from megatron_patch.schema.stability import StabilityConfig
from megatron_patch.stability import record
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("telemetry_cost")


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

        def begin(self, step: int) -> None:
            self.observing = self.options.enabled and step % self.options.interval == 0

        def reduced(self) -> None:
            pass

        def finish(self, step: int, result: Any) -> None:
            self.filled += self.options.enabled
            assert self.filled <= script.INTERVAL  # as of a record in any run
            if self.observing:
                seen.append(step)
                self.filled = 0

        def flush(self, step: int) -> None:
            pass

    times: dict[str, list[float]] = {"stretches": [], "calls": []}
    watched = script.watched_by(Base, 2, times, device="cpu")()
    last = script.plan(2)[-1][2]
    for step in range(1, last + 1):
        watched.begin(step)
        watched.reduced()
        watched.finish(step, SimpleNamespace())
    assert len(times["stretches"]) == len(script.plan(2))
    assert len(times["calls"]) == 2 * 2 * script.SHORT
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
    found = script.summary(times | {"calls": [1e-4, 2e-4, 1e-4]})
    assert found["paired_difference"] == pytest.approx((10 * 0.025 + 40 * 0.001) / 50, abs=2e-5)
    assert found["paired_standard_error"] < 1e-4
    assert found["idle_difference"] == pytest.approx(0.001, abs=2e-5)
    assert found["observation_seconds"] == pytest.approx(10 * 0.024 * 0.2, rel=0.2)
    assert found["share_every_50_steps"] == pytest.approx(0.024 / 5, rel=0.2)
    assert found["idle_call_seconds"] == pytest.approx(4e-4 / 3)


def write(
    folder: Path,
    *attempts: tuple[int, int, float, float],
    logged: int | None = None,
    interval: int = 50,
) -> str:
    """A run of (first step, last step, step seconds, observation seconds) an attempt."""
    random = np.random.default_rng(0)
    meta = record.make_meta(layers=1, heads=1, interval=interval, rule=Rule(), attention="a/none")
    Writer(folder, meta, start_step=0).close()
    there = [{"world_size": i + 1, "commit": "c"} for i in range(len(attempts))]
    (folder / "environment.json").write_text(json.dumps({"attempts": there}))
    with (folder / "metrics.csv").open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["step", "step_seconds", "elapsed_seconds"])
        for first, last, seconds, cost in attempts[:logged]:
            elapsed = 0.0
            for step in range(first, last + 1):
                extra = 0.7 * cost * (step % 50 == 0) + 0.3 * cost * (step % 50 == 1)
                extra += 5.0 * (step % 500 == 0)  # checkpoints
                elapsed += (taken := seconds + extra + 1e-3 * random.standard_normal())
                rows.writerow([step, taken, elapsed])
    return str(folder)


def test_what_was_put_into_runs_is_found(script: Any, tmp_path: Path) -> None:
    run = write(tmp_path / "run", (1, 4000, 0.125, 0.025), (4001, 6000, 0.08, 0.05),
                (6001, 6200, 0.08, 0.05))  # fmt: skip
    one, two = script.from_runs([Path(run)], known=[])  # the third is too short to say anything
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["observation_seconds"] == pytest.approx(0.025, abs=1e-3)
    assert two["share"] == pytest.approx(0.05 / 50 / 0.08, rel=0.1)
    # Checkpoints of 5 s in three of the 37 observed steps are in no median, and in the mean.
    assert two["observations"] == 37
    mean = 0.05 + 5.0 * 3 / 37
    assert two["share_of_means"] == pytest.approx(mean / 50 / 0.08, rel=0.01)
    assert abs(one["between_seconds"]) < 1e-3 and one["step_seconds"] == pytest.approx(0.125, 0.01)


def test_stored_attempts_stay(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        run = write(tmp_path / name, (1, 2000, 0.125, 0.025))
        monkeypatch.setattr(sys, "argv", ["x", "--runs", run, "--out", str(tmp_path)])
        assert script.main() == 0
    rows = json.loads((tmp_path / "telemetry_cost.json").read_text())["runs"]["attempts"]
    assert [row["run"] for row in rows] == ["first", "second"]
    assert "read_at" in rows[0] and "read_at" not in rows[1]


def test_runs_that_tell_nothing_are_refused(script: Any, tmp_path: Path) -> None:
    lost = write(tmp_path / "lost", (1, 900, 0.1, 0.1), (901, 999, 0.1, 0.1), logged=1)
    for run, told in (
        (write(tmp_path / "short", (1, 300, 0.1, 0.1)), "no attempt has 10 observations"),
        (lost, "2 attempts"),
        (str(tmp_path / "nothing"), "is no run directory"),
        (write(tmp_path / "often", (1, 900, 0.1, 0.1), interval=10), "21 or more needed"),
    ):
        with pytest.raises(SystemExit, match=told):
            script.from_runs([Path(run)], known=[])

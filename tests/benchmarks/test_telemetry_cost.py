"""`benchmarks/telemetry_cost.py`: what observations cost in runs as they were made."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import benchmark_scripts
import numpy as np
import pytest

from megatron_patch.stability import record
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("telemetry_cost")


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


def test_what_was_put_into_runs_is_found(script, tmp_path):
    run = write(tmp_path / "run", (1, 4000, 0.125, 0.025), (4001, 6000, 0.08, 0.05),
                (6001, 6200, 0.08, 0.05))  # fmt: skip
    one, two = script.from_runs([Path(run)], known=[])  # the third is too short to say anything
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["observation_seconds"] == pytest.approx(0.025, abs=1e-3)
    assert two["share"] == pytest.approx(0.05 / 50 / 0.08, rel=0.1)
    # Checkpoints of 5 s in three of the 37 observed steps are in no median.
    assert two["observations"] == 37
    assert abs(one["between_seconds"]) < 1e-3 and one["step_seconds"] == pytest.approx(0.125, 0.01)

"""`benchmarks/shared_rounding.py`: what it says of rounding errors that rows share, or do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import benchmark_scripts
import pytest
import torch

ROWS, DIMS = 512, 16


@pytest.fixture
def script() -> Any:
    return benchmark_scripts.load("shared_rounding")


def drawn(spread: float) -> torch.Tensor:
    """Rows around one vector, relative to a step of BF16 there."""
    make = torch.Generator().manual_seed(3)
    middle = 1 + torch.rand(DIMS, generator=make, dtype=torch.float64)  # a step is 2^-7
    return middle + spread * 2**-7 * normal(6)


def normal(seed: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, DIMS, generator=make, dtype=torch.float64)


def test_rows_far_apart_round_independently(script: Any) -> None:
    dout = normal(4)
    found = script.of_rows(drawn(20.0), drawn(0.0), dout)
    assert found["shared_o"] > 0.9 and 0.5 < found["shared_error"] < 2
    assert abs(found["explained"]) < 0.1 and abs(found["dead"]) < 0.05


def test_rows_within_a_step_share_the_error(script: Any) -> None:
    dout = normal(4)
    found = script.of_rows(drawn(0.01), drawn(0.0), dout)
    assert found["shared_error"] > 0.9 * ROWS and found["explained"] > 0.9


def test_rows_that_fall_back_on_a_value(script: Any) -> None:
    values = drawn(0.0).bfloat16().double()
    away = 0.2 * 2**-7 * normal(5).clamp(-2, 2)
    found = script.of_rows(values + away, values, torch.ones(ROWS, DIMS, dtype=torch.float64))
    assert found["dead"] < -0.99
    assert script.of_rows(values, values, values)["dead"] == 0.0  # nothing is rounded


def test_result_and_table(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    import sys

    monkeypatch.setattr(sys, "argv", ["shared_rounding.py", "--out", str(tmp_path)])
    captures = sorted(script.captured.CAPTURES.glob("*.pt"))[:1]
    sys.argv += map(str, captures)
    script.captured.write("shared_rounding", "", script.examine)
    result = json.loads((tmp_path / "shared_rounding.json").read_text())
    assert {one["rows"] for one in result["heads"]} == {1024 - 64}
    text = benchmark_scripts.load("stability_tables").shared_rounding(result)
    assert "of 1 captures" in text and "| 0 to 25 |" in text

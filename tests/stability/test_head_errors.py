"""`benchmarks/head_errors.py`: heads by the size of their errors, and whether those have a side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import benchmark_scripts
import numpy as np
import pytest

from megatron_patch.stability import record
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer

L, H = 3, 12


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("head_errors")


def write(folder: Path, *, goes: bool, side: float, seed: int = 0) -> str:
    """1,000 steps of errors of size 1, of the first row of heads 1 to 3 times as large in delta."""
    random = np.random.default_rng(seed)
    meta = record.make_meta(layers=L, heads=H, interval=10, rule=Rule(), attention="a/none")
    writer = Writer(folder, meta, start_step=0)
    for i in range(1, 101):
        heads = {name: np.ones((L, H), np.float32) for name in HEAD_METRICS}
        heads["delta_rms"][0, :3] = 2, 3, 4
        heads["delta_error_mean"] = (side + 0.1 * random.standard_normal((L, H))).astype(np.float32)
        heads["max_logit"][0, :4] = (1, 3000, 2000, 1000) if goes else (1, 2, 3, 4)
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.3}
        writer.write(10 * i, scalars=scalars, layers={}, heads=heads)
    writer.close()
    return str(folder)


def call(script: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["head_errors.py", "--out", str(out), *arguments])
    assert script.main() == 0
    return json.loads((out / "head_errors.json").read_text())


def test_heads_that_ran_away_and_heads_that_err(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [write(tmp_path / "bad", goes=True, side=0.0), write(tmp_path / "calm", goes=False,
            side=0.1)]  # fmt: skip
    steps = ["--steps", "0", "500", "1000", "1030"]
    found = call(script, monkeypatch, tmp_path, *runs, *steps)["runs"]
    assert found["bad"]["ran_away"] == [[0, 1], [0, 2], [0, 3]] and not found["calm"]["ran_away"]
    assert found["calm"]["largest_logit"] == 4.0
    for run in found.values():
        assert [span["until"] for span in run["between"]] == [500, 1000]  # no records after that
        for span in run["between"]:
            assert span["records"] == 50 and span["largest"] == [[0, 2], [0, 1], [0, 0]]
            assert span["over_median"] == [4.0, 3.0, 2.0]
            assert span["seen_from"] == pytest.approx(3 * 0.1 / 50**0.5, rel=0.1)
            assert span["t_rms_unbiased"] == pytest.approx((49 / 47) ** 0.5)
    # Means of 50 records: a side of one standard deviation is 7 standard errors.
    assert found["bad"]["between"][0]["t_rms"] == pytest.approx(1.0, abs=0.35)
    assert found["calm"]["between"][0]["t_rms"] == pytest.approx(7.2, rel=0.15)


def test_a_head_that_stayed_small_did_not_run_away_with_another(script: Any) -> None:
    meta = record.make_meta(layers=L, heads=H, interval=10, rule=Rule(), attention="a/none")
    found = np.zeros(1, record.record_dtype(meta))
    logits = found["heads"][0, meta["head_metrics"].index("max_logit")]
    logits[:] = 200.0
    logits[1, 2] = 3000.0
    assert script.ran_away(record.Telemetry(meta, (found,))) == [[1, 2]]


def test_an_earlier_result_is_added_to(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    one, two = (write(tmp_path / name, goes=True, side=0.0) for name in ("one", "two"))
    first = call(script, monkeypatch, tmp_path, one, "--steps", "0", "500")
    kept = str(tmp_path / "head_errors.json")
    both = call(script, monkeypatch, tmp_path, two, "--steps", "0", "500", "--keep", kept)
    assert list(both["runs"]) == ["one", "two"]
    assert both["runs"]["one"]["commit"] == first["commit"]
    for wrong, told in (
        ([two, "--steps", "0", "400", "--keep", kept], "is of --steps [0, 500]"),
        ([two, "--steps", "500", "0"], "each larger than the one before"),
        ([str(tmp_path / "nothing"), "--steps", "0", "500"], "no run directory with telemetry"),
    ):
        with pytest.raises(SystemExit):
            call(script, monkeypatch, tmp_path, *wrong)
        assert told in capsys.readouterr().err

"""`benchmarks/growth_noise.py`: where the error of delta decides whether logits grow."""

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

L, H = 2, 3
GOES, NOISY = (1, 2), (0, 1)


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("growth_noise")


def write(folder: Path, *, goes: bool, measured: bool = True) -> str:
    """Records every 50 steps to 1,000.

    One head passes 1 at step 300 and goes at 800; after that it has no derivative. Another is at 2
    from step 500 on and stays; a single high record, at 100, is no passing.
    """
    meta = record.make_meta(layers=L, heads=H, interval=50, rule=Rule(), attention="a/none")
    writer = Writer(folder, meta, start_step=0)
    for step in range(50, 1001, 50):
        heads = {name: np.full((L, H), 0.01, np.float32) for name in HEAD_METRICS}
        noise, logits = heads["growth_noise"], heads["max_logit"]
        if goes:
            noise[0, 0] = 9.0 if step == 100 else 0.01
            noise[NOISY] = 2.0 if step >= 500 else 0.01
            noise[GOES] = np.nan if step > 900 else 3.0 if step >= 300 else 0.5
            logits[GOES] = 1500.0 if step >= 800 else step / 10
        if not measured:
            noise[:] = np.nan
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.3}
        writer.write(step, scalars=scalars, layers={}, heads=heads)
    writer.close()
    return str(folder)


def call(script: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["growth_noise.py", "--out", str(out), *arguments])
    assert script.main() == 0
    return json.loads((out / "growth_noise.json").read_text())


def test_a_run_that_goes_and_one_that_does_not(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, calm = write(tmp_path / "bad", goes=True), write(tmp_path / "calm", goes=False)
    runs = call(script, monkeypatch, tmp_path, bad)["runs"]
    assert runs["bad"]["heads"] == L * H and runs["bad"]["before_step"] == 800
    # The median of five records is above 1 with the third of them.
    passed = {"step": 400, "largest_logit": 40.0}
    assert runs["bad"]["went"] == [{"layer": 1, "head": 2, "step": 800, "passed": passed}]
    assert [(h["layer"], h["head"], h["step"]) for h in runs["bad"]["passed"]] == [
        (*GOES, 400),
        (*NOISY, 600),
    ]
    assert runs["bad"]["largest"] == 9.0 and runs["bad"]["median"] == pytest.approx(0.01)
    kept = str(tmp_path / "growth_noise.json")
    both = call(script, monkeypatch, tmp_path, calm, "--keep", kept)["runs"]
    assert "commit" in both["bad"] and both["calm"]["before_step"] is None
    assert both["calm"]["passed"] == both["calm"]["went"] == []


def test_the_table_says_so(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, calm = write(tmp_path / "bad", goes=True), write(tmp_path / "calm", goes=False)
    result = call(script, monkeypatch, tmp_path, bad, calm)
    lines = benchmark_scripts.load("stability_tables").growth_noise(result).splitlines()
    assert lines[-2].startswith("| bad | 800 |") and lines[-1].startswith(
        "| calm | 1,000 (its end)"
    )
    assert "| 1 of 5: 0.1 at 600 | 1.2: 800, above 1 from 400, at logits of 40 |" in lines[-2]
    assert lines[-1].endswith("| 0 of 6 | none |")


def test_a_run_without_the_figure_is_refused(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    other = write(tmp_path / "other", goes=True, measured=False)
    for wrong, told in (
        (other, "no record with growth_noise"),
        (str(tmp_path / "nothing"), "no run directory with telemetry"),
    ):
        with pytest.raises(SystemExit):
            call(script, monkeypatch, tmp_path, wrong)
        assert told in capsys.readouterr().err
    good = write(tmp_path / "good", goes=False)
    call(script, monkeypatch, tmp_path, good)
    other_kind = tmp_path / "other.json"
    other_kind.write_text(json.dumps({"commit": "c", "heads": []}))
    with pytest.raises(SystemExit, match="a result of something else"):
        call(script, monkeypatch, tmp_path, good, "--keep", str(other_kind))

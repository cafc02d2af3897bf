"""`benchmarks/common_part.py`: which heads the common part of logits names, and when."""

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
GOES, LOUD, LOST, ELSEWHERE = (1, 2), (1, 0), (1, 1), (0, 1)


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("common_part")


def write(folder: Path, *, goes: bool, measured: bool = True) -> str:
    """Records every 100 steps to 4,000.

    One head's share rises from 0 to 0.9 by step 3,000, while its logits pass 100 at 3,100 and
    1,000 at 3,500. A neighbor at logits of 50 has 0.3, another is lost at 3,900. In the other layer
    a head at 10 has 0.45, one at 4 nearly 1, and one at 50 has 0.5 in a single record.
    """
    meta = record.make_meta(layers=L, heads=H, interval=100, rule=Rule(), attention="a/none")
    writer = Writer(folder, meta, start_step=0)
    for step in range(100, 4001, 100):
        heads = {name: np.full((L, H), 0.01, np.float32) for name in HEAD_METRICS}
        logits, common = heads["max_logit"], heads["common_logit"]
        logits[:] = 50.0
        common[:] = 0.1 * logits
        common[LOUD] = 0.3 * 50
        logits[0, 0], common[0, 0] = 10.0, 4.5  # below 20: no record of it speaks
        logits[0, 2], common[0, 2] = 4.0, 3.9  # below 5: without a share
        common[ELSEWHERE] = 0.5 * 50 if step == 2000 else 5.0
        if goes:
            logits[LOST] = np.nan if step == 3900 else 50.0  # no number any more: it ran away
            logits[GOES] = 1500.0 if step >= 3500 else 150.0 if step >= 3100 else 30.0
            common[GOES] = min(0.9, 0.00031 * step) * logits[GOES]
            common[LOUD] = 0.95 * 50 if step >= 3600 else common[LOUD]  # once the other has gone
        if not measured:
            common[:] = np.nan
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.3}
        writer.write(step, scalars=scalars, layers={}, heads=heads)
    writer.close()
    return str(folder)


def call(script: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["common_part.py", "--out", str(out), *arguments])
    assert script.main() == 0
    return json.loads((out / "common_part.json").read_text())


def test_the_head_that_goes_is_named_before_its_logits_move(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [write(tmp_path / "wild", goes=True), write(tmp_path / "calm", goes=False)]
    result = call(script, monkeypatch, tmp_path, *runs)
    wild, calm = result["runs"]["wild"], result["runs"]["calm"]
    assert wild["first_gone"] == 3500 and calm["first_gone"] is None
    head, lost = wild["went"]
    assert (lost["layer"], lost["head"], lost["above_1000"]) == (*LOST, 3900) and lost["share"] == 0
    assert (head["layer"], head["head"]) == GOES and head["share"] == pytest.approx(0.9)
    assert (head["above_100"], head["above_1000"]) == (3100, 3500)
    # Before it has gone; a single record of another layer counts here, one below 20 does not.
    assert wild["others"]["same_layers"]["share"] == pytest.approx(0.3)
    assert wild["others"]["other_layers"] == {
        "layer": 0, "head": 1, "step": 2000, "largest_logit": 50.0, "share": pytest.approx(0.5),
    }  # fmt: skip
    # The share passes at 1,613 and 1,935; the median of five, two records after the next.
    first = [wild["named"][limit][0] for limit in ("0.5", "0.6")]
    assert [one["step"] for one in first] == [1900, 2200]
    assert all((one["layer"], one["head"]) == GOES and one["largest_logit"] == 30 for one in first)
    # The small head has 0.45 all the time: named from the first step that counts.
    assert wild["named"]["0.4"][0]["step"] == 1000 and wild["named"]["0.4"][0]["layer"] == 0
    assert calm["went"] == [] and calm["named"]["0.5"] == []
    assert calm["others"] == {
        "same_layers": None,
        "other_layers": {
            "layer": 0, "head": 1, "step": 2000, "largest_logit": 50.0,
            "share": pytest.approx(0.5),
        },
    }  # fmt: skip
    lines = benchmark_scripts.load("continued_table").common_part(result).splitlines()
    assert lines[5].startswith("| wild | 3,500 | 1.2: 0.90 at 3,100, above 1,000 at 3,500; 1.1: ")
    assert "| 1.2 at 1,900 (30), 1.0 at 3,800 (50) |" in lines[5]
    assert lines[4].startswith("| calm | 4,000 (its end) | none | - | 0.50, 0.1 |")


def test_a_run_that_did_not_measure_it_is_refused(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = write(tmp_path / "old", goes=True, measured=False)
    with pytest.raises(SystemExit):
        call(script, monkeypatch, tmp_path, run)
    assert "no record with common_logit" in capsys.readouterr().err

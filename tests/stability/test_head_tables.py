"""One head through runs, all heads of a layer, and which runs of `baselines` serve as controls."""

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


def write(folder: Path, *, factor: float, until: int = 300) -> str:
    """Records every 100 steps; head h of layer l has logits factor * step * (l + 1) / (h + 1)."""
    meta = record.make_meta(layers=L, heads=H, interval=100, rule=Rule(), attention="a/none")
    writer = Writer(folder, meta, start_step=0)
    for step in range(100, until + 1, 100):
        heads = {name: np.ones((L, H), np.float32) for name in HEAD_METRICS}
        heads["growth_noise"] = np.full((L, H), np.nan, np.float32)
        size = np.arange(1, L + 1)[:, None] / np.arange(1, H + 1)
        heads["max_logit"] = (factor * step * size).astype(np.float32)
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.25, "grad_norm_max": 0.3}
        writer.write(step, scalars=scalars, layers={}, heads=heads)
    writer.close()
    return str(folder)


def call(name: str, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--out", str(out), *arguments])
    assert benchmark_scripts.load(name).main() == 0
    return json.loads((out / f"{name}.json").read_text())


def test_one_head_and_the_runs_a_table_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [write(tmp_path / "calm", factor=0.01), write(tmp_path / "wild", factor=100, until=200)]
    where = ["--layer", "1", "--head", "0", "--steps", "100", "200", "300"]
    result = call("head_timeline", monkeypatch, tmp_path, *runs, *where)
    tables = benchmark_scripts.load("stability_tables")
    both = tables.timeline()(result).splitlines()
    assert both[2].startswith(
        "| step | common part, calm | common part, wild | largest logit, calm |"
    )
    assert both[4] == "| 100 | 1 | 1 | 2 | 20,000 | 1 | 1 | 0.25 | 0.25 |"
    assert both[-1] == "| 300 | 1 | - | 6 | - | 1 | - | 0.25 | - |"
    # Of another run alone: no line for steps that only the first one has, no column of NaN.
    other = tables.timeline("wild")(result)
    assert "calm" not in other and "noise" not in other
    assert other.splitlines()[-1] == "| 200 | 1 | 40,000 | 1 | 0.25 |"
    kept = ["--keep", str(tmp_path / "head_timeline.json")]
    with pytest.raises(SystemExit):
        call("head_timeline", monkeypatch, tmp_path, runs[0], *kept, "--layer", "0", "--head", "0",
             "--steps", "100")  # fmt: skip


def test_all_heads_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calm, wild = write(tmp_path / "calm", factor=0.06), write(tmp_path / "wild", factor=60)
    asked = ["--layer", "1", "--steps", "100", "300"]
    call("layer_heads", monkeypatch, tmp_path, calm, *asked)
    kept = ["--keep", str(tmp_path / "layer_heads.json")]
    result = call("layer_heads", monkeypatch, tmp_path, wild, *asked, *kept)
    lines = benchmark_scripts.load("stability_tables").layer_heads(result).splitlines()
    assert "Read at commit" in lines[0] and lines[2] == "| run | step | head 0 | head 1 | head 2 |"
    assert lines[4:6] == ["| calm | 100 | 12 | 6 | 4 |", "|  | 300 | 36 | 18 | 12 |"]
    assert lines[-1] == "|  | 300 | 36,000 | 18,000 | 12,000 |"
    for wrong, told in (
        (["--layer", "2", "--steps", "100"], "2 layers, counted from 0"),
        (["--layer", "1", "--steps", "150"], "no record of step 150; it has one every 100 steps"),
        (["--layer", "0", "--steps", "100", *kept], "is about layer 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            call("layer_heads", monkeypatch, tmp_path, calm, *wrong)
        assert ended.value.code == 2 and told in capsys.readouterr().err


def test_heads_that_have_run_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Head 0 of both layers is above 1,000 at step 1,000, head 1 of layer 1 too; none elsewhere."""
    calm = write(tmp_path / "calm", factor=0.06)
    wild = write(tmp_path / "wild", factor=1.2, until=1000)
    result = call("saturated_heads", monkeypatch, tmp_path, wild, "--steps", "300", "1000")
    assert result["above"] == 1000
    at = result["runs"]["wild"]["at"]["1000"]
    assert at["by_layer"] == {"0": 1, "1": 2} and at["largest_logit"] == 2400
    assert at["median_common_share"] == pytest.approx(1 / 1200)  # of 1/1200, 1/2400 and 1/1200
    kept = ["--keep", str(tmp_path / "saturated_heads.json")]
    result = call("saturated_heads", monkeypatch, tmp_path, calm, "--steps", "300", *kept)
    lines = benchmark_scripts.load("continued_table").saturated(result).splitlines()
    assert "heads with logits above 1,000" in lines[2]
    assert lines[2].count("|") == lines[4].count("|")
    rest = "| 3 | 0.25 |"
    shown = "0: 1, 1: 2 | 2,400 | 1 | 1 | 1 | 0.000833 | - | -"
    assert lines[4:] == [
        f"| calm | 300 | 0 | - | - | - | - | - | - | - | - {rest}",
        f"| wild | 300 | 0 | - | - | - | - | - | - | - | - {rest}",
        f"|  | 1,000 | 3 | {shown} {rest}",
    ]
    with pytest.raises(SystemExit):
        call("saturated_heads", monkeypatch, tmp_path, calm, "--steps", "150")
    assert "no record of step 150" in capsys.readouterr().err


def test_controls_are_runs_that_computed_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By configuration, variant and fingerprint; only for what was not made here."""
    tables = benchmark_scripts.load("stability_tables")

    def result(name: str, steps: dict[str, int], print_of: str) -> dict[str, Any]:
        runs = [
            {"run": run.id, "seed": run.seed, "steps": steps.get(run.id, 0)}
            for run in tables._experiment(name).runs
        ]
        return {"runs": runs, "fingerprints": {"2": print_of}}

    everything = {run.id: 15000 for run in tables._experiment("baselines").runs}
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    (folder / "stability_baselines.json").write_text(
        json.dumps(result("baselines", everything, "same"))
    )
    (tmp_path / "configs").symlink_to(tables.ROOT / "configs")
    monkeypatch.setattr(tables, "ROOT", tmp_path)

    def controls(steps: dict[str, int], print_of: str, **row: str) -> list[str]:
        made = result("attribution", steps, print_of)
        made["runs"] = [run | (row if run["steps"] else {}) for run in made["runs"]]
        return [run["run"] for run in tables.made_for_baselines("attribution", made)]

    # Seed 1 has no fingerprint here: nothing says that it would be comparable.
    assert controls({"low_order_o-s2": 10}, "same") == [
        "none-s2", "compensated-s2", "fp32_attention-s2",
    ]  # fmt: skip
    assert controls({"none-s2": 10}, "same") == ["compensated-s2", "fp32_attention-s2"]
    assert controls({"low_order_o-s2": 10}, "other") == []
    # A run of the seed that was made on another model of GPU has that one's.
    assert len(controls({"low_order_o-s2": 10}, "other", fingerprint="same")) == 3
    assert tables.made_for_baselines("baselines", result("baselines", {}, "same")) == []

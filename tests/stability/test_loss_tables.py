"""`benchmarks/loss_tables.py`: losses beside those of the same run with something else in FP32."""

from __future__ import annotations

import json
from typing import Any

import benchmark_scripts
import pytest


def test_windows_of_both_runs_before_either_explodes(monkeypatch: Any) -> None:
    script = benchmark_scripts.load("loss_tables")
    whole = range(50, 3001, 50)
    losses = {
        "fp32_attention-s2": dict.fromkeys(whole, 3.0),
        "none-s2": {s: 3.5 if s < 2800 else 9.0 for s in whole},
        "compensated-s2": {s: 3.25 if s <= 2500 else 3.75 for s in whole} | {3011: 99.0},
        "compensated-s1": dict.fromkeys(whole, 3.0),
        "none-s1": dict.fromkeys(whole, 1.0),  # a seed without the yardstick
        "sdpa_flash-s2": {50: 1.0, 2050: 1.0},  # one window only
    }
    monkeypatch.setattr(script, "windows_of", lambda protocol: losses)
    ends = {run: 2800 if run == "none-s2" else None for run in losses}
    runs = [{"run": run, "first_large_gradient": end} for run, end in ends.items()]
    rows = script.beside_float32({"runs": runs}).splitlines()[2:]
    assert [row.split(" | ")[:4] for row in rows] == [
        ["| compensated-s2", "fp32_attention-s2", "3,000", "+0.5000"],
        ["| none-s2", "fp32_attention-s2", "2,750", "+0.5000"],
        ["| compensated-s1", "compensated-s2", "3,000", "-0.5000"],
    ]
    assert rows[0].endswith("+0.7500 |")  # the last quarter


def test_beside_the_same_run_with_an_fp32_stream_until_either_explodes(
    monkeypatch: Any, tmp_path: Any
) -> None:
    script = benchmark_scripts.load("loss_tables")
    whole = range(50, 3001, 50)
    both = {
        "baselines_bf16_residual": {"none-s1": dict.fromkeys(whole, 3.5), "none-s2": {50: 1.0}},
        "baselines": {"none-s1": dict.fromkeys(whole, 3.25), "compensated-s1": {}},
    }
    monkeypatch.setattr(script, "windows_of", both.__getitem__)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "docs/results").mkdir(parents=True)
    usual = {"runs": [{"run": "none-s1", "first_large_gradient": 2500}]}
    (tmp_path / "docs/results/stability_baselines.json").write_text(json.dumps(usual))
    result = {"runs": [{"run": "none-s1", "first_large_gradient": 2800}]}
    (row,) = script.beside_float32_stream(result).splitlines()[2:]
    assert row == "| none-s1, BF16 stream | none-s1 | 2,450 | +0.2500 | 0.0000 | +0.2500 |"


def test_cells_from_step_0_beside_compensated_on_their_seed(monkeypatch: Any) -> None:
    script = benchmark_scripts.load("loss_tables")
    whole = range(50, 3001, 50)
    figures = {
        ("attribution", "loss"): {"qk_norm-s1": dict.fromkeys(whole, 3.0), "none-s1": {50: 1.0}},
        ("attribution", "grad_norm"): {
            "qk_norm-s1": {s: s / 1000 for s in whole},
            "none-s1": {50: 1.0},
        },
        ("baselines", "loss"): {"compensated-s1": {s: 3.25 for s in whole if s <= 2500}},
        ("baselines", "grad_norm"): {"compensated-s1": {s: 0.5 for s in whole if s <= 2500}},
    }
    monkeypatch.setattr(script, "windows_of", lambda name, figure="loss": figures[name, figure])
    names = ("qk_norm-s1", "none-s1", "qk_norm-s2")  # one window; never started
    runs = [{"run": name, "seed": int(name[-1]), "first_large_gradient": None} for name in names]
    (row,) = script.beside_compensated({"runs": runs}).splitlines()[2:]
    where = "| qk_norm-s1 | compensated-s1 | 2,500 | -0.2500 | 0.0000 | -0.2500"
    assert row == f"{where} | 2.425 | 0.500 |"


def test_lead_over_the_loss_beside_a_stable_run(monkeypatch: Any) -> None:
    """One window above is a spike; what was never announced, or too late, is told elsewhere."""
    script = benchmark_scripts.load("loss_tables")
    whole = range(50, 4001, 50)
    flat = dict.fromkeys(whole, 3.0)
    both = {
        "baselines": {
            "compensated-s1": flat,
            "none-s1": {s: 3.0 + 0.05 * (s >= 3000) for s in whole},
        },
        "rescue": {"base-s1": {s: 3.0 + 0.2 * (s == 2500 or s >= 3500) for s in whole}},
        "baselines_bf16_residual": {"none-s1": {s: 3.2 if s >= 3900 else 3.0 for s in whole}},
        "attribution_continued": {"base-s1": {s: 3.2 if s >= 3600 else 3.0 for s in whole}},
        "rescue_late": {"base-s1": {s: 3.2 if s >= 3800 else 3.0 for s in whole}},
    }
    monkeypatch.setattr(script, "windows_of", both.__getitem__)
    runs = [("none-s1", 2600), ("base-s1", 2600), ("none-s1, BF16 stream", 3000)]
    runs += [("base-s1, continued", 3000), ("base-s1, late rescue", 3000)]
    runs += [("compensated-s1", None), ("sdpa_flash-s1", 2500), ("none-s2", 2000)]
    held_out = [{"run": name, "alarm": alarm} for name, alarm in runs]
    rows = script.lead({"choosing": [], "held_out": held_out}).splitlines()[2:]
    assert rows == [
        "| none-s1 | 2,600 | 3,000 | 400 | - | - |",
        "| base-s1 | 2,600 | 3,500 | 900 | 3,500 | 900 |",
        "| none-s1, BF16 stream | 3,000 | 3,900 | 900 | 3,900 | 900 |",
        "| base-s1, continued | 3,000 | 3,600 | 600 | 3,600 | 600 |",
        "| base-s1, late rescue | 3,000 | 3,800 | 800 | 3,800 | 800 |",
    ]


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        ({"name": "stability_baselines_bf16_residual"}, "none-s1, BF16 stream"),
        ({"name": "stability_attribution_continued"}, "none-s1, continued"),
        ({"name": "stability_rescue_late"}, "none-s1, late rescue"),
        ({"name": "stability_baselines"}, "none-s1"),
        ([], "none-s1"),
        (None, "none-s1"),
    ],
)
def test_runs_of_one_name_are_told_apart(protocol: Any, said: str, tmp_path: Any) -> None:
    run = tmp_path / "runs" / "none-s1"
    run.mkdir(parents=True)
    if protocol is not None:
        (tmp_path / "experiment.json").write_text(json.dumps(protocol))
    assert benchmark_scripts.load("run_names").run_name(run) == said


def test_an_attempt_that_ended_before_anything_is_compared_is_none(
    monkeypatch: Any, tmp_path: Any
) -> None:
    """One that ran out of memory at its start must not rename the attempt that is looked at."""
    script = benchmark_scripts.load("loss_tables")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    reached = {"flash-s2": 2050, "flash-s2.attempt_1": 1, "flash-s2.attempt_2": 2100}
    lines = [f"{run},{step},3.0" for run, step in reached.items()]
    (folder / "stability_baselines.csv").write_text("\n".join(["run,step,loss", *lines]) + "\n")
    losses = script.windows_of("baselines")
    assert set(losses) == {"flash-s2", "flash-s2.attempt_2"}
    names = benchmark_scripts.load("run_names")
    assert names.by_attempt("flash-s2", losses) == "flash-s2.attempt_2"
    assert names.by_attempt("flash-s2, again", losses) == "flash-s2"
    assert names.of_attempt("flash-s2", losses) == "flash-s2, again"
    assert names.of_attempt("flash-s2.attempt_2", losses) == "flash-s2"
    alone = losses.keys() - {"flash-s2.attempt_2"}
    assert names.by_attempt("flash-s2", alone) == names.of_attempt("flash-s2", alone) == "flash-s2"


def test_the_pace_of_a_run_is_that_of_its_own_steps() -> None:
    """Of one that continues another, records of an earlier version count the other's steps too."""
    attempt = {"exit_code": 0, "from_step": 0, "gpus": 1, "seconds": 1000.0, "to_step": 9000}
    runs = [
        {"run": "whole-s1", "commit": "c" * 40, "attempts": [attempt]},
        {"run": "late-s1", "commit": "c" * 40, "attempts": [attempt], "origin": {"step": 3000}},
        {"run": "short-s1", "commit": "c" * 40, "attempts": [attempt], "origin": {"step": 8000}},
    ]
    told = benchmark_scripts.load("stability_tables").pace({"runs": runs}).splitlines()
    assert told[-2:] == [
        f"| whole-s1 | 1 | 0 | {'c' * 12} | 9.0 | 12,900 |",
        f"| late-s1 | 1 | 3,000 | {'c' * 12} | 6.0 | 8,600 |",
    ]

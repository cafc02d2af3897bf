"""The rule on recorded explosions, and the script that chooses and judges it."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark_scripts
import numpy as np
import pytest

from megatron_patch.stability import history, record
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Point, Rule, Spot, verdicts
from megatron_patch.stability.writer import Writer

CURVES = json.loads((Path(__file__).parent / "recorded_curves.json").read_text())


@pytest.fixture(scope="module")
def script() -> Any:
    folder = benchmark_scripts.BENCHMARKS.parent / "research" / "analysis"
    return benchmark_scripts.load("early_warning", folder)


def curve(name: str) -> list[Point]:
    run = CURVES["runs"][name]
    return [
        Point(step=run["first"] + CURVES["interval"] * i, loss=loss, grad_norm=g, grad_norm_max=g)
        for i, (g, loss) in enumerate(zip(run["grad_norm"], run["loss"], strict=True))
    ]


def first_verdict(points: list[Point], rule: Rule, level: str = "danger") -> tuple[int, str] | None:
    """(step, reason) of the first verdict of ``level`` on records of one computation."""
    found = zip((p.step for p in points), verdicts(points, rule), strict=True)
    return next(((step, v.reason) for step, v in found if v.level == level), None)


def first_alarm(points: list[Point], rule: Rule, level: str = "danger") -> int | None:
    found = first_verdict(points, rule, level)
    return None if found is None else found[0]


def recorded_run(name: str) -> record.Telemetry:
    """A run of this trainer on H200s: norms of all heads of GPT-2 124M, loss and gradient norm."""
    with np.load(Path(__file__).parent / "recorded_heads.npz") as file:
        steps, norms, scalars = file["steps"], file[f"{name}_norms"], file[f"{name}_scalars"]
        logits = file[f"{name}_logits"]
    steps = steps[: len(norms)]
    meta = record.make_meta(
        layers=12, heads=12, interval=50, rule=Rule(settle_steps=2000), attention=name
    )
    found = np.zeros(len(steps), record.record_dtype(meta))
    found["step"] = steps
    for i, metric in enumerate(("loss_mean", "grad_norm_mean", "grad_norm_max")):
        found["scalars"][:, meta["scalars"].index(metric)] = scalars[:, i]
    for i, metric in enumerate(history.NORMS):
        found["heads"][:, meta["head_metrics"].index(metric)] = norms[:, i]
    found["heads"][:, meta["head_metrics"].index("max_logit")] = logits
    return record.Telemetry(meta, (found,))


def test_an_explosion_of_this_trainer_is_announced_a_thousand_steps_before(script):
    """Plain numerics, seed 2: the loss moves at 7,600; the gradient norm is silent to 7,500."""
    points = recorded_run("none").history().points
    moved = script.first_move(points, 2000)
    assert moved == 7600
    alarm, reason = first_verdict(points, Rule(settle_steps=2000), "danger")
    assert moved - alarm >= 1000 and "layer 1 head 8" in reason


def test_an_explosion_of_another_seed_is_announced_hundreds_of_steps_before(script):
    """Plain numerics, seed 1, on which no threshold was chosen, made long after the rule."""
    points = recorded_run("late_base").history().points
    moved = script.first_move(points, 2000)
    alarm, reason = first_verdict(points, Rule(settle_steps=2000), "danger")
    assert (alarm, moved) == (5600, 6250) and "layer 1 head 3" in reason


def test_heads_that_grow_slowly_are_no_sign(script):
    """Plain numerics with weight decay, the same seed: logits of 50 in its first head at 5,850."""
    points = recorded_run("weight_decay").history().points
    assert points[-1].step == 5850 and script.first_move(points, 2000) is None
    for level in ("watch", "danger"):
        assert first_alarm(points, Rule(settle_steps=2000), level) is None


def test_the_stable_run_beside_it_is_never_warned(script):
    """`compensated`, the same batches and initial weights, to step 15,000; with room."""
    points = recorded_run("compensated").history().points
    assert points[-1].step == 15_000 and script.first_move(points, 2000) is None
    strict = Rule(settle_steps=2000, watch_head_growth=1.4, danger_head_growth=1.4)
    for level in ("watch", "danger"):
        assert first_alarm(points, strict, level) is None


def test_a_stable_run_with_plain_numerics_whose_norm_rises_is_no_alarm(script):
    """Its heads show nothing. Its norm rises by 1.297."""
    run = json.loads((Path(__file__).parent / "recorded_qk_norm.json").read_text())
    names = ("loss", "grad_norm", "max_logit", "error")
    figures = zip(*(run[name] for name in names), strict=True)
    points = [
        Point(step=run["first"] + run["interval"] * i, loss=loss, grad_norm=norm,
              grad_norm_max=norm, logit=Spot(logit, 3, 1), error=Spot(error, 3, 1))
        for i, (loss, norm, logit, error) in enumerate(figures)
    ]  # fmt: skip
    assert points[-1].step == 13_250 and script.first_move(points, 2000) is None
    rule = Rule(settle_steps=2000)
    for level in ("watch", "danger"):
        assert first_alarm(points, rule, level) is None


@pytest.mark.parametrize("name", ["none", "compensated"])
def test_heads_that_grow_early_are_no_alarm(script, name):
    """Without a warm-up to wait for, the rule sees the first thousand steps of both runs."""
    points = recorded_run(name).history(Rule(settle_steps=0)).points
    early = [p for p in points if p.step <= 2000]
    assert first_alarm(early, Rule()) is None
    blind = recorded_run(name).history(Rule(settle_steps=0, head_logit=0.0)).points
    assert any(p.growth.value > 1.7 for p in blind if p.step <= 2000)


def run_dir(folder: Path, *, explodes: bool) -> str:
    """A run directory with telemetry of 120 records of 50 steps."""
    rule = Rule(settle_steps=500)
    meta = record.make_meta(layers=1, heads=1, interval=50, rule=rule, attention="a/b")
    writer = Writer(folder, meta, start_step=0)
    heads = {name: np.full((1, 1), 1e-4, np.float32) for name in HEAD_METRICS}
    for i in range(1, 121):
        late = max(0, i - 60) if explodes else 0
        if late:
            heads["kappa"][:] = heads["used_error_rms"][:] = 1.0
        loss = 3.0 + max(0, late - 30) * 0.1
        norm = 0.3 * 1.1**late
        writer.write(
            50 * i,
            scalars={"loss_mean": loss, "grad_norm_mean": norm, "grad_norm_max": norm},
            layers={},
            heads=heads,
        )
    writer.close()
    return str(folder)


def test_what_came_of_a_run(script):
    """A loss that is lost at a run's end counts, one that it began with does not."""
    said = script.outcome
    assert said(9000, alarm=5000, gone=6000) == "warned"
    assert said(9000, alarm=6000, gone=6000) == said(9000, alarm=None, gone=6000) == "missed"
    assert said(9000, alarm=None, gone=None) == "quiet"
    assert said(6000, alarm=5000, gone=None) == "alarm, loss did not move"
    assert said(5950, alarm=5000, gone=None) == "alarm, cut 950 steps later"
    losses = [7.0, 7.0, 3.0, 3.0, 4.6, math.nan]
    points = [
        Point(step=50 * i, loss=loss, grad_norm=0.3, grad_norm_max=0.3)
        for i, loss in enumerate(losses, start=1)
    ]
    assert script.first_high(points, 0) == 250 and script.first_high(points[:4], 0) is None
    assert script.first_high(points[:2], 0) is None and script.first_high(points, 250) is None


def test_runs_of_ones_own_are_judged(script, tmp_path, monkeypatch, capsys):
    judged = [run_dir(tmp_path / "bad", explodes=True), run_dir(tmp_path / "good", explodes=False)]
    command = ["early_warning.py", "--judge", *judged]
    monkeypatch.setattr(sys, "argv", command)
    assert script.main() == 0
    assert "warned" in capsys.readouterr().out and not (tmp_path / "early_warning.json").exists()
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path)])
    assert script.main() == 0
    bad, good = json.loads((tmp_path / "early_warning.json").read_text())["runs"]
    assert bad["outcome"] == "warned" and bad["lead"] >= 1000
    assert good["outcome"] == "quiet" and good["alarm"] is None


def test_a_run_is_judged_as_it_judged_itself(script, tmp_path):
    """It begins anew where its numerics change: another norm from there on is no rise."""
    rule = Rule(settle_steps=500)
    heads = {name: np.full((1, 1), 1e-4, np.float32) for name in HEAD_METRICS}
    for start, attention, norm in ((0, "a/b", 0.3), (3000, "a/c", 0.45)):
        meta = record.make_meta(layers=1, heads=1, interval=50, rule=rule, attention=attention)
        writer = Writer(tmp_path, meta, start_step=start)
        scalars = {"loss_mean": 3.0, "grad_norm_mean": norm, "grad_norm_max": norm}
        for step in range(start + 50, start + 3001, 50):
            writer.write(step, scalars=scalars, layers={}, heads=heads)
        writer.close()
    assert {v.level for _, v in record.read(tmp_path).verdicts()} == {"ok"}
    found = script.examine(tmp_path)
    assert (found["outcome"], found["alarm"], found["watch"]) == ("quiet", None, None)


def test_losses_that_are_not_finite_have_moved(script):
    points = curve("compensated_1")[:40]
    broken = [*points, *(Point(step=points[-1].step + 50 * i, loss=math.nan, grad_norm=math.nan,
                               grad_norm_max=math.nan) for i in range(1, 8))]  # fmt: skip
    assert script.first_move(broken, 2000) == points[-1].step + 50
    assert first_alarm(broken, Rule()) == points[-1].step + 50


def test_a_loss_that_breaks_in_the_warm_up_moves_there_and_not_before(script):
    """Where it rises in the warm-up, as losses do, it has not moved; the alarm is no warning."""
    losses = [9.0, 5.0, 5.0, 5.0, 5.0, 5.0, *[5.5] * 6, math.nan, math.nan]
    points = [
        Point(step=50 * i, loss=loss, grad_norm=loss / 9, grad_norm_max=loss / 9)
        for i, loss in enumerate(losses, start=1)
    ]
    assert script.first_move(points, 2000) == first_alarm(points, Rule()) == 50 * 13
    # Sorting NaN with numbers leaves a median that is either.
    odd = [*losses[:-2], math.nan, 5.5, 5.5, 5.5, 5.5]
    points = [replace(points[0], step=50 * i, loss=loss) for i, loss in enumerate(odd, start=1)]
    assert script.first_move(points, 0) is not None and script.first_move(points[6:], 0) == 50 * 13


def test_what_is_no_run_is_told_in_one_line(script, tmp_path):
    with pytest.raises(SystemExit, match="no run directory with telemetry"):
        script.examine(tmp_path)

"""The rule on recorded explosions, and the script that chooses and judges it."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import benchmark_scripts
import numpy as np
import pytest

from megatron_patch.stability import record
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Point, Rule, Spot
from megatron_patch.stability.writer import Writer

CURVES = json.loads((Path(__file__).parent / "recorded_curves.json").read_text())


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("early_warning")


def curve(name: str) -> list[Point]:
    run = CURVES["runs"][name]
    return [
        Point(step=run["first"] + CURVES["interval"] * i, loss=loss, grad_norm=g, grad_norm_max=g)
        for i, (g, loss) in enumerate(zip(run["grad_norm"], run["loss"], strict=True))
    ]


def csv_of(points: list[Point], path: Path) -> str:
    rows = (f"{p.step},{p.loss},{p.loss},{p.grad_norm},{p.grad_norm_max},0" for p in points)
    path.write_text("\n".join(rows) + "\n")
    return str(path)


@pytest.mark.parametrize("name", ["plain_1", "plain_2", "paper_1", "paper_2"])
def test_recorded_explosions_are_announced_hundreds_of_steps_before(script: Any, name: str) -> None:
    """The default threshold was chosen on the runs ending in _1."""
    points = curve(name)
    moved, alarm = script.first_move(points, 2000), script.first_alarm(points, Rule())
    assert moved is not None and alarm is not None and moved - alarm >= 700


@pytest.mark.parametrize("name", ["compensated_1", "compensated_2"])
def test_recorded_stable_runs_are_never_warned(script: Any, name: str) -> None:
    points = curve(name)
    assert script.first_move(points, 2000) is None
    for level in ("watch", "danger"):
        assert script.first_alarm(points, Rule(), level) is None
    # With room: the first threshold of the grid would not have fired either.
    assert script.first_alarm(points, Rule(watch_growth=1.05, danger_growth=1.05)) is None


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
    for i, metric in enumerate(record.NORMS):
        found["heads"][:, meta["head_metrics"].index(metric)] = norms[:, i]
    found["heads"][:, meta["head_metrics"].index("max_logit")] = logits
    return record.Telemetry(meta, (found,))


def test_an_explosion_of_this_trainer_is_announced_a_thousand_steps_before(script: Any) -> None:
    """Plain numerics, seed 2: the loss moves at 7,600; the gradient norm is silent to 7,500."""
    points = recorded_run("none").history().points
    moved = script.first_move(points, 2000)
    assert moved == 7600
    alarm, reason = script.first_verdict(points, Rule(settle_steps=2000), "danger")
    assert moved - alarm >= 1000 and "layer 1 head 8" in reason
    blind = Rule(settle_steps=2000, watch_head_growth=math.inf, danger_head_growth=math.inf)
    assert moved - script.first_alarm(points, blind) < 150


def test_an_explosion_of_another_seed_is_announced_hundreds_of_steps_before(script: Any) -> None:
    """Plain numerics, seed 1, on which no threshold was chosen, made long after the rule."""
    points = recorded_run("late_base").history().points
    moved = script.first_move(points, 2000)
    alarm, reason = script.first_verdict(points, Rule(settle_steps=2000), "danger")
    assert (alarm, moved) == (5600, 6250) and "layer 1 head 3" in reason


def test_heads_that_grow_slowly_are_no_sign(script: Any) -> None:
    """Plain numerics with weight decay, the same seed: logits of 50 in its first head at 5,850."""
    points = recorded_run("weight_decay").history().points
    assert points[-1].step == 5850 and script.first_move(points, 2000) is None
    for level in ("watch", "danger"):
        assert script.first_alarm(points, Rule(settle_steps=2000), level) is None


def test_the_stable_run_beside_it_is_never_warned(script: Any) -> None:
    """`compensated`, the same batches and initial weights, to step 15,000; with room."""
    points = recorded_run("compensated").history().points
    assert points[-1].step == 15_000 and script.first_move(points, 2000) is None
    strict = Rule(settle_steps=2000, watch_head_growth=1.4, danger_head_growth=1.4)
    for level in ("watch", "danger"):
        assert script.first_alarm(points, strict, level) is None


def test_a_stable_run_with_plain_numerics_whose_norm_rises_is_no_alarm(script: Any) -> None:
    """Its heads show nothing. By the norm alone it came to 1.297 of the 1.3 that are danger."""
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
    assert script.first_alarm(points, rule) is None
    assert script.first_alarm(points, rule, "watch") == 10_650
    strict = replace(rule, danger_growth=1.25)  # with room
    assert script.first_alarm(points, strict) is None
    alone = replace(rule, norm_needs_head=False)
    assert script.first_alarm(points, replace(alone, danger_growth=1.28)) is not None
    assert script.first_alarm(points, alone) is None


@pytest.mark.parametrize("name", ["none", "compensated"])
def test_heads_that_grow_early_are_no_alarm(script: Any, name: str) -> None:
    """Without a warm-up to wait for, the rule sees the first thousand steps of both runs."""
    points = recorded_run(name).history(Rule(settle_steps=0)).points
    early = [p for p in points if p.step <= 2000]
    assert script.first_alarm(early, Rule()) is None
    blind = recorded_run(name).history(Rule(settle_steps=0, head_logit=0.0)).points
    assert any(p.growth.value > 1.7 for p in blind if p.step <= 2000)


def test_medians_are_what_keeps_stable_runs_quiet(script: Any) -> None:
    """One window of a stable run, disturbed as spikes disturb it, is no trend; four are."""
    points = curve("compensated_1")

    def disturbed(windows: int) -> list[Point]:
        hit = range(100, 100 + windows)
        return [
            Point(step=p.step, loss=p.loss, grad_norm=p.grad_norm * (9 if i in hit else 1),
                  grad_norm_max=p.grad_norm_max)
            for i, p in enumerate(points)
        ]  # fmt: skip

    assert script.first_alarm(disturbed(2), Rule()) is None
    assert script.first_alarm(disturbed(4), Rule()) is not None


def run_dir(folder: Path, *, explodes: bool) -> str:
    """A run directory with telemetry of 120 records of 50 steps."""
    rule = Rule(settle_steps=500)
    meta = record.make_meta(layers=1, heads=1, interval=50, rule=rule, attention="a/b")
    writer = Writer(folder, meta, start_step=0)
    heads = {name: np.full((1, 1), 1e-4, np.float32) for name in HEAD_METRICS}
    for i in range(1, 121):
        late = max(0, i - 60) if explodes else 0
        if late:
            heads["kappa"][:] = 100.0
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


def test_the_script_chooses_on_some_runs_and_judges_on_others(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [csv_of(curve("plain_1"), tmp_path / "plain_1.csv"),
              csv_of(curve("compensated_1"), tmp_path / "compensated_1.csv")]  # fmt: skip
    cut = csv_of(curve("plain_2")[:-15], tmp_path / "cut.csv")
    arguments = ["--choose", *chosen, "--judge", cut, "--out", str(tmp_path), "--lead", "700"]
    monkeypatch.setattr(sys, "argv", ["early_warning.py", *arguments])
    with pytest.raises(SystemExit):  # CSVs do not say whose they are
        script.main()
    monkeypatch.setattr(sys, "argv", ["early_warning.py", *arguments, "--source", "elsewhere"])
    assert script.main() == 0
    result = json.loads((tmp_path / "early_warning.json").read_text())
    assert result["chosen"] in script.GRIDS["danger_growth"] and result["chosen"] >= 1.2
    assert result["source"] == "elsewhere" and result["product"] is False
    (found,) = result["held_out"]
    assert found["outcome"] == "alarm, cut 700 steps later" and found["lead"] is None


def test_what_came_of_a_run(script: Any) -> None:
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
    row = {"steps": 5300, "alarm": 5050, "loss_moved": None, "loss_high": None}
    assert script._told_again(row) == {"outcome": "alarm, cut 250 steps later"}
    assert script._told_again(row | {"loss_high": 5300}) == {}


def test_own_runs_are_judged_apart(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their figures are never in one table with those of other programs' curves."""
    judged = [run_dir(tmp_path / "bad", explodes=True), run_dir(tmp_path / "good", explodes=False)]
    other = csv_of(curve("plain_1"), tmp_path / "plain_1.csv")
    arguments = ["early_warning.py", "--out", str(tmp_path), "--judge", *judged]
    monkeypatch.setattr(sys, "argv", [*arguments, other])
    with pytest.raises(SystemExit):
        script.main()
    monkeypatch.setattr(sys, "argv", arguments)
    assert script.main() == 0
    assert not (tmp_path / "early_warning.json").exists()
    result = json.loads((tmp_path / "early_warning_runs.json").read_text())
    assert result["product"] is True and result["chosen"] is None and result["grid"] == []
    bad, good = result["held_out"]
    assert bad["warm_up"] == {"growth": 0.0, "logit": 0.0}  # it is as short as the look back
    assert bad["outcome"] == "warned" and bad["lead"] >= 1000 and bad["head_telemetry"]
    assert bad["head_named"] == 50 * 61
    assert good["outcome"] == "quiet" and good["alarm"] is None


def test_a_run_is_judged_as_it_judged_itself(script: Any, tmp_path: Path) -> None:
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
    found = script.examine(str(tmp_path), Rule())
    assert (found["outcome"], found["alarm"], found["watch"]) == ("quiet", None, None)
    # What its records would say if one computation had made them.
    alone = replace(rule, norm_needs_head=False)
    assert script.first_alarm(record.read(tmp_path).points(), alone) is not None


def test_an_earlier_result_is_added_to(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of earlier runs may be gone; the choice made on them stands."""
    runs = {name: run_dir(tmp_path / name, explodes=name != "good") for name in ("a", "good", "b")}
    result = tmp_path / "early_warning_runs.json"

    def call(*arguments: str) -> dict[str, Any]:
        command = ["early_warning.py", "--out", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        assert script.main() in (0, 1)
        return json.loads(result.read_text())

    first = call("--choose", runs["a"], runs["good"], "--lead", "700")
    both = call("--judge", runs["b"], "--keep", str(result))
    for key in ("chosen", "grid", "wanted_lead"):
        assert both[key] == first[key]
    assert [row["run"] for row in both["choosing"]] == ["a", "good"]
    assert both["choosing"][0]["commit"] == first["commit"]
    again = call("--judge", runs["b"], "--keep", str(result))
    assert [row["run"] for row in again["held_out"]] == ["b"]  # once, judged now
    with pytest.raises(SystemExit, match="chosen on a; hold them out"):
        call("--judge", runs["a"], "--keep", str(result))
    with pytest.raises(SystemExit, match="another rule"):
        changed = json.loads(result.read_text()) | {"default": 9.0}
        result.write_text(json.dumps(changed))
        call("--judge", runs["b"], "--keep", str(result))


def test_kept_rows_of_a_rule_that_called_a_norm_alone_danger(script: Any, tmp_path: Path) -> None:
    """Any other alarm, and none at all, are what the present rule says, too."""
    old = {"default": Rule().danger_head_growth, "threshold": "danger_head_growth", "commit": "0",
           "chosen": None, "grid": [], "wanted_lead": 1, "choosing": []}  # fmt: skip
    old["rule"] = {k: v for k, v in asdict(Rule()).items() if k != "norm_needs_head"}
    row = {"steps": 99, "loss_moved": 1, "loss_high": None}
    said = {
        "head": "layer 1 head 8: W_Q or W_K grew 2.23x; gradient norm 1.31x its minimum",
        "norm": "gradient norm 1.31x its minimum; layer 1 head 8: logits up to 1,200",
        "broken": "loss or gradient norm not finite at 50",
    }
    old["held_out"] = [
        row | {"run": name, "alarm": 50, "reason": reason} for name, reason in said.items()
    ] + [row | {"run": "quiet", "alarm": None, "reason": None}]
    file = tmp_path / "old.json"
    for rule, marked in ((old["rule"], ["norm"]), (asdict(Rule()), [])):
        file.write_text(json.dumps(old | {"rule": rule}))
        rows = script.kept(file, "danger_head_growth", set())["held_out"]
        assert [r["run"] for r in rows if r.get("earlier_rule")] == marked


def test_the_error_is_asked_alone(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign beside others would be chosen by what they do."""
    runs = {name: run_dir(tmp_path / name, explodes=name != "good") for name in ("a", "good", "b")}
    curves = csv_of(curve("plain_1"), tmp_path / "plain_1.csv")
    command = ["early_warning.py", "--error-alone", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--judge", curves, "--source", "elsewhere"])
    with pytest.raises(SystemExit):
        script.main()
    arguments = ["--choose", runs["a"], runs["good"], "--lead", "700", "--judge", runs["b"]]
    monkeypatch.setattr(sys, "argv", [*command, *arguments])
    assert script.main() == 0
    result = json.loads((tmp_path / "early_warning_error.json").read_text())
    assert (result["threshold"], result["chosen"]) == ("danger_error", 0.005)
    (found,) = result["held_out"]
    assert found["alarm"] == 50 * 62 and found["reason"].startswith(
        "layer 0 head 0: error of delta"
    )
    # Rows of another rule are kept and say so.
    kept = ["--keep", str(tmp_path / "early_warning_error.json"), "--judge", runs["b"]]
    (tmp_path / "early_warning_error.json").write_text(json.dumps(result | {"rule": {}}))
    monkeypatch.setattr(sys, "argv", [*command, *kept])
    assert script.main() == 0
    again = json.loads((tmp_path / "early_warning_error.json").read_text())
    assert [row.get("earlier_rule", False) for row in again["choosing"]] == [True, True]
    assert [row.get("earlier_rule", False) for row in again["held_out"]] == [False]


def test_a_run_that_another_sign_was_chosen_on_is_not_called_held_out(tmp_path: Path) -> None:
    tables = benchmark_scripts.load("telemetry_tables")
    file = tmp_path / "early_warning_error.json"
    assert tables.chosen_on(file) == set()
    file.write_text(json.dumps({"choosing": [{"run": "seen"}], "held_out": [{"run": "new"}]}))
    row = {"steps": 50, "outcome": "quiet"} | dict.fromkeys(
        ("watch", "alarm", "loss_moved", "lead", "loss_high", "reason")
    )
    result = {
        "choosing": [], "held_out": [row | {"run": name} for name in ("seen", "new")],
        "product": True, "source": "runs", "grid": [], "chosen": None, "default": 2.0,
        "threshold": "danger_head_growth", "commit": "0123456", "utc": "2026-01-02T03:04:05Z",
        "machine": {"cpu": "x"}, "versions": {"torch": "2", "triton": "3"},
    }  # fmt: skip
    told = tables.early_warning(result, tables.chosen_on(file))
    assert "| held out, but for the error | seen |" in told and "| held out | new |" in told


def test_runs_cannot_be_on_both_sides(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = csv_of(curve("plain_1"), tmp_path / "plain_1.csv")
    monkeypatch.setattr(sys, "argv", ["early_warning.py", "--choose", one, "--judge", one])
    with pytest.raises(SystemExit):
        script.main()


def test_losses_that_are_not_finite_have_moved(script: Any) -> None:
    points = curve("compensated_1")[:40]
    broken = [*points, *(Point(step=points[-1].step + 50 * i, loss=math.nan, grad_norm=math.nan,
                               grad_norm_max=math.nan) for i in range(1, 8))]  # fmt: skip
    assert script.first_move(broken, 2000) == points[-1].step + 50
    assert script.first_alarm(broken, Rule()) == points[-1].step + 50


def test_a_loss_that_breaks_in_the_warm_up_moves_there_and_not_before(script: Any) -> None:
    """Where it rises in the warm-up, as losses do, it has not moved; the alarm is no warning."""
    losses = [9.0, 5.0, 5.0, 5.0, 5.0, 5.0, *[5.5] * 6, math.nan, math.nan]
    points = [
        Point(step=50 * i, loss=loss, grad_norm=loss / 9, grad_norm_max=loss / 9)
        for i, loss in enumerate(losses, start=1)
    ]
    assert script.first_move(points, 2000) == script.first_alarm(points, Rule()) == 50 * 13
    # Sorting NaN with numbers leaves a median that is either.
    odd = [*losses[:-2], math.nan, 5.5, 5.5, 5.5, 5.5]
    points = [replace(points[0], step=50 * i, loss=loss) for i, loss in enumerate(odd, start=1)]
    assert script.first_move(points, 0) is not None and script.first_move(points[6:], 0) == 50 * 13


@pytest.mark.parametrize("given", ["empty", "prose.md", "missing.csv", "short.csv"])
def test_what_is_no_run_and_no_curve_is_told_in_one_line(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "prose.md").write_text("# prose\n")
    (tmp_path / "short.csv").write_text("1,2\n")
    command = ["early_warning.py", "--source", "elsewhere", "--out", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", [*command, "--judge", str(tmp_path / given)])
    with pytest.raises(SystemExit, match=rf"{given}: n"):
        script.main()
    assert not (tmp_path / "results").exists()

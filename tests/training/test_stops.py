"""Runs that end early and go on: signals, limits, NaNs, and resumes that repeat every bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from training_ranks import figures, log_of, metrics, run_ranks

pytestmark = pytest.mark.multiprocess

DETERMINISTIC = "training.deterministic=true"
GENTLE = ["optimizer.lr=1e-3", "optimizer.min_lr=5e-4"]
PARAMETER = "decoder.layers.1.mlp.linear_fc1.weight"


def run(name: str, *keys: str, **faults: Any) -> dict[str, Any]:
    return {"set": [f"name={name}", "model.num_layers=2", *keys], **faults}


def on(step: int, rank: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "rank": rank, **more}


@pytest.fixture(scope="module")
def two(folder: Path, corpus: Path) -> dict[str, list[dict[str, Any]]]:
    """Two data-parallel ranks with the distributed optimizer, through everything."""
    term = on(2, 1, name="SIGTERM")
    nan = on(3, 1, parameter=PARAMETER)
    every = "checkpoint.interval=2"
    runs = [
        run("whole", DETERMINISTIC),
        run("broken", DETERMINISTIC, signal=term),
        run("broken", DETERMINISTIC),
        run("nan", DETERMINISTIC, every, nan=nan),
        run("nan", DETERMINISTIC, every),
        run("nan_async", every, "checkpoint.async_save=true", nan=nan),
        run("nan_whole", "parallel.use_distributed_optimizer=false", nan=nan),
        # The reduction runs during the backward pass: the fault is planted after it, on all ranks.
        run("nan_overlap", "parallel.overlap_grad_reduce=true", nan=nan | {"rank": None}),
        run("nan_ignored", "training.check_finite=false", nan=nan),
    ]
    results = run_ranks(folder, corpus, 2, runs)
    names = ["whole", "stopped", "resumed", "nan", "after nan", "nan_async", "nan_whole",
             "nan_overlap", "nan_ignored"]  # fmt: skip
    return dict(zip(names, results, strict=True))


def weights(results: list[dict[str, Any]]) -> list[str]:
    return [rank["weights"] for rank in results]


def test_a_signal_on_one_rank_stops_all_after_the_same_step(two, folder):
    assert [(r["code"], r["step"]) for r in two["stopped"]] == [(0, 2), (0, 2)]
    assert "received SIGTERM" in log_of(folder, "broken")


def test_only_a_run_that_reached_train_steps_is_marked_finished(two, folder):
    marker = json.loads((folder / "runs" / "whole" / "FINISHED").read_text())
    assert marker["step"] == 5 and marker["consumed_tokens"] == 5 * 4 * 32
    assert not (folder / "runs" / "nan_whole" / "FINISHED").exists()


def test_garbage_passes_look_only_at_what_steps_leave_behind(two):
    """What exists after two steps is out of them, on every rank alike, and until the run ends."""
    assert all(rank["frozen"] > 100_000 and rank["frozen_after"] == 0 for rank in two["whole"])
    # Ended after the second step of its attempt, and after the third.
    assert all(rank["frozen"] > 100_000 for rank in [*two["stopped"], *two["resumed"]])


def test_resume_repeats_every_bit_of_losses_weights_and_optimizer_state(two, folder):
    assert figures(folder / "runs" / "broken") == figures(folder / "runs" / "whole")
    assert len(figures(folder / "runs" / "whole")) == 5
    assert weights(two["resumed"]) == weights(two["whole"])
    assert two["stopped"][0]["weights"] != two["whole"][0]["weights"]


def test_a_nan_stops_all_ranks_before_the_update_and_is_traced(two, folder):
    """The NaN is written into rank 1's local gradient, before the ranks' gradients are summed."""
    assert [(r["code"], r["step"]) for r in two["nan"]] == [(3, 2), (3, 2)]
    text = two["nan"][0]["error"]
    assert text == two["nan"][1]["error"]
    assert text.startswith("step 3: gradients not finite; stopped before the update")
    assert "before their reduction on rank 1 (tp 0, pp 0, cp 0, dp 1, ep 0)\n" in text
    assert f"{PARAMETER}: 1 of 4096 values" in text and "rank 0 (" not in text.split("\n")[1]
    assert [n for n in text.split() if n.startswith("decoder.")] == [f"{PARAMETER}:"]
    log = log_of(folder, "nan")
    assert "stopped by NonFiniteError: step 3" in log


def test_after_a_nan_the_run_continues_from_the_checkpoint_before_it(two, folder):
    assert [(r["code"], r["step"]) for r in two["after nan"]] == [(0, 5), (0, 5)]
    assert weights(two["after nan"]) == weights(two["whole"])
    assert figures(folder / "runs" / "nan") == figures(folder / "runs" / "whole")


def test_a_background_save_is_committed_when_all_ranks_stop_by_an_error(two, folder):
    """Saved after step 2, when training was in order; the NaN comes in step 3."""
    assert [r["code"] for r in two["nan_async"]] == [3, 3]
    saved = folder / "runs" / "nan_async" / "checkpoints"
    assert (saved / "step_00000002.attempt-1").is_dir()
    assert (saved / "latest").read_text() == "step_00000002.attempt-1\n"


def test_the_rank_is_named_without_the_distributed_optimizer_too(two):
    """There the reduction leaves the NaN on every rank."""
    text = two["nan_whole"][0]["error"]
    assert two["nan_whole"][0]["code"] == 3 and "before their reduction on rank 1 (" in text
    assert f"{PARAMETER}: 1 of 4096 values" in text


def test_with_overlap_the_parameter_is_named_and_the_rank_honestly_not(two):
    text = two["nan_overlap"][0]["error"]
    assert two["nan_overlap"][0]["code"] == 3 and PARAMETER in text
    assert "the rank cannot be told" in text


def test_without_the_check_non_finite_steps_are_counted(two, folder):
    assert two["nan_ignored"][0]["code"] == 0
    rows = metrics(folder / "runs" / "nan_ignored")
    assert [rows[s]["nonfinite"] for s in sorted(rows)] == ["0", "0", "1", "2", "3"]


@pytest.fixture(scope="module")
def one(folder: Path, corpus: Path) -> dict[str, list[dict[str, Any]]]:
    """One process: BF16 with dropout, recompute and background saves; limits; refusals."""
    noisy = [
        DETERMINISTIC,
        "training.precision=bf16",
        "model.hidden_dropout=0.1",
        "model.attention_dropout=0.1",
        "training.recompute.granularity=full",
        "checkpoint.async_save=true",
        "checkpoint.interval=1",
        "checkpoint.optimizer_sharding=dp_reshardable",
    ]
    saved = "checkpoint.directory=runs/saved/checkpoints"
    plan = {
        "noisy": run("noisy", *noisy),
        "noisy stopped": run("noisy_broken", *noisy, "training.exit_at_step=3"),
        "noisy at the limit": run("noisy_broken", *noisy, "training.exit_at_step=3"),
        "noisy resumed": run("noisy_broken", *noisy),
        "finished": run("noisy", *noisy),
        "limit": run("limit", "training.exit_after_minutes=1.0e-9"),
        "usr1": run("usr1", signal=on(1, 0, name="SIGUSR1")),
        "int": run("int", signal=on(4, 0, name="SIGINT")),
        "early": run("early", signal=on(0, 0, name="SIGTERM")),
        "other": run("limit", "model.num_layers=3"),
        "required": run("none", "checkpoint.resume=required"),
        "fast": run("gentle", "training.exit_at_step=3"),
        "gentle": run("gentle", *GENTLE, "optimizer.clip_grad=0.05"),
        "fast again": run("other_clip", "training.exit_at_step=3"),
        "other clip": run("other_clip", *GENTLE),
        "saved": run("saved", "training.exit_at_step=2"),
        "not mounted": run("saved", "checkpoint.directory=elsewhere"),
        "not its own": run("second", "training.seed=9", saved),
        "renamed": run("third", saved),
    }
    results = run_ranks(folder, corpus, 1, list(plan.values()))
    return dict(zip(plan, results, strict=True))


def test_resume_is_bitwise_with_dropout_recompute_and_background_saves(one, folder):
    assert [one[n][0]["step"] for n in ("noisy", "noisy stopped", "noisy resumed")] == [5, 3, 5]
    assert weights(one["noisy resumed"]) == weights(one["noisy"])
    assert figures(folder / "runs" / "noisy_broken") == figures(folder / "runs" / "noisy")


def test_a_changed_learning_rate_and_clip_count_from_the_resume_on(one, folder):
    """As the message of a NaN advises; the saved schedule gives its position, not its values."""
    rows = metrics(folder / "runs" / "gentle")
    halfway = 0.5 * (1 + math.cos(math.pi * 2 / 3))  # step 4: 2 of 3 steps after the warm-up
    assert float(rows[2]["lr"]) == pytest.approx(1e-2)
    assert float(rows[4]["lr"]) == pytest.approx(5e-4 + 5e-4 * halfway)
    assert float(rows[5]["lr"]) == pytest.approx(5e-4)
    log = log_of(folder, "gentle")
    assert "optimizer.lr: 0.01 -> 0.001" in log and "optimizer.clip_grad: 1.0 -> 0.05" in log
    assert [one[name][0]["step"] for name in ("fast", "gentle", "other clip")] == [3, 5, 5]
    assert weights(one["fast"]) == weights(one["fast again"])
    assert weights(one["gentle"]) != weights(one["other clip"])


def test_a_run_at_its_step_limit_does_not_train_on(one, folder):
    assert one["noisy at the limit"][0]["step"] == 3
    log = log_of(folder, "noisy_broken")
    assert log.count("exit_at_step is 3; the command with a larger one, or none, continues") == 2
    assert weights(one["noisy at the limit"]) == weights(one["noisy stopped"])


def test_a_finished_run_is_left_alone(one, folder):
    assert one["finished"] == [{"code": 0}]
    assert "has finished already" in log_of(folder, "noisy")


def test_time_limit_and_signals_stop_gracefully_with_a_checkpoint(one, folder):
    for name, step in (("limit", 1), ("usr1", 1), ("int", 4)):
        assert (one[name][0]["code"], one[name][0]["step"]) == (0, step)
        (saved,) = (folder / "runs" / name / "checkpoints").glob("step_*")
        assert saved.name.startswith(f"step_{step:08d}")
        assert not (folder / "runs" / name / "FINISHED").exists()


def test_a_signal_during_start_up_stops_before_the_first_step(one, folder):
    assert (one["early"][0]["code"], one["early"][0]["step"]) == (0, 0)
    assert not list((folder / "runs" / "early" / "checkpoints").glob("step_*"))


def test_a_run_that_trained_nothing_saves_nothing(one, folder):
    saved = sorted((folder / "runs" / "noisy_broken" / "checkpoints").glob("step_*"))
    assert [path.name.split(".")[1] for path in saved] == ["attempt-1"] * len(saved)


def test_a_run_whose_checkpoints_are_gone_does_not_start_anew(one, folder):
    """As where ``checkpoint.directory`` is not mounted: it is empty, and no new run's."""
    (result,) = one["not mounted"]
    assert result["code"] == 4 and "last_checkpoint.json says that step 2 " in result["error"]
    assert str(folder / "runs" / "saved" / "checkpoints" / "step_00000002") in result["error"]
    assert not (folder / "elsewhere").exists()


def test_another_run_s_checkpoints_are_not_continued(one):
    """Found by what the checkpoint says: the new run directory knows nothing of the old run."""
    (result,) = one["not its own"]
    assert result["code"] == 2 and "training.seed: 9, but it was saved with" in result["error"]
    assert one["renamed"][0]["code"] == 0 and one["renamed"][0]["step"] == 5


def test_errors_have_their_exit_codes(one):
    assert one["other"][0]["code"] == 2 and "model.num_layers" in one["other"][0]["error"]
    assert one["required"][0]["code"] == 4

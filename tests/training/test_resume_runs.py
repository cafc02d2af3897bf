"""Runs that go on with more steps, with data elsewhere, or with values written out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from byte_corpus import byte_corpus
from training_ranks import figures, log_of, metrics, run_ranks

pytestmark = pytest.mark.multiprocess

LONG, NOW = "training.train_steps=9", "optimizer.schedule_from=now"
EQUAL = [
    "data.seed=1234",
    "model.kv_channels=8",
    "model.max_position_embeddings=32",
    "optimizer.decay_steps=5",
    "data.tokenizer.eod_id=256",
    "data.blend.0.weight=3",
]


@pytest.fixture(scope="module")
def results(folder: Path, corpus: Path) -> dict[str, dict[str, Any]]:
    """By name of the run, and which of its attempts it is."""
    (folder / "moved").mkdir()
    for ending in (".bin", ".idx", ".manifest.json"):
        shutil.copy(f"{corpus}{ending}", folder / "moved")
    os.symlink(folder / "moved", folder / "link")
    moved = f"data.blend.0.path=./link/../link/{corpus.name}"
    other = byte_corpus(folder / "other", (f"another text, number {n} " * 9 for n in range(80)))
    elsewhere = f"data.blend.0.path={other}"
    plan: dict[str, list[str]] = {
        "whole": [],
        "equal": ["training.exit_at_step=2"],
        "equal, other tokens": [elsewhere],
        "equal, again": [*EQUAL, moved],
        "alien": ["checkpoint.directory=runs/equal/checkpoints", elsewhere],
        "long": ["training.exit_at_step=3"],
        "long, another decay": [LONG, "optimizer.decay_steps=9"],
        "long, again": [LONG, "training.exit_at_step=7", "data.split=[0.9,0.05,0.05]"],
        "long, now": [LONG, NOW, "data.split=[0.9,0.05,0.05]"],
    }
    tested = ["training.eval_test=true", "data.split=[0.9,0.05,0.05]"]
    plan |= {
        "short": [*tested, "training.train_steps=3", "optimizer.decay_steps=5"],
        "lowered": [*tested, "training.exit_at_step=3", "logging.interval=2"],
        "lowered, to where it is": [*tested, "training.train_steps=3"],
    }
    small = "model.num_layers=2"
    runs = [{"set": [f"name={what.split(',')[0]}", small, *keys]} for what, keys in plan.items()]
    return dict(zip(plan, (one for (one,) in run_ranks(folder, corpus, 1, runs)), strict=True))


def test_what_is_equal_goes_on_with_every_bit(results, folder):
    assert results["equal, again"]["code"] == 0
    assert results["equal, again"]["weights"] == results["whole"]["weights"]
    assert figures(folder / "runs" / "equal") == figures(folder / "runs" / "whole")
    said = log_of(folder, "equal")
    assert "data.blend.0.path: " in said and "learning rate" not in said
    for key in ("kv_channels", "data.seed", "decay_steps", "eod_id"):
        assert f"changed since the last attempt: {key}" not in said and f"{key}: null" not in said


def test_other_tokens_are_refused_by_what_the_checkpoint_knows(results):
    """Of the run's own directory, and of a new one that names its checkpoints."""
    for name in ("equal, other tokens", "alien"):
        assert results[name]["code"] == 2
        assert "are not those the first 2 steps were trained on" in results[name]["error"] or (
            name == "alien" and "are not those the first 5 steps" in results[name]["error"]
        )


def test_more_steps_leave_the_schedule_alone_until_now(results, folder):
    refused = results["long, another decay"]
    assert refused["code"] == 2 and "optimizer.decay_steps: 9, but the schedule" in refused["error"]
    assert "optimizer.schedule_from: now (learning rate of step 4: 0.0025 -> " in refused["error"]
    found, whole = (metrics(folder / "runs" / name) for name in ("long", "whole"))
    assert [found[step]["lr"] for step in range(1, 6)] == [whole[n]["lr"] for n in range(1, 6)]
    assert [float(found[step]["lr"]) for step in (6, 7)] == [0.0, 0.0]
    assert float(found[8]["lr"]) > 0 and results["long, now"]["step"] == 9
    said = log_of(folder, "long")
    assert "schedule that the run began with ends its decay at step 5: the learning rate" in said
    assert "learning rate of step 8: 0 -> 0.0004952; at the end 0 from step 5 -> 0 from" in said


def test_other_evaluation_data_are_announced(results, folder):
    said = log_of(folder, "long")
    assert "warning: data valid: not the sequences of the first 3 steps; losses of before" in said
    assert said.count("warning: data valid") == 1 and "data.split.1: 0.1 -> 0.05" in said


def test_a_run_that_ends_where_it_stands_is_evaluated_as_one_of_that_length(results, folder):
    """``train_steps`` lowered to the step that is done: both splits, beside the step's own loss."""
    assert results["lowered, to where it is"]["code"] == 0
    assert (folder / "runs" / "lowered" / "FINISHED").exists()
    said = [[line.partition(" test split: ")[2] for line in log_of(folder, name).splitlines()]
            for name in ("short", "lowered")]  # fmt: skip
    whole, lowered = (list(filter(None, lines)) for lines in said)
    assert lowered == whole and len(whole) == 1
    columns = ("loss", "eval_loss", "lr", "grad_norm", "consumed_tokens")
    last = [metrics(folder / "runs" / name)[3] for name in ("short", "lowered")]
    assert [last[1][name] for name in columns] == [last[0][name] for name in columns]
    assert last[0]["eval_loss"]

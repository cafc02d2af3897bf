"""Spikes in real runs of two data-parallel ranks: recorded, dropped, rewound, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_ranks import figures, log_of, metrics, run_ranks

from megatron_patch.stability import record

pytestmark = pytest.mark.multiprocess

_WATCH = """
    training.deterministic=true training.train_steps=12 model.num_layers=1
    training.global_batch_size=2 model.hidden_dropout=0.1 faults.spike.window=8
    faults.spike.min_history=4 checkpoint.interval=3 checkpoint.keep_last=null
"""
WATCH = tuple(_WATCH.split())
SPIKE = {"step": 8, "times": 1}
OFF_INTERVAL = ("faults.spike.rewind_margin=3", "checkpoint.keep_last=2")
SKIPPED = {"windows": [[6, 2]], "rewinds": 1}


def run(name: str, action: str, *keys: str, **faults: Any) -> dict[str, Any]:
    return {"set": [f"name={name}", *WATCH, f"faults.spike.action={action}", *keys], **faults}


@pytest.fixture(scope="module")
def two(folder: Path, corpus: Path) -> dict[str, list[dict[str, Any]]]:
    """Every policy on two ranks. The run ``same list`` never spikes and starts with the list."""
    for name in ("listed", "overlap_listed"):
        listed = folder / "runs" / name / "skipped_batches.json"
        listed.parent.mkdir(parents=True)
        listed.write_text(json.dumps(SKIPPED))
    stop, records = "training.exit_at_step", "stability.interval=1"
    plan = {
        "record": run("record", "record", spike=SPIKE),
        "skip": run("skip", "skip", spike=SPIKE),
        "skip stopped": run("skip_broken", "skip", f"{stop}=7"),
        "skip resumed": run("skip_broken", "skip", spike=SPIKE),
        "rewind": run("rewind", "rewind", spike=SPIKE),
        "same list": run("listed", "rewind"),
        "stopped after": run("rewind_broken", "rewind", f"{stop}=10", spike=SPIKE),
        "resumed after": run("rewind_broken", "rewind"),
        "narrow": run("narrow", "rewind", "faults.spike.rewind_skip=1", records, spike=SPIKE),
        "at once": run("at_once", "rewind", records, spike=SPIKE | {"step": 7}),
        "margin": run("margin", "rewind", "faults.spike.rewind_margin=3", spike=SPIKE),
        "off stopped": run("off", "rewind", *OFF_INTERVAL, f"{stop}=7"),
        "off resumed": run("off", "rewind", *OFF_INTERVAL, spike=SPIKE),
        "early": run("early", "rewind", spike={"step": 5, "times": 1}),
        "again": run("again", "rewind", "faults.spike.max_rewinds=2", spike=SPIKE | {"times": 9}),
    }
    overlap = (
        "training.precision=bf16",
        "checkpoint.async_save=true",
        "parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather=true",
        "checkpoint.optimizer_sharding=dp_reshardable",
    )
    plan["overlap"] = run("overlap", "rewind", *overlap, spike=SPIKE)
    plan["overlap listed"] = run("overlap_listed", "rewind", *overlap)
    plan["early"]["set"] += ["checkpoint.interval=6"]
    results = run_ranks(folder, corpus, 2, list(plan.values()))
    return dict(zip(plan, results, strict=True))


def weights(results: list[dict[str, Any]]) -> list[str]:
    return [rank["weights"] for rank in results]


def entries(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / "runs" / name / "spikes.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_record_names_step_samples_and_attention_and_trains_on(two, folder):
    (entry,) = entries(folder, "record")
    assert (entry["step"], entry["global_batch"]) == (8, 7)
    assert [s["sample"] for s in entry["samples"]] == [14, 15]
    assert {"file", "window", "first_token"} <= set(entry["samples"][0])
    assert entry["grad_norm_z"] > 20 and entry["grad_norm"] > 1e3
    assert "max_logit" in entry["attention"]
    assert two["record"][0]["code"] == 0
    assert metrics(folder / "runs" / "record")[12]["skipped"] == "0"


def test_skip_drops_that_update_on_all_ranks(two, folder):
    rows = metrics(folder / "runs" / "skip")
    assert [rows[s]["skipped"] for s in (7, 8, 12)] == ["0", "1", "1"]
    assert float(rows[8]["grad_norm"]) > 1e3
    assert weights(two["skip"]) != weights(two["record"])
    assert len(entries(folder, "skip")) == 1


def test_a_resumed_run_decides_like_an_unbroken_one(two, folder):
    """The spike comes one step after the resume: only the saved history can tell."""
    assert two["skip stopped"][0]["step"] == 7
    assert weights(two["skip resumed"]) == weights(two["skip"])
    assert figures(folder / "runs" / "skip_broken") == figures(folder / "runs" / "skip")


def test_rewind_equals_an_unbroken_run_that_leaves_the_same_batches_out(two, folder):
    assert [r["code"] for n in ("rewind", "same list") for r in two[n]] == [0, 0, 0, 0]
    assert json.loads((folder / "runs" / "rewind" / "skipped_batches.json").read_text()) == SKIPPED
    assert weights(two["rewind"]) == weights(two["same list"])
    assert figures(folder / "runs" / "rewind") == figures(folder / "runs" / "listed")
    assert weights(two["rewind"]) != weights(two["record"])


def test_rewind_with_background_saves_and_overlapped_communication(two, folder):
    done = folder / "runs" / "overlap" / "skipped_batches.json"
    assert json.loads(done.read_text()) == SKIPPED
    assert weights(two["overlap"]) == weights(two["overlap listed"])
    assert figures(folder / "runs" / "overlap") == figures(folder / "runs" / "overlap_listed")


def test_resume_after_a_rewind_is_bitwise(two, folder):
    assert two["stopped after"][0]["step"] == 10
    assert weights(two["resumed after"]) == weights(two["rewind"])
    assert figures(folder / "runs" / "rewind_broken") == figures(folder / "runs" / "rewind")


def test_a_rewind_moves_aside_and_deletes_nothing(two, folder):
    rows = (folder / "runs" / "rewind" / "metrics.csv").read_text().splitlines()
    told = [tuple(row.split(",")[:2]) for row in rows[1:]]
    # Step 8 had no update to record before the rewind.
    assert told[5:9] == [("6", "1"), ("7", "1"), ("7", "2"), ("8", "2")]
    log = log_of(folder, "rewind")
    assert "going back to step 6; global batches 6-7 are left out (rewind 1 of 3)" in log
    aside = folder / "runs" / "margin" / "checkpoints" / "aside"
    (moved,) = aside.iterdir()
    assert moved.name.startswith("step_00000006.attempt-1.abandoned.")


@pytest.mark.parametrize("name", ["at_once", "narrow"])
def test_a_rewind_loses_no_record_of_a_step_that_stays(two, folder, name):
    """The record of step 6 is still on its way when step 7 spikes; that of 7 is not kept for 8."""
    log = log_of(folder, name)
    assert "going back to step 6;" in log
    assert record.read(folder / "runs" / name).steps.tolist() == list(range(1, 13))


def test_margin_and_width_choose_the_window(two, folder):
    narrow = json.loads((folder / "runs" / "narrow" / "skipped_batches.json").read_text())
    assert narrow == {"windows": [[7, 1]], "rewinds": 1}
    margin = json.loads((folder / "runs" / "margin" / "skipped_batches.json").read_text())
    assert margin == {"windows": [[3, 5]], "rewinds": 1}
    saved = folder / "runs" / "margin" / "checkpoints"
    assert (saved / "step_00000006.attempt-2").is_dir()


def test_a_graceful_stop_leaves_the_checkpoint_a_rewind_goes_to(two, folder):
    """Of 3, 6 and 7 the last two are kept, and 3, which the margin asks for."""
    assert [r["code"] for r in two["off resumed"]] == [0, 0]
    off = json.loads((folder / "runs" / "off" / "skipped_batches.json").read_text())
    assert off == {"windows": [[3, 5]], "rewinds": 1}


def test_without_a_checkpoint_the_update_is_dropped_and_said(two, folder):
    assert two["early"][0]["code"] == 0
    log = log_of(folder, "early")
    why = "there is no good checkpoint of step 4 or before to go back to"
    assert f"{why}: the update is dropped instead" in log
    assert metrics(folder / "runs" / "early")[12]["skipped"] == "1"


def test_rewinds_are_bounded(two, folder):
    assert [r["code"] for r in two["again"]] == [7, 7]
    assert "faults.spike.max_rewinds (2) are used up" in two["again"][0]["error"]
    skipped = json.loads((folder / "runs" / "again" / "skipped_batches.json").read_text())
    assert skipped["rewinds"] == 2
    assert not (folder / "runs" / "again" / "FINISHED").exists()

"""Runs that start from one another's checkpoints, in processes, on one rank and on two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from byte_corpus import byte_corpus
from training_ranks import figures, log_of, metrics, run_ranks


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, dict[str, Any]]:
    """Runs of two steps or four that start from one another, all in one pair of processes."""
    folder = tmp_path_factory.mktemp("chain")
    other = byte_corpus(folder / "other", (f"{n} is followed by {n + 1}. " * 9 for n in range(60)))
    both = [f"data.blend=[{{path: {other}, weight: 0.5}}, {{path: {corpus}, weight: 0.5}}]"]
    end, eight = "training.train_steps=8", "training.global_batch_size=8"
    runs: dict[str, dict[str, Any]] = {}

    def run(name: str, *keys: str, ranks: int = 1, attempt: str = "", **more: Any) -> None:
        keys = ("model.num_layers=1", "faults.hang_seconds=null", eight, *keys)
        runs[name + attempt] = {"set": [f"name={name}", *keys], "ranks": ranks, "read": True} | more

    run("parent", end, "training.exit_at_step=4")
    parent = "checkpoint.load_from=parent@4"
    run("smaller", end, parent, "training.global_batch_size=4", "training.exit_at_step=6")
    run("smaller", "training.train_steps=5", "training.global_batch_size=4", attempt=" shorter")
    run("smaller", end, parent, "training.global_batch_size=4", attempt=" resumed", ranks=2)
    blended = [end, "checkpoint.load_from=smaller@6", "training.global_batch_size=16", *both]
    run("blended", *blended, ranks=2)
    spiky = ("faults.spike.action=rewind", "faults.spike.window=8", "faults.spike.min_history=4",
             "faults.spike.loss_z=null", "faults.spike.grad_norm_z=500", "checkpoint.interval=1",
             "training.global_batch_size=4")  # fmt: skip
    leave = "training.exit_at_step=7"
    spiky += ("optimizer.begin_step=4", "optimizer.warmup_steps=2")
    run("rewound", end, parent, *spiky, leave, spike={"step": 7, "times": 1})
    run("rewound", end, parent, *spiky, attempt=" resumed")
    run("same", end, parent, "training.exit_at_step=6", ranks=2)
    run("parent", end, "training.exit_at_step=6", attempt=" resumed")
    run("base", end, parent, "model.rotary_base=500000")
    intended = "checkpoint.intended_changes=[model.rotary_base]"
    run("meant", end, parent, "model.rotary_base=500000", intended, "optimizer.lr=0.02",
        "training.exit_at_step=5")  # fmt: skip
    run("nothing", "training.train_steps=4", parent)
    run("weights", "training.train_steps=4", "checkpoint.load_from=runs/parent",
        "checkpoint.load_step=4", "checkpoint.load_weights_only=true", "training.exit_at_step=3",
        "training.global_batch_size=4", "training.batch_size_rampup=[2,1,4]")  # fmt: skip
    stage = ["training.train_steps=3", parent, "checkpoint.carry_over=[optimizer, data]",
             "training.global_batch_size=4", "optimizer.warmup_steps=1",
             "training.eval_test=true", "data.split=[0.9,0.05,0.05]"]  # fmt: skip
    run("stage", *stage, "training.exit_at_step=2")
    run("stage", *stage, attempt=" resumed")
    results = run_ranks(folder, corpus, 2, list(runs.values()))
    return folder, dict(zip(runs, results, strict=True))


def windows(result: dict[str, Any], samples: int) -> list[tuple[str, int]]:
    """Which windows of which file the first ``samples`` of a run were."""
    found = [(name, n) for name, n in result["read"]]
    return found[:samples]


def test_a_chain_reads_every_window_once(chain):
    """8 samples a step, then 4, resumed on two ranks, then 16 of two datasets."""
    folder, results = chain
    parent = windows(results["parent"][0], 32)
    smaller = windows(results["smaller"][0], 8)
    assert [n for _, n in parent + smaller] == list(range(40))
    resumed = [windows(rank, 4) for rank in results["smaller resumed"]]
    assert sorted(n for rank in resumed for _, n in rank) == list(range(40, 48))
    blended = [w for rank in results["blended"] for w in windows(rank, 16)]
    assert sorted(n for name, n in blended if name == "tiny.bin") == list(range(40, 56))
    assert sorted(n for name, n in blended if name == "other.bin") == list(range(16))
    log = log_of(folder, "blended")
    for line in (
        "  data      other.bin: new: starts at its first sample",
        "  data      tiny.bin: 40 samples taken (0.0",
        "  schedule  training.global_batch_size: 4 -> 16",
        "checkpoints/step_00000006.attempt-1, step 6, everything; what differs from it:",
    ):
        assert line in log, line
    assert "meaning" not in log and "samples taken (0.0" in log_of(folder, "smaller")


def test_a_rewind_of_such_a_run_leaves_its_own_batches_out(chain):
    """Global batches go on counting, and are of four samples now: batch 6 is windows 40 to 43."""
    folder, results = chain
    (rewound,), (resumed,) = results["rewound"], results["rewound resumed"]
    assert (rewound["code"], resumed["code"]) == (0, 0)
    log = log_of(folder, "rewound")
    assert "going back to step 6; global batches 6-6 are left out" in log
    assert [n for _, n in windows(rewound, 16)] == [*range(32, 44), *range(44, 48)]
    assert [n for _, n in windows(resumed, 4)] == list(range(48, 52))


def test_a_kept_step_counter_warms_up_again(chain):
    """Steps 5 and 6 are the warm-up, through a rewind; the decay to step 8 goes on."""
    folder, _ = chain
    found = {step: float(row["lr"]) for step, row in metrics(folder / "runs" / "rewound").items()}
    peak = found[6]
    assert found[5] == peak / 2 and peak > found[7] > found[8]


def test_where_nothing_changed_the_run_goes_on_as_the_other_would(chain):
    folder, results = chain
    assert [r[0]["code"] for r in (results["same"], results["parent resumed"])] == [0, 0]
    same, parent = (figures(folder / "runs" / name) for name in ("same", "parent"))
    assert all(
        float(a) == pytest.approx(float(b), rel=1e-5)
        for step in (5, 6)
        for a, b in zip(same[step], parent[step], strict=True)
    )
    prints = {(folder / "runs" / n / "data.sha256").read_text() for n in ("same", "parent")}
    assert len(prints) == 1
    assert (folder / "runs" / "smaller" / "data.sha256").read_text() not in prints


def test_another_model_is_not_trained(chain):
    folder, results = chain
    (result,) = results["base"]
    assert result["code"] == 2 and "model.rotary_base: 500000.0, but" in result["error"]
    assert not (folder / "runs" / "base" / "metrics.csv").exists()
    assert [rank["code"] for rank in results["meant"]] == [0]
    log = log_of(folder, "meant")
    assert "  meaning   model.rotary_base: 10000.0 -> 500000.0 (intended)\n" in log
    assert "  schedule  learning rate of step 5: 0.005" in log and " -> 0.01" in log


def test_nothing_to_do_is_no_success(chain):
    folder, results = chain
    assert [rank["code"] for rank in results["nothing"]] == [2]
    assert "training.train_steps: 4" in results["nothing"][0]["error"]
    assert not (folder / "runs" / "nothing" / "FINISHED").exists()
    (shorter,) = results["smaller shorter"]
    assert shorter["code"] == 2 and "5, but this run is at step 6 already" in shorter["error"]
    assert "finished" not in log_of(folder, "smaller").partition("step 7")[0]


def test_a_stage_counts_from_zero_and_reads_on(chain):
    """Moments and data go on; steps and schedule, with a warm-up of its own, begin."""
    folder, results = chain
    assert [n for _, n in windows(results["stage"][0], 8)] == list(range(32, 40))
    assert [n for _, n in windows(results["stage resumed"][0], 4)] == list(range(40, 44))
    log = log_of(folder, "stage")
    assert "step 4, weights and optimizer, data; what differs from it:" in log
    assert "  schedule  schedule starts anew: learning rate 0.01 at step 1" in log
    assert "took the weights and optimizer of step 4" in log
    assert re.search(r"test split: loss \d\.\d+ after step 3\n", log)


def test_weights_alone_start_everything_anew_and_say_so(chain):
    """Of an older checkpoint than the newest; the batch grows: 2, 3 and 4 samples."""
    folder, results = chain
    assert [n for _, n in windows(results["weights"][0], 12)] == list(range(9))
    log = log_of(folder, "weights")
    assert "step 4, weights only; what differs from it:" in log
    assert "  data      every dataset starts at its first sample" in log
    assert "  schedule  optimizer and schedule start anew: learning rate 0.005 at step 1" in log

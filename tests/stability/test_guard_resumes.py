"""What the guard did outlives a crash: real runs of two ranks, beside ones that nothing stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_ranks
from training_ranks import figures

from megatron_patch.stability import record

pytestmark = pytest.mark.multiprocess

# One small layer, whose gradient norm grows by half a step: `danger` at step 7, read after step 8.
SMALL = ["training.precision=bf16", "attention.backend=stable_flash", "attention.stabilizer=none",
         "model.num_layers=1", "model.num_attention_heads=2", "model.num_query_groups=2",
         "model.hidden_size=16", "model.ffn_hidden_size=16", "model.seq_length=16",
         "training.global_batch_size=2", "training.deterministic=true",
         "optimizer.schedule=constant", "optimizer.warmup_steps=0", "stability.interval=1",
         "checkpoint.keep_last=null"]  # fmt: skip
DANGER, SWITCHED = 7, 8
SWITCH = [*SMALL, "stability.guard=switch"]
SAVED = f"checkpoint.interval={DANGER}"
NAN = {"step": 10, "rank": None, "parameter": "decoder.final_layernorm.weight"}


@pytest.fixture(scope="module", autouse=True)
def worker() -> Any:
    """Ranks run this folder's worker."""
    patch = pytest.MonkeyPatch()
    patch.setattr(training_ranks, "WORKER", Path(__file__).parent / "worker.py")
    yield
    patch.undo()


def run(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    return {"set": [f"name={name}", *keys], "grow": 1.5, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


@pytest.fixture(scope="module")
def crashes(folder: Path, corpus: Path) -> dict[str, Any]:
    """Runs that end with an error in step 10, their newest checkpoint that of the danger."""
    end = "training.train_steps=11"
    plan = {
        "unbroken": run("unbroken", *SWITCH, end),
        "crashed": run("killed", *SWITCH, end, SAVED, nan=NAN),
        "killed": run("killed", *SWITCH, end, SAVED),
        "taken back": run("killed_back", *SWITCH, end, SAVED, nan=NAN),
        "warned": run("killed_back", *SMALL, end, SAVED),
        "elsewhere": run("other", *SWITCH, end, f"checkpoint.load_from=killed@{DANGER}"),
    }
    return dict(zip(plan, training_ranks.run_ranks(folder, corpus, 2, list(plan.values())),
                    strict=True))  # fmt: skip


def log_of(folder: Path, name: str) -> str:
    return (folder / "runs" / name / "train.log").read_text()


def weights(results: list[dict[str, Any]]) -> list[str]:
    return [rank["weights"] for rank in results]


def test_a_crash_at_the_checkpoint_of_the_danger_keeps_the_switch(
    crashes: Any, folder: Path
) -> None:
    """The checkpoint was saved before its record was read: only the record tells."""
    runs = folder / "runs"
    assert [r["code"] for name in ("crashed", "killed") for r in crashes[name]] == [3, 3, 0, 0]
    log = log_of(folder, "killed")
    assert f"resuming after step {DANGER} " in log
    assert f"it switched after step {SWITCHED}; stabilizer compensated since then" in log
    assert figures(runs / "killed") == figures(runs / "unbroken")
    assert weights(crashes["killed"]) == weights(crashes["unbroken"])
    a, b = record.read(runs / "killed"), record.read(runs / "unbroken")
    for name, values in a.scalars.items():
        np.testing.assert_array_equal(values, b.scalars[name], err_msg=name)


def test_another_guard_setting_wins_over_the_record(crashes: Any, folder: Path) -> None:
    assert [r["code"] for r in crashes["warned"]] == [0, 0]
    assert "stability.guard is warn now: attention is as configured" in log_of(
        folder, "killed_back"
    )
    told = record.read(folder / "runs" / "killed_back").scalars["switched"].tolist()
    assert told == [0.0] * (DANGER - 1) + [SWITCHED] + [0.0] * (11 - DANGER)


def test_a_run_that_starts_from_that_checkpoint_switches_as_well(
    crashes: Any, folder: Path
) -> None:
    found, unbroken = (figures(folder / "runs" / name) for name in ("other", "unbroken"))
    assert found == {step: unbroken[step] for step in range(DANGER + 1, 12)}

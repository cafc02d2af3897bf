"""What the guard did outlives a crash: real runs of two ranks, beside ones that nothing stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_ranks
from training_ranks import ONE_LAYER, figures, log_of

from megatron_patch.schema.problem import ConfigError
from megatron_patch.stability import guard, record

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("own_worker")]

# One small layer, whose first head is sick from step 6 on: `danger` at step 7, read after step 8.
SMALL = [*ONE_LAYER, "stability.rule.watch_logit=1.0e-9", "checkpoint.keep_last=null"]
DANGER, SWITCHED = 7, 8
SWITCH = [*SMALL, "stability.guard=switch"]
SAVED = f"checkpoint.interval={DANGER}"
NAN = {"step": 10, "rank": None, "parameter": "decoder.final_layernorm.weight"}
# Back from step 10 to a checkpoint from before the switch; the second time there is no rewind left.
BACK_TO = 6
REWIND = [*SWITCH, "training.train_steps=11", f"checkpoint.interval={BACK_TO}",
          "faults.spike.window=8", "faults.spike.min_history=4", "faults.spike.action=rewind",
          "faults.spike.loss_z=null", "faults.spike.grad_norm_z=500",
          "faults.spike.max_rewinds=1"]  # fmt: skip


def run(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    return {"set": [f"name={name}", *keys], "sick": 6, **more}


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


def weights(results: list[dict[str, Any]]) -> list[str]:
    return [rank["weights"] for rank in results]


def test_a_crash_at_the_checkpoint_of_the_danger_keeps_the_switch(crashes, folder):
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


def test_another_guard_setting_wins_over_the_record(crashes, folder):
    assert [r["code"] for r in crashes["warned"]] == [0, 0]
    assert "stability.guard is warn now: attention is as configured" in log_of(
        folder, "killed_back"
    )
    told = record.read(folder / "runs" / "killed_back").scalars["switched"].tolist()
    assert told == [0.0] * (DANGER - 1) + [SWITCHED] + [0.0] * (11 - DANGER)


def test_a_run_that_starts_from_that_checkpoint_switches_as_well(crashes, folder):
    found, unbroken = (figures(folder / "runs" / name) for name in ("other", "unbroken"))
    assert found == {step: unbroken[step] for step in range(DANGER + 1, 12)}


@pytest.fixture(scope="module")
def rewinds(folder: Path, corpus: Path) -> dict[str, Any]:
    """Runs that rewind behind the switch; one of them crashes before its next checkpoint."""
    guard_file = folder / "runs" / "anew" / guard.FILE
    guard_file.parent.mkdir(parents=True)
    guard.remember(guard_file.parent, 3)
    plan = {
        "unbroken": run("rewound", *REWIND, spike={"step": 10, "times": 1}),
        "crashed": run("rewound_killed", *REWIND, spike={"step": 10, "times": 2}),
        "resumed": run("rewound_killed", *REWIND),
        "anew": run("anew", *SWITCH, "training.train_steps=1"),
    }
    return dict(zip(plan, training_ranks.run_ranks(folder, corpus, 2, list(plan.values())),
                    strict=True))  # fmt: skip


def test_a_crash_after_a_rewind_keeps_the_switch(rewinds, folder):
    """No checkpoint has seen the switch: the file of the run directory tells of it."""
    runs = folder / "runs"
    assert [rewinds[name][0]["code"] for name in ("unbroken", "crashed", "resumed")] == [0, 7, 0]
    assert log_of(folder, "rewound_killed").count(f"resuming after step {BACK_TO} ") == 1
    assert figures(runs / "rewound_killed") == figures(runs / "rewound")
    assert weights(rewinds["resumed"]) == weights(rewinds["unbroken"])
    told = json.loads((runs / "rewound_killed" / guard.FILE).read_text())
    assert told == {"switched_at": BACK_TO}
    switched = record.read(runs / "rewound_killed").scalars["switched"].tolist()
    assert switched == [0.0] * BACK_TO + [BACK_TO] * (11 - BACK_TO)


def test_a_run_begun_anew_has_not_switched(rewinds, folder):
    assert "begins anew at step 0, without switched.json" in log_of(folder, "anew")
    assert not (folder / "runs" / "anew" / guard.FILE).exists()
    assert record.read(folder / "runs" / "anew").switched_at is None


@pytest.mark.parametrize(
    ("saved", "told", "step", "found"),
    [
        (0, 0, 5, 0),
        (4, 0, 5, 4),
        (6, 0, 5, 6),  # decided as the run stopped, one step ahead
        (0, 5, 5, 5),
        (6, 5, 5, 5),  # the same checkpoint, after a rewind to it
        (5, 5, 9, 5),  # a checkpoint after the rewind
        (0, 5, 3, 3),  # an older checkpoint, where that of the rewind is damaged
        (3, 5, 4, 3),  # and the one after it
        (0, 5, 0, 0),  # begun anew
    ],
)
def test_the_first_of_checkpoint_and_file_counts(saved, told, step, found):
    assert guard.in_force_from(saved, told, step=step) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"switched_at": 0}', '{"switched_at": "4"}'])
def test_a_damaged_file_is_not_guessed_at(tmp_path, text):
    assert guard.recall(tmp_path) == 0
    guard.remember(tmp_path, 40)
    assert guard.recall(tmp_path) == 40
    (tmp_path / guard.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"switched.json: .*put the right one back"):
        guard.recall(tmp_path)

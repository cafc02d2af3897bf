"""At a danger the trainer pins the checkpoint to go back to: real runs of two ranks, and parts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import telemetry_records
import training_ranks
from training_ranks import ONE_LAYER, log_of

from megatron_patch.checkpoint import inspect, pinned
from megatron_patch.checkpoint.store import CheckpointStore
from megatron_patch.stability import record
from megatron_patch.training.saver import Saver

# One small layer, whose first head is sick from step 6 on: `watch` at step 6, `danger` at 7, read
# after step 8 and before it is saved. By then 4 and 6 are there; 4 is from before the signs.
SMALL = [*ONE_LAYER, "training.train_steps=17", "checkpoint.interval=2", "checkpoint.keep_last=2"]
DANGER = 7
PINNED = {"step_00000004.attempt-1": "danger at step 7, signs since step 6"}
BACK = "attention.stabilizer=compensated"


def run(name: str, *keys: str) -> dict[str, Any]:
    return {"set": [f"name={name}", *SMALL, *keys], "sick": 6}


def at(step: int) -> str:
    return f"training.exit_at_step={step}"


def root(folder: Path, name: str) -> Path:
    return folder / "runs" / name / "checkpoints"


def steps(folder: Path, name: str) -> list[int]:
    return sorted(int(p.name[5:13]) for p in root(folder, name).glob("step_*"))


@pytest.fixture(scope="module")
def runs(own_worker: None, folder: Path, corpus: Path) -> dict[str, Any]:
    """The last of them goes back to the pinned one, and takes the remedy."""
    plan = {
        "first": run("warn", "stability.guard=warn", at(9)),
        "resumed": run("warn", "stability.guard=warn", at(13)),
        "stop": run("stop", "stability.guard=stop"),
    }
    found = training_ranks.run_ranks(folder, corpus, 2, list(plan.values()))
    left = steps(folder, "warn")
    inspect.roll_back(root(folder, "warn"), "4")
    back = training_ranks.run_ranks(folder, corpus, 2, [run("warn", BACK, at(11))])
    return {**dict(zip(plan, found, strict=True)), "left": left, "back": back[0]}


@pytest.mark.multiprocess
def test_it_is_there_at_the_end_and_after_a_resume(runs, folder):
    assert [rank["code"] for name in ("first", "resumed") for rank in runs[name]] == [0] * 4
    assert runs["left"] == [4, 12, 13]
    assert pinned.read(root(folder, "warn")) == PINNED
    told = "step_00000004.attempt-1 is pinned: the newest from before the signs that led to danger"
    assert log_of(folder, "warn").count(f"{told} at step {DANGER}; to go back to it") == 1


@pytest.mark.multiprocess
def test_going_back_to_it_works_and_keeps_it(runs, folder):
    assert [rank["code"] for rank in runs["back"]] == [0, 0]
    assert "resuming after step 4 " in log_of(folder, "warn")
    assert record.read(folder / "runs" / "warn").meta["attention"] == "stable_flash/compensated"
    assert steps(folder, "warn") == [4, 10, 11]
    assert pinned.read(root(folder, "warn")) == PINNED


@pytest.mark.multiprocess
def test_a_run_that_the_guard_stops_has_it(runs, folder):
    assert [rank["code"] for rank in runs["stop"]] == [5] * 2
    assert steps(folder, "stop") == [4, 6, 8] and pinned.read(root(folder, "stop")) == PINNED


@pytest.mark.slow
@pytest.mark.multiprocess
def test_whatever_the_guard_does_and_however_it_saves(own_worker, folder, corpus):
    plan = {
        "switch": run("switch", "stability.guard=switch", at(13)),
        "background": run("background", "checkpoint.async_save=true", at(13)),
        "off": run("off", "stability.guard=off", at(13)),
    }
    found = training_ranks.run_ranks(folder, corpus, 2, list(plan.values()))
    assert [rank["code"] for ranks in found for rank in ranks] == [0] * 6
    for name in ("switch", "background"):
        assert steps(folder, name) == [4, 12, 13] and pinned.read(root(folder, name)) == PINNED
    # Without a guard nobody judges.
    assert steps(folder, "off") == [12, 13]
    assert not (root(folder, "off") / pinned.FILE).exists()


@pytest.mark.parametrize(
    ("levels", "danger", "began"),
    [
        ([0, 0, 0], 40, 40),  # no watch before it
        ([0, 1, 1], 40, 20),
        ([1, 0, 1], 40, 10),  # flickers
        ([1, *[0] * 21, 1], 240, 230),  # a calm
        ([1, 1, 1], 40, 10),
        ([0, 1, 2, 2], 40, 20),  # one that is not the first
        ([0, 1, 2, 0, 0], 35, 20),  # records after it do not count
        ([], 40, 40),
    ],
)
def test_where_the_signs_began(tmp_path, levels, danger, began):
    writer = telemetry_records.write(tmp_path, [])
    for i, level in enumerate(levels):
        scalars = {"level": level, "loss_mean": 3.0, "grad_norm_mean": 0.3}
        heads, layers = telemetry_records.heads(0.0), {"grad_norm": np.ones(telemetry_records.L)}
        writer.write(10 * (i + 1), scalars=scalars, layers=layers, heads=heads)
    writer.close()
    meta = tmp_path / "stability" / "meta.json"
    told = json.loads(meta.read_text())
    meta.write_text(json.dumps(told))
    assert record.read(tmp_path).signs_began(danger) == began


def test_signs_are_looked_for_as_far_back_as_it_matters(tmp_path):
    writer = telemetry_records.write(tmp_path, [])
    for step in range(10, 100, 10):
        heads, layers = telemetry_records.heads(0.0), {"grad_norm": np.ones(telemetry_records.L)}
        writer.write(step, scalars={"level": 1.0}, layers=layers, heads=heads)
    writer.close()
    found = record.read(tmp_path)
    assert [found.signs_began(100, until=until) for until in (0, 35, 200)] == [10, 30, 90]


@pytest.fixture
def saver(tmp_path: Path) -> Any:
    """Of a run with two checkpoints and no records; its store, and what it says."""
    said: list[str] = []
    store = CheckpointStore(tmp_path)
    for step in (5, 10):
        attempt = store.begin(step)
        (attempt.path / "__0_0.distcp").write_bytes(b"shard")
        store.commit(attempt, store.hash_files(attempt, ["__0_0.distcp"]), {})
    config = SimpleNamespace(name="a", run_dir=str(tmp_path), directory=tmp_path)
    made = Saver(
        SimpleNamespace(store=store, run=config),  # type: ignore[arg-type]
        SimpleNamespace(say=said.append),  # type: ignore[arg-type]
    )
    return SimpleNamespace(saver=made, store=store, said=said)


def test_without_records_it_is_one_from_before_the_danger(saver):
    saver.saver.keep_before_danger(10)
    kept = "danger at step 10, signs since step 10"
    assert pinned.read(saver.store.root) == {"step_00000005.attempt-1": kept}


def at_danger(saver: Any, monkeypatch: pytest.MonkeyPatch, step: int, began: int) -> list[str]:
    """What is kept after a danger whose signs began there."""
    found = SimpleNamespace(signs_began=lambda danger, until: max(began, min(danger, until)))
    monkeypatch.setattr(record, "read", lambda path: found)
    saver.saver.keep_before_danger(step)
    return sorted(pinned.read(saver.store.root))


def test_a_release_holds_until_the_next_start(saver, monkeypatch):
    assert at_danger(saver, monkeypatch, 12, 11) == ["step_00000010.attempt-1"]
    (saver.store.root / pinned.FILE).unlink()
    assert at_danger(saver, monkeypatch, 13, 11) == []


def test_one_danger_after_another(saver, monkeypatch):
    """While its signs last nothing is looked up again; after a calm, or a rewind, it is."""
    first, second = "step_00000005.attempt-1", "step_00000010.attempt-1"
    assert at_danger(saver, monkeypatch, 12, 8) == [first]
    asked: list[int] = []
    names = lambda: asked.append(1) or [second, first]  # noqa: E731
    monkeypatch.setattr(saver.store.directory, "complete_names", names)
    assert at_danger(saver, monkeypatch, 13, 8) == [first] and not asked
    assert at_danger(saver, monkeypatch, 40, 39) == [first, second] and asked == [1]
    assert at_danger(saver, monkeypatch, 41, 39) == [first, second] and asked == [1]
    reload = SimpleNamespace(step=10)
    for name in ("abandon_after", "reload"):
        setattr(saver.saver.checkpointer, name, lambda *_: reload)
    saver.saver.back_to = 10
    saver.saver.rewind(10, lambda step: None)
    assert at_danger(saver, monkeypatch, 41, 39) == [first, second] and asked == [1, 1]


def test_a_failure_is_told_and_tried_again(saver, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pinned, "write", full)
        saver.saver.keep_before_danger(10)
    (line,) = saver.said
    assert line.startswith("warning: no checkpoint from before the danger is pinned: [Errno 28]")
    (saver.store.root / pinned.FILE).write_text("step_0")
    for _ in range(3):  # once, not at every record
        saver.saver.keep_before_danger(10)
    assert len(saver.said) == 2 and "pinned: " in saver.said[1]
    (saver.store.root / pinned.FILE).write_text("")
    saver.saver.keep_before_danger(11)
    assert pinned.read(saver.store.root) == {
        "step_00000010.attempt-1": "danger at step 11, signs since step 11"
    }


def test_only_the_first_rank_keeps(saver):
    saver.store.ranks.rank = 1
    saver.saver.keep_before_danger(10)
    assert not (saver.store.root / pinned.FILE).exists()

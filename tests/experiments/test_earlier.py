"""Which of several attempts at a run counts, and that none of the others disappears."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from megatron_patch.experiments import archive, results, stability
from megatron_patch.experiments import publish as publishing
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.preconditions import combined
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.publish import Target, publish
from megatron_patch.experiments.stability import Request
from megatron_patch.experiments.store import Store, set_aside

GPU = {"gpu": "NVIDIA H200", "torch": "2.11.0"}
WEIGHTS = {"w": "1"}


def machine(
    out: Path,
    protocol: Path,
    steps: int,
    state: str,
    *,
    loss: float = 4.0,
    environment: dict[str, str] = GPU,
    weights: dict[str, str] = WEIGHTS,
) -> Path:
    """A directory with one attempt at a-s1, of ``steps`` steps."""
    store = Store(out, read(protocol))
    folder = store.run_dir(store.experiment.by_id("a-s1"))
    folder.mkdir(parents=True)
    text = "".join(f"{step},{loss - step / 1000},0.3\n" for step in range(1, steps + 1))
    (folder / "metrics.csv").write_text(f"step,loss,grad_norm\n{text}")
    (out / "reference").mkdir(exist_ok=True)
    shared = {"weights": weights, "weights_sha256": combined(weights), "environment": environment}
    (out / "reference" / "seed_1.json").write_text(json.dumps(shared))
    store.states["a-s1"].state = state
    store.save()
    store.close()
    return out


def published(out: Path, protocol: Path, folder: Path) -> list[tuple[str, str, int]]:
    """(entry, state, steps) of the attempts at a-s1 in the results, after ``out`` has added its."""
    store = Store(out, read(protocol))
    list(publish(store, Target(folder=folder)))
    store.close()
    result = json.loads((folder / "tiny.json").read_text())
    found = [run for run in result["runs"] if run["cell"] == "a" and run["seed"] == 1]
    curves = (folder / "tiny.csv").read_text()
    assert all(f"{run['run']},a,1," in curves for run in found)
    return [(run["run"], run["state"], run["steps"]) for run in found]


@pytest.mark.parametrize("cut_first", [True, False])
def test_an_end_counts_before_a_longer_cut(protocol: Path, tmp_path: Path, cut_first: bool) -> None:
    ends = machine(tmp_path / "ends", protocol, 60, "exploded")
    cut = machine(tmp_path / "cut", protocol, 90, "paused", loss=5.0)
    docs = tmp_path / "docs"
    order = [cut, ends] if cut_first else [ends, cut]
    for out in (*order, *order):  # twice: nothing is counted twice
        found = published(out, protocol, docs)
    assert found[0] == ("a-s1", "exploded", 60)
    assert [entry[1:] for entry in found[1:]] == [("repeated", 90)]
    # From a directory that has neither.
    (empty := tmp_path / "empty").mkdir()
    assert published(empty, protocol, docs) == found


@pytest.mark.parametrize("cut_first", [True, False])
def test_an_end_counts_before_a_longer_cut_in_archives_too(
    protocol: Path, tmp_path: Path, cut_first: bool
) -> None:
    ends = machine(tmp_path / "ends", protocol, 60, "exploded")
    cut = machine(tmp_path / "cut", protocol, 90, "paused", loss=5.0)
    for out in (ends, cut):
        list(archive.pack(out, tmp_path / f"{out.name}.zips", files=1, limit=1 << 20))
    home = tmp_path / "home"
    order = [cut, ends] if cut_first else [ends, cut]
    for out in (*order, *order):
        list(archive.unpack(list((tmp_path / f"{out.name}.zips").iterdir()), home))
    found = published(home, protocol, tmp_path / "docs")
    assert found == [("a-s1", "exploded", 60), ("a-s1.replaced_1", "repeated", 90)]


def test_the_beginning_of_an_attempt_is_none_of_its_own(protocol: Path, tmp_path: Path) -> None:
    """A copy made in the middle of a window, before the machine's records came home whole."""
    docs = tmp_path / "docs"
    published(machine(tmp_path / "1", protocol, 37, "waiting"), protocol, docs)
    found = published(machine(tmp_path / "2", protocol, 90, "paused"), protocol, docs)
    assert found == [("a-s1", "paused", 90)]


def test_what_a_job_has_begun_again_is_told_once(protocol: Path, tmp_path: Path) -> None:
    """A run that died without a checkpoint, and then came to a worse end sooner."""
    docs, out = tmp_path / "docs", machine(tmp_path / "1", protocol, 40, "paused")
    published(out, protocol, docs)
    set_aside(out / "runs" / "a-s1")
    machine(out, protocol, 25, "non-finite", loss=5.0)
    assert published(out, protocol, docs) == [
        ("a-s1", "non-finite", 25),
        ("a-s1.replaced_1", "repeated", 40),
    ]
    (shorter,) = (
        r for r in json.loads((docs / "tiny.json").read_text())["runs"] if "repeat_of" in r
    )
    assert shorter["reason"].endswith("has taken its place"), "it was the longer one"


def test_what_was_kept_stays_however_often_results_are_written(
    protocol: Path, tmp_path: Path
) -> None:
    """Rows that a version kept which named no job are not this job's."""
    docs = tmp_path / "docs"
    published(machine(tmp_path / "1", protocol, 90, "paused"), protocol, docs)
    file = docs / "tiny.json"
    result = json.loads(file.read_text())
    del result["job"]
    next(run for run in result["runs"] if run["run"] == "a-s1")["kept"] = GPU
    file.write_text(json.dumps(result))
    out = machine(tmp_path / "2", protocol, 60, "exploded", loss=5.0)
    for _ in range(3):
        found = published(out, protocol, docs)
        assert found == [("a-s1", "exploded", 60), ("a-s1.attempt_1", "repeated", 90)]


def test_an_attempt_keeps_its_name_however_often_results_are_written(
    protocol: Path, tmp_path: Path
) -> None:
    docs = tmp_path / "docs"
    published(machine(tmp_path / "1", protocol, 90, "paused"), protocol, docs)
    second = machine(tmp_path / "2", protocol, 25, "paused", loss=9.0)
    for _ in range(3):
        found = published(second, protocol, docs)
        assert found == [("a-s1", "paused", 90), ("a-s1.attempt_1", "repeated", 25)]


def test_what_this_job_wrote_and_lost_stays(protocol: Path, tmp_path: Path) -> None:
    """Its archives came home from an earlier moment than its results."""
    docs, out = tmp_path / "docs", machine(tmp_path / "1", protocol, 90, "paused")
    published(out, protocol, docs)
    shutil.rmtree(out / "runs" / "a-s1")
    machine(out, protocol, 60, "paused")
    assert published(out, protocol, docs)[0] == ("a-s1", "paused", 90)


def test_curves_of_another_time_are_nobodys(protocol: Path, tmp_path: Path) -> None:
    """A writer was killed between its two files, when another attempt had come to count.

    Both attempts have a curve under the same name, and the row got that of the other one, for good.
    """
    folder = tmp_path / "folder"
    published(machine(tmp_path / "a", protocol, 90, "paused"), protocol, folder)
    before = (folder / "tiny.csv").read_bytes()
    b = machine(tmp_path / "b", protocol, 60, "exploded", loss=9.0)
    published(b, protocol, folder)
    (folder / "tiny.csv").write_bytes(before)
    other = Store(tmp_path / "c", read(protocol))
    list(publish(other, Target(folder=folder)))
    other.close()
    result = json.loads((folder / "tiny.json").read_text())
    rows = {run["run"]: run for run in result["runs"] if run["cell"] == "a" and run["steps"]}
    assert {name: run["steps"] for name, run in rows.items()} == {"a-s1": 60, "a-s1.attempt_1": 90}
    lines = [line.split(",") for line in (folder / "tiny.csv").read_text().splitlines()]
    assert {line[0] for line in lines[1:]} == {"a-s1.attempt_1"}
    assert rows["a-s1"]["curve_lost"] and "curve_lost" not in rows["a-s1.attempt_1"]
    assert "Their curves are lost" in results.markdown(result)


def test_another_gpu_is_named_and_other_software_refused(protocol: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    published(machine(tmp_path / "1", protocol, 90, "paused"), protocol, docs)
    other = GPU | {"gpu": "NVIDIA H100"}
    out = machine(tmp_path / "2", protocol, 60, "exploded", loss=5.0, environment=other)
    for _ in range(2):
        assert published(out, protocol, docs) == [
            ("a-s1", "exploded", 60),
            ("a-s1.attempt_1", "repeated", 90),
        ]
    told = (out / "results" / "verdicts.md").read_text()
    assert "records are not here: a-s1.attempt_1 (gpu NVIDIA H200)." in told
    newer = GPU | {"torch": "2.12.0"}
    third = machine(tmp_path / "3", protocol, 30, "paused", loss=6.0, environment=newer)
    with pytest.raises(ExperimentError, match="another weights, batches or software of seed 1"):
        published(third, protocol, docs)


def test_a_machine_whose_first_run_normalizes_queries_and_keys_is_no_other(
    protocol: Path, tmp_path: Path
) -> None:
    """It has weights that the first runs of other machines have not (`preconditions.ADDED_BY`)."""
    docs, normed = tmp_path / "docs", WEIGHTS | {"layers.0.q_layernorm.weight": "2"}
    published(machine(tmp_path / "1", protocol, 90, "paused"), protocol, docs)
    out = machine(tmp_path / "2", protocol, 60, "paused", loss=5.0, weights=normed)
    whole = [("a-s1", "paused", 90), ("a-s1.attempt_1", "repeated", 60)]
    assert published(out, protocol, docs) == whole
    third = machine(tmp_path / "3", protocol, 30, "paused", loss=6.0)
    assert sorted(published(third, protocol, docs)) == [*whole, ("a-s1.attempt_2", "repeated", 30)]
    wrong = machine(tmp_path / "4", protocol, 9, "paused", weights=normed | {"w": "2"})
    with pytest.raises(ExperimentError, match="another weights, batches or software of seed 1"):
        published(wrong, protocol, docs)
    list(archive.pack(out, tmp_path / "zip", files=1, limit=1 << 20))
    for target, said in ((third, "taken, to step 60"), (wrong, "seed_1.json differs")):
        try:
            text = " ".join(archive.unpack(sorted((tmp_path / "zip").iterdir()), target))
        except ExperimentError as error:
            text = str(error)
        assert said in text


@pytest.mark.parametrize("text", ["{}", '{"environment": []}', '{"environment": {}, "weights": 5}'])
def test_a_damaged_reference_is_told_where_results_are_made(
    protocol: Path, tmp_path: Path, text: str
) -> None:
    out = machine(tmp_path / "1", protocol, 30, "paused")
    (out / "reference" / "seed_1.json").write_text(text)
    with pytest.raises(ExperimentError, match=r"seed_1.json is damaged \(no fingerprint"):
        published(out, protocol, tmp_path / "docs")


def test_a_run_that_fails_beside_an_earlier_result_is_not_passed_over(
    protocol: Path, tmp_path: Path, quick: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    docs = tmp_path / "docs"
    published(machine(tmp_path / "1", protocol, 60, "paused"), protocol, docs)
    quick["a-s1"] = "exit 2"
    asked = Request(
        config=protocol, out=tmp_path / "2", gpus=1, minutes=None, steps=None, only=["a-s1"],
        overrides=[], target=Target(folder=docs),
    )  # fmt: skip
    assert stability.run(asked) == 1
    assert "a-s1 refused: exit code 2: Error: what went wrong" in capsys.readouterr().err
    result = json.loads((docs / "tiny.json").read_text())
    assert {run["run"]: run["steps"] for run in result["runs"]}["a-s1"] == 60


def test_jobs_that_write_at_the_same_time_keep_each_others_rows(
    protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the results before either writes them, unless one waits for the other."""
    docs = tmp_path / "docs"
    outs = [machine(tmp_path / name, protocol, 60, "paused", loss=loss)
            for name, loss in (("1", 4.0), ("2", 5.0))]  # fmt: skip
    both, write = threading.Barrier(2), results.write

    def slow(*args: object) -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1.0)
        return write(*args)

    monkeypatch.setattr(publishing.results, "write", slow)
    monkeypatch.setattr(results, "draw", lambda *_, **__: None)  # pyplot is of one thread
    jobs = [threading.Thread(target=published, args=(out, protocol, docs)) for out in outs]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    found = json.loads((docs / "tiny.json").read_text())["runs"]
    assert [run["run"] for run in found if run["steps"]] == ["a-s1", "a-s1.attempt_1"]


def test_a_folder_that_stays_locked_is_written_and_that_is_said(
    protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs := tmp_path / "docs").mkdir()
    monkeypatch.setattr(publishing, "WAIT_SECONDS", 0.0)
    handle = os.open(docs, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    store = Store(machine(tmp_path / "1", protocol, 60, "paused"), read(protocol))
    said = list(publish(store, Target(folder=docs)))
    store.close()
    os.close(handle)
    assert len(said) == 1 and "another process has been writing results into" in said[0]
    assert (docs / "tiny.json").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"runs": [1]}, "a run that is none: 1"),
        ({"runs": [{"run": "a-s1"}]}, "KeyError: 'cell'"),
        ({"environment": 3}, "environment is no mapping"),
        ({"fingerprints": ["1"]}, "fingerprints is no mapping"),
        ({"steps": "60"}, "a run that is none: {"),
        ({"exploded_at": None}, "a-s1 has no exploded_at"),
    ],
)
def test_results_that_are_damaged_inside_are_refused(
    protocol: Path, tmp_path: Path, change: dict, said: str
) -> None:
    docs, out = tmp_path / "docs", machine(tmp_path / "1", protocol, 60, "paused")
    published(out, protocol, docs)
    result = json.loads((docs / "tiny.json").read_text())
    row = result["runs"][0]
    if "steps" in change:
        row |= change
    elif "exploded_at" in change:
        del row["exploded_at"]
    else:
        result |= change
    (docs / "tiny.json").write_text(json.dumps(result))
    with pytest.raises(ExperimentError, match="cannot be read as results") as refused:
        published(out, protocol, docs)
    assert said in str(refused.value)


def test_results_stay_in_the_experiment_where_they_can_be_published_no_more(
    protocol: Path, tmp_path: Path, quick: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    """The folder was another's meanwhile, or its file system has gone."""
    docs, out = tmp_path / "docs", tmp_path / "out"

    def spoil() -> None:
        while not (out / "runs" / "a-s1" / "metrics.csv").exists():
            time.sleep(0.01)
        docs.mkdir(exist_ok=True)
        (docs / "tiny.json").write_text("of another program")

    other = threading.Thread(target=spoil)
    other.start()
    asked = Request(
        config=protocol, out=out, gpus=1, minutes=None, steps=None, only=["a-s1"],
        overrides=[], target=Target(folder=docs),
    )  # fmt: skip
    with pytest.raises(ExperimentError, match="cannot be read as results"):
        stability.run(asked)
    other.join()
    assert "| a | 1 | finished |" in (out / "results" / "verdicts.md").read_text()
    assert "results in " in capsys.readouterr().out

"""An experiment done in several short jobs, on machines that do not outlive them.

What is copied out (`--results-dir`, `--archives`) is all that is left of a machine; a later job
starts its runs anew elsewhere; the records of all of them are put together and judged at home. With
stand-ins for the trainer (conftest.py), so that steps take milliseconds.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from telemetry_records import heads, write

from megatron_patch.experiments import archive, origin, publish, results, stability
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.publish import Target
from megatron_patch.experiments.stability import Request
from megatron_patch.experiments.store import Store

Go = Callable[..., tuple[Store, list[str]]]


def states(store: Store) -> dict[str, str]:
    return {name: state.state for name, state in store.states.items()}


def request(protocol: Path, out: Path, **changes: object) -> Request:
    fields: dict = {
        "config": protocol,
        "out": out,
        "gpus": 2,
        "minutes": None,
        "steps": None,
        "only": [],
        "overrides": [],
    }
    return Request(**fields | changes)


def test_jobs_on_machines_that_are_lost(
    protocol: Path,
    tmp_path: Path,
    quick: dict[str, str],
    capsys: pytest.CaptureFixture,
) -> None:
    """Three jobs: two on one machine, which is lost, one on another; one result."""
    copied = tmp_path / "copied"
    machine = tmp_path / "machine_1"
    target = Target(folder=copied / "1", archives=2)
    quick["pause"] = "0.05"
    target.folder.mkdir(parents=True)
    first = request(protocol, machine, minutes=3.0 / 60, only=["a-s1", "b-s1"], target=target)
    assert stability.run(first) == 0
    said = capsys.readouterr().out
    assert "| a | 1 | paused | 0 |" in said and "Never started: a-s2" in said
    assert "Cut before their last step" in said and "not by" in said
    job = json.loads((machine / "experiment.json").read_text())["job"]
    assert sorted(p.name for p in target.folder.iterdir()) == sorted(
        [f"tiny.{job}.0.zip", "tiny.csv", "tiny.json", "tiny.png"]
    )
    (target.folder / f"tiny.{job}.5.zip").write_bytes(b"of a time when there was more")
    cut = json.loads((target.folder / "tiny.json").read_text())
    steps = {run["run"]: run["steps"] for run in cut["runs"]}
    assert 0 < steps["a-s1"] < 100 and steps["a-s2"] == 0
    # The same machine again: it goes on from its checkpoints.
    quick["pause"] = "0.001"
    assert stability.run(request(protocol, machine, only=["a-s1"], target=target)) == 0
    assert "from its checkpoint" in capsys.readouterr().out
    # The machine and all that was not copied out is gone; another one does the rest.
    shutil.rmtree(machine)
    other = Target(folder=copied / "2", archives=2)
    rest = request(protocol, tmp_path / "machine_2", only=["a-s2", "b-s1"], target=other)
    assert stability.run(rest) == 0
    capsys.readouterr()
    home = tmp_path / "home"
    for job in ("1", "2"):
        told = list(archive.unpack(sorted((copied / job).glob("*.zip")), home))
    assert "b-s1: taken, to step 100" in told and "a-s2: taken, to step 100" in told
    docs = tmp_path / "docs"
    shown = request(protocol, home, target=Target(folder=docs))
    assert stability.show(shown) == 0
    table = capsys.readouterr().out
    for row in ("| a | 1 | finished |", "| b | 1 | finished |", "| a | 2 | finished |"):
        assert row in table
    assert "Never started" not in table and "Cut off" not in table
    assert (docs / "tiny.json").exists() and not list(docs.glob("*.zip"))
    curves = (docs / "tiny.csv").read_text()
    assert {line.split(",")[0] for line in curves.splitlines()[1:]} == {"a-s1", "b-s1", "a-s2"}


def test_another_attempt_at_a_run_is_reported_too(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """One that came to its end counts before one that was cut; none disappears."""
    for name, script, steps in (("1", "explode", 100), ("2", "", 100)):
        quick |= {"a-s1": script, "pause": "0.002"}
        store, _ = go(protocol, tmp_path / name, only={"a-s1"}, steps=steps)
        list(archive.pack(store.path, tmp_path / f"zip{name}", files=1, limit=1 << 20))
    for order in (("1", "2"), ("2", "1")):
        home = tmp_path / f"home{order[0]}"
        for name in (*order, *order):  # twice: nothing is counted twice
            list(archive.unpack(sorted((tmp_path / f"zip{name}").glob("*.zip")), home))
        store = Store(home, read(protocol))
        found = results.collect(store, {r.id: store.rows(r) for r in store.experiment.runs})
        store.close()
        attempts = [run for run in found["runs"] if run["cell"] == "a" and run["seed"] == 1]
        assert len(attempts) == 2
        assert sorted(str(run["exploded_at"]) for run in attempts) == ["50", "None"]
        assert "| repeated |" in results.markdown(found)


def test_records_of_other_commits_can_be_merged_and_say_so(protocol: Path, tmp_path: Path) -> None:
    ends = {}
    for name, commit, run in (("a", "1" * 40, "a-s1"), ("b", "2" * 40, "b-s1")):
        ends[name] = tmp_path / name
        store = Store(ends[name], read(protocol))
        store.save()
        store.close()
        facts = json.dumps({"environment": {"gpu": "H200", "commit": commit}})
        folder = ends[name] / "runs" / run
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("step,loss,grad_norm\n1,4.0,0.3\n")
        (folder / "experiment.json").write_text(facts)
        (ends[name] / "reference").mkdir()
        (ends[name] / "reference" / "seed_1.json").write_text(facts)
        list(archive.pack(ends[name], tmp_path / f"zip_{name}", files=1, limit=1 << 20))
    list(archive.unpack(list((tmp_path / "zip_a").glob("*.zip")), ends["b"]))
    store = Store(ends["b"], read(protocol))
    found = results.collect(store, {r.id: store.rows(r) for r in store.experiment.runs})
    store.close()
    assert {run["run"]: run["commit"] for run in found["runs"]} == {
        "a-s1": "1" * 40, "b-s1": "2" * 40, "a-s2": None,
    }  # fmt: skip
    assert "commits 111111111111, 222222222222" in results.markdown(found)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a plot")])
def test_copies_in_between_do_not_end_the_runs(
    protocol: Path,
    tmp_path: Path,
    quick: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    error: Exception,
) -> None:
    from megatron_patch.experiments import runner

    monkeypatch.setattr(runner, "PUBLISH_SECONDS", 0.05)
    whole = publish.publish
    calls = []

    def full(store: Store, target: Target) -> list[str]:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return list(whole(store, target))

    monkeypatch.setattr(publish, "publish", full)
    quick["pause"] = "0.02"
    target = Target(folder=tmp_path / "copies", archives=1)
    assert stability.run(request(protocol, tmp_path / "out", only=["a-s1"], target=target)) == 0
    assert len(calls) > 1
    assert "warning: results could not be copied" in capsys.readouterr().out


def test_a_directory_without_locks_is_said(
    protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    store = Store(tmp_path / "out", read(protocol))
    store.close()
    assert len(store.notes) == 1 and "has no locks (Operation not supported)" in store.notes[0]


def test_what_is_trained_cannot_change_behind_the_protocol(protocol: Path, tmp_path: Path) -> None:
    """A key of the trainer configuration itself is in no line of the protocol."""
    config = next(line for line in protocol.read_text().splitlines() if line.startswith("config: "))
    source = Path(config.removeprefix("config: "))
    own = protocol.with_name(source.name)
    own.write_text(source.read_text())
    protocol.write_text(protocol.read_text().replace(config, f"config: {own.name}"))
    Store(tmp_path / "out", read(protocol)).close()
    good = own.read_text()
    own.write_text(good.replace("lr: 1.0e-3", "lr: 2.0e-3"))
    with pytest.raises(ExperimentError, match="--out"):
        Store(tmp_path / "out", read(protocol))
    for section in ("stability:\n  guard: stop\n", "faults:\n  spike:\n    action: skip\n"):
        own.write_text(good + section)
        with pytest.raises(ExperimentError, match="--out"):
            Store(tmp_path / "out", read(protocol))
    own.write_text(good + "stability:\n  danger_growth: 1.4\n")  # nothing acts on it
    Store(tmp_path / "out", read(protocol)).close()
    # What was written before a fact was kept says nothing about it.
    file = tmp_path / "out" / "experiment.json"
    old = json.loads(file.read_text())
    for run in old["runs"].values():
        del run["reactions"]
    file.write_text(json.dumps(old))
    own.write_text(good + "stability:\n  guard: stop\n")
    Store(tmp_path / "out", read(protocol)).close()


RESCUE = """\
cells:
  - {name: base, set: [checkpoint.interval=10, checkpoint.keep_last=null]}
  - {name: early, from_cell: base, before: 25, follow: 40}
  - {name: late, from_cell: base, before: -10, follow: 50}
  - {name: other, from_cell: base, before: 5000}
"""


@pytest.fixture
def rescue(protocol: Path) -> Path:
    """A base that explodes after step 40, and runs that continue it."""
    head = protocol.read_text().split("cells:")[0].replace("seeds: [1, 2]", "seeds: [1]")
    protocol.write_text(head.replace("stop_after: 30", "stop_after: 60, grad_norm: 1.0") + RESCUE)
    return protocol


def test_runs_that_continue_another_one(
    rescue: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """They start beside the base as soon as it has shown its event, and end as they were told."""
    quick |= {"base-s1": "explode", "pause": "0.01"}
    store, said = go(rescue, tmp_path / "out", devices=[0, 1])
    found = {run.id: store.states[run.id] for run in store.experiment.runs}
    assert found["base-s1"].state == "exploded"
    # Windows of ten steps: the event is at 50, checkpoints are at 10, 20, ...
    assert found["early-s1"].origin == {"base": "base-s1", "event": 50, "step": 20}
    assert found["late-s1"].origin == {"base": "base-s1", "event": 50, "step": 60}
    assert found["early-s1"].state == found["late-s1"].state == "finished"
    assert "no checkpoint at step -4,950" in found["other-s1"].reason
    assert found["other-s1"].state == "waiting"
    started = [line for line in said if line.startswith("start")]
    assert any("from step 20 of base-s1 (event at 50)" in line for line in started)
    # The second GPU was not kept waiting for the base to end.
    order = [line for line in said if line.startswith(("start early", "base-s1 is"))]
    assert order[0].startswith("start early")
    rows = {run.id: store.rows(run) for run in store.experiment.runs}
    assert [int(r["step"]) for r in rows["early-s1"]] == list(range(21, 91))
    table = results.markdown(results.collect(store, rows))
    assert "| early | 1 | 50 | continued | 30 before | yes |" in table
    assert "| late | 1 | 50 | continued | 10 after | yes |" in table
    assert [a["from_step"] for a in found["late-s1"].attempts] == [60]
    # Quiet for four windows, but not beyond what it had to survive.
    store.states["early-s1"].origin = {"base": "base-s1", "event": 60, "step": 20}
    table = results.markdown(results.collect(store, rows))
    assert "| early | 1 | 60 | continued | 40 before | too short to say |" in table
    store.states["early-s1"].origin = {"base": "base-s1", "event": 50, "step": 20}
    again, said = go(rescue, tmp_path / "out", devices=[0, 1])
    assert not [line for line in said if line.startswith("start")]
    assert states(again) == states(store)


def test_a_run_that_its_guard_switched(
    rescue: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """Its row says when, beside the event of the run that the others of its seed continue."""
    plain = "attention.backend=stable_flash, attention.stabilizer=none"
    guard = f"  - {{name: guard, set: [{plain}, stability.guard=switch]}}\n"
    rescue.write_text(rescue.read_text() + guard)
    quick |= {"base-s1": "explode", "pause": "0.01"}
    store, _ = go(rescue, tmp_path / "out", devices=[0, 1])
    rows = {run.id: store.rows(run) for run in store.experiment.runs}

    def line() -> str:
        said = results.markdown(results.collect(store, rows))
        return next((x for x in said.splitlines() if x.startswith("| guard | 1 | 50 ")), "")

    assert not line()  # no telemetry, no switch
    folder = store.run_dir(store.experiment.by_id("guard-s1"))
    write(folder, [10, 20, 30]).close()
    assert not line()
    writer = write(folder, [10, 20])
    told = {"loss_mean": 3.0, "switched": 21.0}
    writer.write(30, scalars=told, layers={}, heads=heads(1.0))
    writer.close()
    assert line() == "| guard | 1 | 50 | guard, at 21 | 29 before | yes |"
    rows["guard-s1"] = rows["guard-s1"][:45]  # the other run's event has not come yet
    assert line().endswith("| too short to say |")
    store.states["early-s1"].origin = store.states["late-s1"].origin = None
    assert "| guard | 1 | - | guard, at 21 | - | no run to compare |" in results.markdown(
        results.collect(store, rows)
    )
    store.close()


def test_the_speed_of_a_run_is_that_of_its_own_steps(
    rescue: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """Not of those that the run it continues had made, and without its start."""
    quick |= {"base-s1": "explode", "pause": "0.02"}
    _, said = go(rescue, tmp_path / "out", devices=[0])
    speeds = [float(x) for line in said for x in re.findall(r"late-s1.* (\S+) step/s", line)]
    assert speeds and max(speeds) < 100.0  # 50, and what lies between two looks


def test_a_base_without_an_event_has_nothing_to_save(
    rescue: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    store, said = go(rescue, tmp_path / "out", devices=[0, 1])
    assert states(store)["base-s1"] == "finished"
    assert "there is nothing to save" in store.states["early-s1"].reason
    assert sum("cannot start" in line for line in said) == 3


def test_a_continued_run_goes_on_in_the_next_job(
    rescue: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    quick |= {"base-s1": "explode", "pause": "0.01"}
    go(rescue, tmp_path / "out", devices=[0], only={"base"})
    store, said = go(rescue, tmp_path / "out", devices=[0], only={"early"}, steps=40)
    assert states(store)["early-s1"] == "paused"
    store, said = go(rescue, tmp_path / "out", devices=[0], only={"early"})
    assert "from its checkpoint (logged to step 40)" in said[0]
    assert states(store)["early-s1"] == "finished"
    assert origin.end_of(store, store.experiment.by_id("early-s1"), limit=100) == 90


def test_the_run_that_others_continue_ends_after_its_event(
    rescue: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """Its GPUs are the others'; after a cut it is not continued past that step either."""
    text = rescue.read_text()
    rescue.write_text(text.replace("keep_last=null]", "keep_last=null], follow: 30"))
    quick |= {"base-s1": "event", "pause": "0.01"}
    store, _ = go(rescue, tmp_path / "out", devices=[0], only={"base"}, steps=60)
    assert states(store)["base-s1"] == "paused"
    base = store.experiment.by_id("base-s1")
    assert origin.end_of(store, base, limit=100) == 80
    store, _ = go(rescue, tmp_path / "out", devices=[0], only={"base", "late"})
    assert (states(store)["base-s1"], store.reached(base)) == ("finished", 80)
    assert store.states["base-s1"].reason == "30 steps after the event"
    assert states(store)["late-s1"] == "finished"
    # The same when nobody knew the event as it began: it is asked to stop, some steps later.
    quick["pause"] = "0.2"
    store, _ = go(rescue, tmp_path / "again", devices=[0], only={"base"})
    assert states(store)["base-s1"] == "finished" and 80 <= store.reached(base) < 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("from_cell: base, before: 25>from_cell: strange, before: 25", "starts at step 0"),
        ("from_cell: base, before: 25>from_cell: late, before: 25", "starts at step 0"),
        ("from_cell: base, before: 25>before: 25", "before needs it: name a cell"),
        ("follow: 40}\n  - {name: late>follow: 0}\n  - {name: late", "at least 1"),
        ("keep_last=null>keep_last=2", "set it to null"),
        ("interval=10>interval=null", "start from this one's"),
        ("before: 5000>before: 5000, seeds: [7]", "no runs of these seeds"),
    ],
)
def test_what_cannot_be_continued(rescue: Path, change: str, message: str) -> None:
    old, _, new = change.partition(">")
    text = rescue.read_text()
    assert old in text
    rescue.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        read(rescue)


def test_a_killed_run_has_only_its_checkpoint(protocol: Path, tmp_path: Path) -> None:
    """It logged the last step, but no checkpoint holds it: it is not done."""
    store = Store(tmp_path / "out", read(protocol))
    run = store.experiment.runs[0]
    (store.run_dir(run) / "checkpoints" / "step_00000060.attempt-1").mkdir(parents=True)
    (store.run_dir(run) / "checkpoints" / "step_00000090.attempt-1.tmp").mkdir()
    rows = "".join(f"{i},4.0,0.3\n" for i in range(1, 101))
    (store.run_dir(run) / "metrics.csv").write_text("step,loss,grad_norm\n" + rows)
    assert (store.last_step(run), store.reached(run)) == (100, 60)
    store.close()


def published(folder: Path) -> dict[str, dict]:
    return {run["run"]: run for run in json.loads((folder / "tiny.json").read_text())["runs"]}


def test_results_of_a_machine_that_is_gone_are_kept(
    protocol: Path, tmp_path: Path, quick: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    """Nobody brought its records along: a finished run must not become one never started."""
    target = Target(folder=tmp_path / "docs")
    quick["b-s1"] = "explode"
    first = request(protocol, tmp_path / "machine_1", only=["a-s1", "b-s1"], target=target)
    assert stability.run(first) == 0
    before, curves = published(target.folder), (target.folder / "tiny.csv").read_text()
    shutil.rmtree(tmp_path / "machine_1")
    rest = request(protocol, tmp_path / "machine_2", only=["a-s2"], target=target)
    capsys.readouterr()
    assert stability.run(rest) == 0
    said = capsys.readouterr().out
    assert "Kept from earlier results, their records are not here: a-s1, b-s1." in said
    after = published(target.folder)
    assert {name: run["state"] for name, run in after.items()} == {
        "a-s1": "finished", "b-s1": "exploded", "a-s2": "finished",
    }  # fmt: skip
    for name in ("a-s1", "b-s1"):
        assert before[name] == {k: v for k, v in after[name].items() if k not in ("kept", "job")}
    assert set(curves.splitlines()) < set((target.folder / "tiny.csv").read_text().splitlines())
    # Written again, from a directory with nothing in it: still there.
    (tmp_path / "machine_3").mkdir()
    empty = Store(tmp_path / "machine_3", read(protocol))
    empty.save()
    empty.close()
    assert stability.show(request(protocol, tmp_path / "machine_3", target=target)) == 0
    assert {n: r["steps"] for n, r in published(target.folder).items()} == {
        n: r["steps"] for n, r in after.items()
    }


def test_the_longer_of_two_attempts_counts(
    protocol: Path, tmp_path: Path, quick: dict[str, str]
) -> None:
    target = Target(folder=tmp_path / "docs")
    for machine, steps in (("1", 60), ("2", 30), ("3", 100)):
        job = request(protocol, tmp_path / machine, only=["a-s1"], steps=steps, target=target)
        assert stability.run(job) == 0
        found = published(target.folder)
        assert found["a-s1"]["steps"] == max(60, steps)
        assert ("kept" in found["a-s1"]) == (machine == "2")
        shorter = [run for run in found.values() if run["state"] == "repeated"]
        assert [run["steps"] for run in shorter] == ([30] if machine == "2" else [])


def another_learning_rate(result: dict) -> None:
    result["runs"][0]["set"] = ["optimizer.lr=9"]


def another_rule(result: dict) -> None:
    result["explosion"]["loss"] = 9.0


def a_run_more(result: dict) -> None:
    result["runs"][-1] |= {"run": "c-s1", "cell": "c", "steps": 7}


def other_weights(result: dict) -> None:
    result["fingerprints"] = {"1": "0" * 64}


@pytest.mark.parametrize("change", [another_learning_rate, another_rule, a_run_more, other_weights])
def test_results_that_cannot_stand_beside_these_are_refused_before_any_work(
    protocol: Path, tmp_path: Path, quick: dict[str, str], change: Callable[[dict], None]
) -> None:
    target = Target(folder=tmp_path / "docs")
    assert stability.run(request(protocol, tmp_path / "1", only=["a-s1"], target=target)) == 0
    file = target.folder / "tiny.json"
    result = json.loads(file.read_text())
    change(result)
    file.write_text(json.dumps(result))
    reference = tmp_path / "2" / "reference" / "seed_1.json"
    reference.parent.mkdir(parents=True)
    reference.write_text(json.dumps({"weights": {}, "environment": {}}))
    with pytest.raises(ExperimentError, match="another --results-dir"):
        stability.run(request(protocol, tmp_path / "2", only=["b-s1"], target=target))
    assert not (tmp_path / "2" / "runs" / "b-s1").exists()
    assert json.loads(file.read_text()) == result


@pytest.mark.parametrize("text", ["", "[]", '{"runs": 3, "explosion": {}}', "\xff"])
def test_what_is_no_result_is_not_overwritten(
    protocol: Path, tmp_path: Path, quick: dict[str, str], text: str
) -> None:
    target = Target(folder=tmp_path / "docs")
    target.folder.mkdir()
    (target.folder / "tiny.json").write_text(text, encoding="latin-1")
    with pytest.raises(ExperimentError, match="would be overwritten"):
        stability.run(request(protocol, tmp_path / "1", only=["a-s1"], target=target))
    assert (target.folder / "tiny.json").read_text(encoding="latin-1") == text


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nope"])
def test_a_folder_of_results_that_cannot_be_is_refused_before_any_work(
    protocol: Path, tmp_path: Path, quick: dict[str, str], folder: str
) -> None:
    (tmp_path / "file").touch()
    target = Target(folder=tmp_path / folder)
    with pytest.raises(ExperimentError, match="cannot be written"):
        stability.run(request(protocol, tmp_path / "1", only=["a-s1"], target=target))
    assert not (tmp_path / "1" / "runs" / "a-s1").exists()

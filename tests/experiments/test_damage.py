"""Killed launchers, lost and damaged files: nothing trains on unseen, nothing is a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_patch.experiments import archive, results, stability, unrecorded
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.publish import Target
from megatron_patch.experiments.stability import Request
from megatron_patch.experiments.store import Store
from megatron_patch.training import run_directory

Go = Callable[..., tuple[Store, list[str]]]

LAUNCHER = """
import subprocess, sys
from megatron_patch.runtime.lifeline import tied
sleeper = [sys.executable, "-c", "import time; time.sleep(120)"]
process = subprocess.Popen(tied(sleeper), start_new_session=True)
print(process.pid, flush=True)
process.wait()
"""


def test_a_program_of_ours_dies_with_a_launcher_that_is_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    program = psutil.Process(int(launcher.stdout.readline()))
    words = ""  # an empty command line for a moment, in the middle of the exec
    while "sleep(120)" not in words or "lifeline" in words:
        assert program.status() != psutil.STATUS_ZOMBIE  # until it has become what it is to be
        words = " ".join(program.cmdline())
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    try:
        program.wait(20)
    except psutil.NoSuchProcess:
        return


def test_runs_are_started_like_that(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **more: started.append(command) or popen(command, **more),
    )
    go(protocol, tmp_path / "out", only={"a-s1"})
    assert started and started[0][:4] == [
        sys.executable, "-m", "megatron_patch.runtime.lifeline", str(os.getpid())
    ]  # fmt: skip


def test_a_directory_in_which_somebody_trains_is_left_alone(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    store, _ = go(protocol, tmp_path / "out", only={"b"})
    run = store.run_dir(store.experiment.by_id("a-s1"))
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text("step,loss,grad_norm\n1,4.0,0.3\n")
    lock, problem = run_directory._lock(run, [])
    assert lock is not None and problem is None
    _, said = go(protocol, tmp_path / "out", only={"a-s1"})
    assert said == ["a-s1 is not started: another process trains in its directory"]
    assert (run / "metrics.csv").exists()
    lock.close()
    store, _ = go(protocol, tmp_path / "out", only={"a-s1"})
    assert store.states["a-s1"].state == "finished"


def test_what_nobody_wrote_down_is_read_from_the_runs(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    out = tmp_path / "out"
    go(protocol, out, only={"a-s1"})
    go(protocol, out, only={"b-s1"}, steps=30)
    (out / "states.json").unlink()
    store = Store(out, read(protocol))
    lost = store.run_dir(store.experiment.by_id("a-s2"))
    lost.mkdir(parents=True)
    (lost / "metrics.csv").write_text("step,loss,grad_norm\n1,4.0,0.3\n")
    lines = unrecorded.catch_up(store)
    assert [line.split(":")[0] for line in lines] == [
        "a-s1 is finished after step 100, as its directory says",
        "b-s1 is paused after step 30, as its directory says",
    ]
    assert unrecorded.catch_up(store) == []
    rows = {run.id: store.rows(run) for run in store.experiment.runs}
    text = results.markdown(results.collect(store, rows))
    assert "to be started again: a-s2 at 1." in text and "Never started" not in text
    store.close()
    _, said = go(protocol, out, only={"a-s1", "b-s1"})
    assert len([line for line in said if line.startswith("start ")]) == 1


@pytest.mark.parametrize("content", ["", '{"name": ', "[]"])
@pytest.mark.parametrize("name", ["experiment.json", "states.json"])
def test_a_damaged_file_is_named_with_a_remedy(
    protocol: Path, tmp_path: Path, name: str, content: str
) -> None:
    out = tmp_path / "out"
    store = Store(out, read(protocol))
    store.save()
    store.close()
    (out / name).write_text(content)
    remedy = "move it away" if name == "states.json" else "restore it from an archive"
    with pytest.raises(ExperimentError, match=f"{name} is damaged .*{remedy}"):
        Store(out, read(protocol))
    with pytest.raises(ExperimentError, match="damaged"):
        list(archive.pack(out, tmp_path / "zip", files=1, limit=1 << 20))
        list(archive.unpack(list((tmp_path / "zip").iterdir()), tmp_path / "home"))


def test_damaged_facts_of_runs_and_seeds(protocol: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "out", read(protocol))
    run = store.experiment.runs[0]
    store.run_dir(run).mkdir(parents=True)
    rows = {r.id: store.rows(r) for r in store.experiment.runs}
    for file in (store.run_dir(run) / "experiment.json", store.reference(run)):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{")
        with pytest.raises(ExperimentError, match=f"{file.name} is damaged"):
            results.collect(store, rows)
        file.unlink()
    (tmp_path / "out" / "experiment.json").write_text(json.dumps({"name": "tiny"}))
    store.close()
    with pytest.raises(ExperimentError, match="of no experiment: it has no"):
        Store(tmp_path / "out", read(protocol))


@pytest.mark.parametrize("what", ["all", "experiment.json"])
def test_a_removed_experiment_ends_and_says_so(
    protocol: Path, tmp_path: Path, quick: dict[str, str], what: str
) -> None:
    """Its runs began again from step 0, twice, and nothing of them was left."""
    out, target = tmp_path / "out", Target(folder=tmp_path / "copied", archives=0)
    asked = Request(
        config=protocol, out=out, gpus=1, minutes=None, steps=None, only=["a-s1", "b-s1"],
        overrides=[], target=target,
    )  # fmt: skip
    quick["pause"] = "0.03"
    started: list[str] = []

    def remove() -> None:
        while not (out / "runs" / "a-s1" / "metrics.csv").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        started.extend(path.name for path in (out / "runs").iterdir())
        if what == "all":
            out.rename(tmp_path / "removed")
        else:
            (out / what).unlink()

    thread = threading.Thread(target=remove)
    thread.start()
    with pytest.raises(ExperimentError, match=r"experiment\.json was removed while"):
        stability.run(asked)
    thread.join()
    assert started == ["a-s1"]
    assert not (out / "runs" / "b-s1").exists(), "nothing is started in its place"

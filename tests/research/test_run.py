"""The runner over stand-ins for the trainer: order, resuming, verdicts, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run
from directory import Directory
from protocol import ExperimentError, read

Scripts = Callable[..., None]
Go = Callable[..., int]


def result(out: Path) -> dict[str, dict[str, Any]]:
    """The runs of verdicts.json by id."""
    tree = json.loads((out / "results" / "verdicts.json").read_text())
    return {entry["run"]: entry for entry in tree["runs"]}


@pytest.fixture
def time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a-s1 has made a step, however long it takes to start on this machine."""
    table = tmp_path / "out" / "runs" / "a-s1" / "metrics.csv"

    def left(_: object) -> float:
        begun = table.exists() and table.read_text().count("\n") > 3
        return -1.0 if begun else float("inf")

    monkeypatch.setattr(run.Runner, "_time_left", left)


def test_every_run_is_made_once_and_a_later_call_starts_none(tmp_path, scripts, go, capsys):
    assert go() == 0
    said = capsys.readouterr().out
    assert said.index("start a-s1") < said.index("start b-s1") < said.index("start a-s2")
    assert "| a | 1 | finished | 0 | 100 | never | never | 0.3 | 4.0000 | - |" in said
    assert "| a | 2 | 4.0000 | 0.0000 |" in said
    assert go() == 0
    assert "start " not in capsys.readouterr().out
    with (tmp_path / "out" / "results" / "runs.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["run"] for row in rows] == ["a-s1", "b-s1", "a-s2"]
    assert rows[1]["set"] == "optimizer.lr=2e-3" and rows[1]["steps"] == "100"
    with (tmp_path / "out" / "results" / "curves.csv").open(newline="") as lines:
        assert sum(1 for _ in lines) == 1 + 3 * 10
    facts = json.loads((tmp_path / "out" / "runs" / "b-s1" / "experiment.json").read_text())
    assert facts["cell"] == "b" and facts["variant"] == "plain"


def test_a_budget_cuts_runs_and_the_same_command_goes_on(
    tmp_path, scripts, go, capsys, monkeypatch, time_is_over
):
    """Short jobs in a row: each begins where the one before was saved, and no step is lost."""
    scripts(a_s1="slow")
    assert go() == 0
    monkeypatch.setattr(run.Runner, "_time_left", lambda _: float("inf"))
    said = capsys.readouterr().out
    assert "out of time: 2 run(s) are left" in said and "a-s1 is paused" in said
    there = result(tmp_path / "out")
    cut = there["a-s1"]["steps"]
    assert 0 < cut < 100 and there["b-s1"]["state"] == "waiting"
    assert "Never started: b-s1, a-s2." in said
    assert go() == 0
    assert f"start a-s1 on 0: from step {cut}" in capsys.readouterr().out
    there = result(tmp_path / "out")
    assert {entry["state"] for entry in there.values()} == {"finished"}
    assert [(a["from_step"], a["to_step"]) for a in there["a-s1"]["attempts"]] == [
        (0, cut),
        (cut, 100),
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_runs_save(tmp_path, scripts, go, capsys, number):
    scripts(a_s1="slow")
    table = tmp_path / "out" / "runs" / "a-s1" / "metrics.csv"

    def send() -> None:
        while not table.exists():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert go() == 0
    thread.join()
    assert "stopping: running cells save first" in capsys.readouterr().out
    assert result(tmp_path / "out")["a-s1"]["state"] == "paused"
    assert go() == 0
    assert result(tmp_path / "out")["a-s1"]["state"] == "finished"


def test_a_runner_that_was_killed_left_nothing_to_repeat(tmp_path, scripts, go, capsys):
    """What nobody wrote down, the run directories say."""
    assert go("--steps", "40", "--only", "a-s1") == 0
    assert go("--only", "s2") == 0
    (tmp_path / "out" / "states.json").unlink()
    capsys.readouterr()
    assert go("--only", "a") == 0
    said = capsys.readouterr().out
    assert "start a-s1 on 0: from step 40" in said and "start a-s2" not in said


def test_an_exploded_run_is_stopped_and_stays_so(tmp_path, scripts, go, capsys):
    scripts(a_s1="explode")
    assert go("--only", "s1") == 0
    said = capsys.readouterr().out
    assert "a-s1 is exploded" in said and "loss above 5 from step 50; stopped at" in said
    entry = result(tmp_path / "out")["a-s1"]
    assert entry["first_large_gradient"] == entry["exploded_at"] == 50
    assert 80 <= entry["steps"] < 100
    assert go("--only", "s1") == 0
    assert "start " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "state", "again"),
    [
        ("exit 1", "failed", True),
        ("exit 2", "refused", True),
        ("exit 3", "non-finite", False),
        ("exit 5", "stopped by its guard", False),
    ],
)
def test_how_a_run_can_end(tmp_path, scripts, go, capsys, script, state, again):
    """What says nothing about the numerics is tried again by the next call; a verdict stays."""
    scripts(a_s1=script)
    assert go("--only", "s1") == (1 if again else 0)
    there = result(tmp_path / "out")
    assert there["a-s1"]["state"] == state and there["b-s1"]["state"] == "finished"
    assert there["a-s1"]["reason"] == f"exit code {script[-1]}: what went wrong"
    assert (f"a-s1 {state}: exit code" in capsys.readouterr().err) is again
    scripts()
    assert go("--only", "s1") == 0
    assert (result(tmp_path / "out")["a-s1"]["state"] == "finished") is again


def test_a_run_that_does_not_hear_is_killed(
    tmp_path, scripts, go, capsys, monkeypatch, time_is_over
):
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.2)
    scripts(a_s1="deaf")
    assert go("--only", "a-s1") == 0
    assert "a-s1 did not stop in 0.2 s and is killed" in capsys.readouterr().out
    entry = result(tmp_path / "out")["a-s1"]
    assert entry["state"] == "waiting" and entry["reason"] == "ended before it could save"


def test_the_time_that_is_kept_for_saving(protocol, tmp_path):
    protocol.write_text(protocol.read_text().replace("save_seconds: 0", "save_seconds: 20"))
    directory = Directory(tmp_path / "out", read(protocol), print)
    runner = run.Runner(directory, [0], 1.0, 100, [], print)
    assert 38 < runner._time_left() <= 40
    runner.minutes = None
    assert runner._time_left() == float("inf")


def test_runs_side_by_side_have_gpus_of_their_own(tmp_path, scripts, go, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc")
    scripts(a_s1="slow", b_s1="slow")
    assert go("--only", "s1", "--set", "training.device=cuda") == 0
    runs = tmp_path / "out" / "runs"
    assert (runs / "a-s1" / "device").read_text() == "4\n"
    assert (runs / "b-s1" / "device").read_text() == "GPU-abc\n"


CONTINUED = """\
cells:
  - {name: base, set: [checkpoint.interval=10, checkpoint.keep_last=null], follow: 60}
  - {name: early, from_cell: base, before: 25, follow: 40}
  - {name: late, from_cell: base, before: -10, follow: 50}
"""


def test_runs_that_continue_another_one_wait_for_its_event(tmp_path, protocol, scripts, go, capsys):
    head = protocol.read_text().split("cells:")[0].replace("seeds: [1, 2]", "seeds: [1]")
    protocol.write_text(head.replace("stop_after: 30", "stop_after: 60") + CONTINUED)
    scripts(base_s1="event", early_s1="slow", late_s1="slow")
    assert go("--only", "early") == 0
    said = capsys.readouterr().out
    assert "early-s1 cannot start: base-s1 has no event yet" in said
    assert go("--gpus", "2", "--steps", "70") == 0
    said = capsys.readouterr().out
    assert "start early-s1 on 1: from step 20 of base-s1 (event at 50)" in said
    assert "start late-s1 on" in said and "from step 60 of base-s1 (event at 50)" in said
    assert go("--gpus", "2") == 0
    there = result(tmp_path / "out")
    assert {name: (e["state"], e["steps"]) for name, e in there.items()} == {
        "base-s1": ("finished", 100),
        "early-s1": ("finished", 90),
        "late-s1": ("finished", 100),
    }
    assert there["early-s1"]["origin"] == {"base": "base-s1", "event": 50, "step": 20}
    said = capsys.readouterr().out
    assert "| early | 1 | 50 | continued | 30 before | yes |" in said
    assert "| late | 1 | 50 | continued | 10 after | yes |" in said


def test_a_base_without_an_event_leaves_nothing_to_continue(protocol, scripts, go, capsys):
    head = protocol.read_text().split("cells:")[0].replace("seeds: [1, 2]", "seeds: [1]")
    protocol.write_text(head + CONTINUED)
    assert go() == 0
    said = capsys.readouterr().out
    assert "base-s1 is finished" in said and "early-s1 cannot start" in said


def test_a_protocol_is_fixed_before_its_first_run(tmp_path, protocol, corpus, scripts, go, capsys):
    base = tmp_path / "base.yaml"
    shutil.copy(protocol.read_text().split("config: ")[1].split()[0], base)
    text = protocol.read_text().replace(str(base), "base.yaml")
    text = "".join(
        f"config: {base}\n" if line.startswith("config:") else line
        for line in text.splitlines(keepends=True)
    )
    protocol.write_text(text)
    assert go("--steps", "10", "--only", "a-s1") == 0
    for old, new, told in (
        ("loss: 5.0", "loss: 9.0", "explosion: "),
        ("lr=2e-3", "lr=3e-3", "run b-s1: optimizer.lr 0.002 -> 0.003"),
        ("seeds: [1, 2]", "seeds: [1]", "run a-s2: taken out"),
        ("steps: 100", "steps: 200", "steps: 100 -> 200"),
    ):
        protocol.write_text(text.replace(old, new))
        assert go() == 2
        said = capsys.readouterr().err
        assert told in said and "A protocol is fixed before its first run" in said
    protocol.write_text(text)
    whole = base.read_text()
    base.write_text(whole.replace("lr: 1.0e-3", "lr: 5.0e-3"))
    assert go() == 2
    assert "run a-s1: optimizer.lr 0.001 -> 0.005" in capsys.readouterr().err
    base.write_text(whole)
    # Cells may be added, and the data may lie elsewhere.
    protocol.write_text(text + "  - {name: c}\n")
    for file in corpus.parent.glob("tiny.*"):
        shutil.copy(file, tmp_path / file.name)
    assert go("--steps", "10", "--set", f"data.blend.0.path={tmp_path / 'tiny'}") == 0


def test_one_process_at_a_time(protocol, tmp_path):
    experiment = read(protocol)
    first = Directory(tmp_path / "out", experiment, print)
    with pytest.raises(ExperimentError, match="another process runs this experiment"):
        Directory(tmp_path / "out", experiment, print)
    first.close()
    Directory(tmp_path / "out", experiment, print).close()
    (tmp_path / "out" / "states.json").write_text("{")
    with pytest.raises(ExperimentError, match="is damaged"):
        Directory(tmp_path / "out", experiment, print)


TORCHRUN = """\
megatron-patch: step 7: gradients not finite; stopped before the update
  parameters with a non-finite gradient ...
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  exitcode  : -15 (pid: 18085)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  exitcode  : 3 (pid: 18084)
"""


def test_the_exit_code_and_reason_behind_torchrun():
    """torchrun ends with 1 whatever its ranks ended with; the state must not depend on that."""
    assert run.rank_exit_code(TORCHRUN) == 3
    assert run.rank_exit_code("killed") == 1
    assert run.last_words(TORCHRUN).startswith("step 7: gradients not finite")
    assert run.last_words("a\n\nOutOfMemoryError\n") == "OutOfMemoryError"
    assert run.last_words("") == ""
    reasons = "a\nmegatron-patch: no backend; unmet:\n  - device is cpu\nothers: none\n"
    assert run.last_words(reasons) == "no backend; unmet: - device is cpu"

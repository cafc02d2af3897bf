"""Runs that were refused: what the same command does again, and what it says of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_patch.cli import app
from megatron_patch.experiments import runner, stability, store
from megatron_patch.experiments.store import Store

Go = Callable[..., tuple[Store, list[str]]]
NO_MANIFEST = "exit code 2: there is no manifest"


def codes(found: Store, run: str) -> list[int]:
    return [attempt["exit_code"] for attempt in found.states[run].attempts]


def test_the_same_command_tries_a_refused_run_again_once(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """Its reason may be gone; while it is not, the run is refused again and not in a loop."""
    needed = tmp_path / "manifest"
    quick["a-s1"] = f"needs {needed}"
    for times in (1, 2):
        found, _ = go(protocol, tmp_path / "out", only={"a-s1"})
        assert (found.states["a-s1"].state, found.states["a-s1"].reason) == ("refused", NO_MANIFEST)
        assert codes(found, "a-s1") == [2] * times
    found, _ = go(protocol, tmp_path / "out", only={"b-s1"})
    assert codes(found, "a-s1") == [2, 2]  # it was not asked for
    needed.touch()
    found, _ = go(protocol, tmp_path / "out", only={"a-s1"})
    assert (found.states["a-s1"].state, found.states["a-s1"].reason) == ("finished", "")
    assert codes(found, "a-s1") == [2, 2, 0]


def test_a_run_that_waits_for_a_refused_one_waits_while_that_is_tried_again(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    head = protocol.read_text().split("cells:")[0].replace("seeds: [1, 2]", "seeds: [1]")
    cells = """\
cells:
  - {name: base, set: [checkpoint.interval=10, checkpoint.keep_last=null]}
  - {name: late, from_cell: base, before: -10, follow: 50}
"""
    protocol.write_text(head.replace("stop_after: 30", "stop_after: 60, grad_norm: 1.0") + cells)
    quick |= {"base-s1": f"needs {tmp_path / 'manifest'}"}
    found, _ = go(protocol, tmp_path / "out", devices=[0, 1])
    assert found.states["base-s1"].state == "refused"
    assert found.states["late-s1"].reason == "base-s1, which it continues, is refused"
    quick |= {"base-s1": "explode", "pause": "0.01"}
    found, _ = go(protocol, tmp_path / "out", devices=[0, 1])
    assert found.states["base-s1"].state == "exploded"
    assert found.states["late-s1"].state == "finished"


def test_a_refused_run_that_could_not_be_started_is_refused(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    """Out of time: with 'waiting' the command would end with 0, and the reason would be lost."""
    quick["a-s1"] = "exit 2"
    before, _ = go(protocol, tmp_path / "out", only={"a-s1"})
    after, said = go(protocol, tmp_path / "out", only={"a-s1"}, seconds=0.0)
    assert any(line.startswith("out of time") for line in said)
    assert after.states["a-s1"] == before.states["a-s1"]
    kept = json.loads((tmp_path / "out" / "states.json").read_text())["a-s1"]
    assert (kept["state"], kept["reason"]) == ("refused", "exit code 2: Error: what went wrong")


def test_a_run_that_was_refused_after_steps_waits_for_retry(
    protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go
) -> None:
    go(protocol, tmp_path / "out", only={"a-s1"}, steps=30)
    quick["a-s1"] = "exit 2"
    go(protocol, tmp_path / "out", only={"a-s1"})
    quick["a-s1"] = ""
    found, said = go(protocol, tmp_path / "out", only={"a-s1"})
    assert found.states["a-s1"].state == "refused" and said == []


def test_the_end_of_the_command_says_what_to_do(
    protocol: Path, tmp_path: Path, quick: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    quick |= {"a-s1": f"needs {tmp_path / 'manifest'}", "b-s1": "exit 1"}
    command = ["experiment", "stability", "--config", str(protocol), "--out", str(tmp_path / "out")]
    assert app.run(command) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "runs that are not done: 1 refused before a first step (mend what the reason says, and the "
        "same command tries again); 1 failed (start again with --retry)"
    )
    (tmp_path / "manifest").touch()
    quick["b-s1"] = ""
    assert app.run(command) == 1
    said = capsys.readouterr()
    assert "| a | 1 | finished |" in said.out
    assert said.err.splitlines()[-1].endswith("not done: 1 failed (start again with --retry)")
    assert app.run([*command, "--retry"]) == 0
    assert "not done" not in capsys.readouterr().err


def test_what_can_be_told_of_runs_that_are_not_done() -> None:
    later = store.State(state="refused", attempts=[{"to_step": 30}, {"to_step": 30}])
    left = {"a": later, "b": later, "c": store.State(state="refused")}
    assert store.what_next(left, {"a", "b", "d"}) == (
        "runs that are not done: 2 refused later (start again with --retry); 1 not among --only"
    )


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_data_that_are_not_there_are_told_once_and_before_any_run(
    dry: list[str],
    protocol: Path,
    corpus: Path,
    tmp_path: Path,
    quick: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron_patch.experiments import process

    for module in (stability, runner):
        monkeypatch.setattr(module, "check_data", process.check_data)
    command = ["experiment", "stability", "--config", str(protocol), "--out", str(tmp_path / "out")]
    missing = ["--set", f"data.blend.0.path={tmp_path / 'nowhere'}"]
    assert app.run([*command, *missing, *dry]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("megatron-patch: no run is started: the data of tiny cannot be used")
    assert said.err.count("nowhere.manifest.json: there is no manifest") == 1
    assert "--set data.blend.0.path=" in said.err and "start a-s1" not in said.out
    assert not (tmp_path / "out").exists()  # and another protocol may still have it
    assert ("3 runs of 100 steps" in said.out) == bool(dry)
    there = ["--set", f"data.blend.0.path={corpus}"]
    assert app.run([*command, *there, *dry]) == 0
    assert (tmp_path / "out" / "runs" / "a-s1" / "FINISHED").exists() != bool(dry)
    if not dry:  # with nothing to start, nothing is read
        assert app.run([*command, *missing]) == 0

"""The directory of the checkpoints: one run at a time, one run at all, and never forgotten."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.checkpoint import inspect, last_checkpoint
from megatron_patch.checkpoint.errors import CheckpointError
from megatron_patch.schema.problem import ConfigError
from megatron_patch.training import run_directory

STORE = "checkpoint.directory=shared"


@pytest.fixture
def open_run(tiny: Any) -> Callable[..., Any]:
    """Opens a run directory and takes its store: (directory, problems)."""

    def start(*overrides: str) -> tuple[run_directory.RunDirectory, list[Any]]:
        loaded = tiny(*overrides)
        directory = run_directory.open_run(loaded, {})
        try:
            directory.take_store(loaded.config)
        except ConfigError as error:
            return directory, error.problems
        return directory, []

    return start


def test_two_runs_cannot_save_into_one_directory(open_run, tmp_path):
    """The second one would delete what the first one is saving."""
    first, problems = open_run("run_dir=a", STORE)
    assert not problems
    second, problems = open_run("run_dir=b", STORE)
    assert [p.path for p in problems] == ["checkpoint.directory"]
    assert "another process is training here" in problems[0].message
    busy = pytest.raises(inspect.BusyError, match="a trainer uses this run")
    with busy, inspect.alone(tmp_path / "shared"):
        pass
    first.close()
    third, problems = open_run("run_dir=a", STORE)
    assert not problems
    third.close()
    second.close()
    with inspect.alone(tmp_path / "shared"):
        pass


def test_another_run_s_own_checkpoints_are_locked_as_well(open_run):
    first, problems = open_run("run_dir=a")
    assert not problems
    second, problems = open_run("run_dir=b", "checkpoint.directory=a/checkpoints")
    assert [p.path for p in problems] == ["checkpoint.directory"]
    first.close()
    second.close()


def test_a_file_system_without_locks_is_noted(open_run, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(run_directory.fcntl, "flock", refuse)
    directory, problems = open_run("run_dir=a", STORE)
    assert not problems and "shared: this file system has no locks" in directory.notes[-1]
    directory.close()


def test_a_directory_that_cannot_be_made_is_a_problem(open_run, tmp_path):
    (tmp_path / "shared").touch()
    directory, problems = open_run("run_dir=a", "checkpoint.directory=shared/x")
    assert [p.path for p in problems] == ["checkpoint.directory"]
    directory.close()


@pytest.mark.parametrize("name", ["store.json", "latest", "latest.next", "pinned"])
@pytest.mark.parametrize("store", ["shared", "a"])
def test_what_a_save_writes_is_looked_at_before_the_first_step(open_run, tmp_path, name, store):
    (tmp_path / store / name).mkdir(parents=True)
    directory, (problem,) = open_run("run_dir=a", f"checkpoint.directory={store}")
    directory.close()
    assert problem.path == "checkpoint.directory" and not problem.may_pass
    assert problem.message == f"{store}: cannot be used (Is a directory: {store}/{name})"


def test_a_directory_that_nothing_can_be_put_into_is_refused(open_run, monkeypatch):
    """Its lock and its records open; the first save, hours later, would fail."""
    for overrides in ([], [STORE]):
        directory, problems = open_run("run_dir=a", *overrides)
        assert not problems
        directory.close()
        store = "shared" if overrides else "a/checkpoints"
        with monkeypatch.context() as root_may_write_anywhere:
            root_may_write_anywhere.setattr(os, "access", lambda path, mode: False)
            directory, (problem,) = open_run("run_dir=a", *overrides)
        directory.close()
        assert problem.path == "checkpoint.directory"
        assert problem.message == f"{store}: cannot be used (Permission denied: {store})"


def test_what_stands_in_the_place_of_latest_is_left_to_the_store(open_run, tmp_path):
    """Where there is something to continue, it refuses with the commands (exit code 4)."""
    (tmp_path / "shared" / "step_00000010.attempt-1").mkdir(parents=True)
    (tmp_path / "shared" / "latest").mkdir()
    directory, problems = open_run("run_dir=a", STORE)
    directory.close()
    assert not problems


def test_the_lock_is_no_trace_of_training(open_run):
    """A run that never took a step may still be changed, and resume: never may be given again."""
    for overrides in ([], ["model.num_layers=4"], ["checkpoint.resume=never"]):
        directory, problems = open_run("run_dir=a", STORE, *overrides)
        assert not problems
        directory.close()


def test_a_directory_that_is_not_mounted_is_not_made(open_run, tmp_path):
    """Made, it would hide that it is missing, and fill the disk below the mount point."""
    (tmp_path / "a").mkdir()
    last_checkpoint.remember(tmp_path / "a", tmp_path / "shared" / "x", step=3)
    directory, problems = open_run("run_dir=a", STORE)
    assert not problems and not (tmp_path / "shared").exists()
    directory.close()


def test_checkpoints_lie_outside_by_name_or_by_link(tiny, tmp_path):
    def outside(*overrides: str) -> bool:
        return run_directory.lies_outside(tiny("run_dir=a", *overrides).config)

    assert not outside() and not outside("checkpoint.directory=a/deep/er")
    assert outside(STORE)
    (tmp_path / "far").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoints").symlink_to(tmp_path / "far")
    assert outside()


class TestLastCheckpoint:
    def test_a_new_run_has_none(self, tmp_path):
        last_checkpoint.refuse_to_forget(tmp_path, tmp_path / "checkpoints")

    def test_both_directories_and_the_remedy_are_named(self, tmp_path):
        last_checkpoint.remember(tmp_path, Path("/data/ck/step_7"), step=7000)
        with pytest.raises(CheckpointError) as refused:
            last_checkpoint.refuse_to_forget(tmp_path, tmp_path / "checkpoints")
        error = refused.value
        assert error.exit_code == 4
        for words in ("step 7,000", "/data/ck/step_7", f"in {tmp_path / 'checkpoints'}",
                      f"delete {tmp_path / last_checkpoint.FILE}"):  # fmt: skip
            assert words in str(error)
        assert [p.name for p in tmp_path.iterdir()] == [last_checkpoint.FILE]

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "x", "path": 1}'])
    def test_a_damaged_file_still_says_that_something_was_saved(self, tmp_path, text):
        (tmp_path / last_checkpoint.FILE).write_text(text)
        with pytest.raises(CheckpointError, match="is damaged"):
            last_checkpoint.refuse_to_forget(tmp_path, tmp_path / "checkpoints")

    def test_a_file_that_cannot_be_read_now_is_tried_again(self, tmp_path, monkeypatch):
        def fail(*args: object) -> None:
            raise OSError(errno.ESTALE, "Stale file handle")

        monkeypatch.setattr(Path, "read_bytes", fail)
        with pytest.raises(CheckpointError) as refused:
            last_checkpoint.refuse_to_forget(tmp_path, tmp_path)
        assert refused.value.exit_code == 1

    def test_a_full_disk_does_not_cost_the_checkpoint(self, tmp_path, caplog):
        last_checkpoint.remember(tmp_path / "none", Path("/data/step_7"), step=7)
        assert "step_7 is complete, but last_checkpoint.json" in caplog.text


def test_checkpoints_may_lie_in_the_run_directory_itself(open_run):
    """It has one lock, and this process holds it already."""
    directory, problems = open_run("run_dir=a", "checkpoint.directory=a")
    directory.close()
    assert not problems

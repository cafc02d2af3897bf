"""``megatron-patch launch`` against shims of sbatch and squeue."""

from __future__ import annotations

import os

import pytest

from megatron_patch.cli import app
from megatron_patch.launcher.submit import LaunchError


@pytest.fixture
def launch(shims, monkeypatch):
    """Call the command in the shims' folder; returns its exit code."""
    shims.render()
    for name, value in shims.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(shims.folder)
    shims.launched = shims.run / "launch" / "submitted"
    return lambda *more: app.run(["launch", "--config", "run.yaml", "--nodes", "2", *more])


def test_test_only_comes_before_submitting(launch, shims, capsys):
    assert launch() == 0
    script = str(shims.run / "launch" / "job.sbatch")
    assert shims.calls("sbatch") == [["--test-only", script], ["--parsable", script]]
    assert "job 4711: 2 ranks = 2 node(s) x 1" in capsys.readouterr().out
    assert shims.launched.read_text().startswith("4711 ")
    for name in ("lib.sh", "node.sh", "config.yaml", "job.sbatch"):
        assert (shims.run / "launch" / name).is_file()
    # The directory of --output exists: without it the job would die without a word.
    assert (shims.run / "logs").is_dir()


def test_refused_shape_is_not_submitted(launch, shims, capsys):
    (shims.shim / "test_only").write_text("1")
    assert launch() == 2
    assert len(shims.calls("sbatch")) == 1 and not shims.launched.exists()
    assert "--test-only refuses" in capsys.readouterr().err


def test_bad_configuration_never_reaches_slurm(launch, shims):
    assert launch("--set", "optimizer.lr=-1") == 2
    assert shims.calls("sbatch") == []


def test_second_submission_is_refused(launch, shims, capsys):
    assert launch() == 0
    (shims.shim / "queue").write_text("RUNNING")
    assert launch() == 2
    assert "job 4711 (running) has" in capsys.readouterr().err
    (shims.shim / "queue").write_text("")
    assert launch() == 0


def test_dry_run_writes_and_submits_nothing(launch, shims, capsys):
    before = sorted(shims.run.rglob("*"))
    assert launch("--dry-run") == 0
    assert shims.calls("sbatch") == [] and sorted(shims.run.rglob("*")) == before
    assert capsys.readouterr().out == (shims.run / "launch" / "job.sbatch").read_text()


def test_without_slurm(launch, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert launch() == 2
    assert "sbatch is not on PATH" in capsys.readouterr().err


def test_launch_error_is_the_users(launch):
    assert LaunchError.exit_code == 2

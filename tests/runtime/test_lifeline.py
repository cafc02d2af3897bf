"""A launcher that is gone leaves no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from other_processes import alive, wait_until

from megatron_patch.cli import train
from megatron_patch.runtime import lifeline

RANK = """
import os, pathlib, sys, time
from megatron_patch.runtime.lifeline import die_with_launcher
if "guarded" in sys.argv:
    die_with_launcher()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(120)
"""


def launched(folder: Path, how: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A real torchrun with two ranks that wait."""
    script = folder / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(folder), how]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    files = [folder / "0", folder / "1"]
    assert wait_until(lambda: all(f.exists() and f.read_text() for f in files))
    return process, [int(file.read_text()) for file in files]


def test_ranks_die_with_a_torchrun_that_is_killed(tmp_path):
    process, ranks = launched(tmp_path, "guarded")
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(alive, ranks)), 10)
    process.wait()


def test_a_training_rank_asks_for_it(monkeypatch):
    asked = []
    monkeypatch.setattr(train, "die_with_launcher", lambda: asked.append(True))
    monkeypatch.setattr(train, "load", lambda *_: (_ for _ in ()).throw(StopIteration))
    with pytest.raises(StopIteration):
        train.run(type("Arguments", (), {"config": "none.yaml", "overrides": []})())
    assert asked == [True]


def test_a_process_without_a_launcher_keeps_its_parent(monkeypatch):
    """`nohup megatron-patch train` outlives the shell."""
    called = []
    monkeypatch.setattr(lifeline, "die_with_parent", lambda: called.append(True))
    monkeypatch.delenv(lifeline.LAUNCHED, raising=False)
    lifeline.die_with_launcher()
    assert not called
    monkeypatch.setenv(lifeline.LAUNCHED, "id")
    lifeline.die_with_launcher()
    assert called

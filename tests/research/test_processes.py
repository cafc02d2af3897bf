"""Stopping an experiment leaves no rank behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import processes
import psutil

PARENT = """
import pathlib, subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(120)"]
process = subprocess.Popen(child, start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{process.pid} ")
process.wait()
"""


def wait_until(true: object, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_kill_tree_reaches_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, str(file)]
    process = subprocess.Popen(processes.tied(command), start_new_session=True)
    assert wait_until(lambda: file.exists() and file.read_text().endswith(" "))
    child = int(file.read_text())
    assert processes.children(process.pid) == [child]
    processes.kill_tree(process)
    process.wait()
    assert wait_until(lambda: not alive(child), 10)

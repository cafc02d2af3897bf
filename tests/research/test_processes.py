"""Stopping an experiment leaves no rank behind."""

import subprocess
import sys

import processes
from other_processes import alive, wait_until

PARENT = """
import pathlib, subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(120)"]
process = subprocess.Popen(child, start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{process.pid} ")
process.wait()
"""


def test_kill_tree_reaches_children_in_sessions_of_their_own(tmp_path):
    file = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, str(file)]
    process = subprocess.Popen(processes.tied(command), start_new_session=True)
    assert wait_until(lambda: file.exists() and file.read_text().endswith(" "))
    child = int(file.read_text())
    assert processes.children(process.pid) == [child]
    processes.kill_tree(process)
    process.wait()
    assert wait_until(lambda: not alive(child), 10)

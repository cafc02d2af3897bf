"""Processes of other programs that end with ours: torchrun and the ranks below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from megatron_patch.runtime.lifeline import die_with_parent


def tied(command: list[str]) -> list[str]:
    """``command`` (an absolute program first), to be started so that it dies with its starter.

    For programs that are not ours, such as torchrun. Start it from a thread that lives as long as
    the process: the kernel watches the thread.
    """
    return [sys.executable, str(Path(__file__)), str(os.getpid()), *command]


def children(pid: int) -> list[int]:
    """Process ids of the children of a process, by parent ids alone.

    psutil's own ``children()`` also compares start times, and where the clock was set since (a
    machine resumed from a snapshot) it takes living children for strangers.
    """
    return _by_parent().get(pid, [])


def _by_parent() -> dict[int, list[int]]:
    import psutil

    found: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        found.setdefault(process.info["ppid"] or 0, []).append(process.pid)
    return found


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process that leads a group, to its group, and to all of its descendants."""
    by_parent = _by_parent()
    below = list(by_parent.get(process.pid, []))
    for pid in below:  # grows while it is walked
        below += by_parent.get(pid, [])
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))  # outlasts the exec
    os.execv(sys.argv[2], sys.argv[2:])

"""Processes that belong together end together: a launcher, its ranks, and whoever started them.

torchrun gives every rank a session of its own. A signal to torchrun's process group does not reach
the ranks, and a torchrun that is killed leaves them behind: they train on, on GPUs that look free.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from megatron_patch.runtime.files import write_whole

PR_SET_PDEATHSIG = 1
LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Set by torchrun (and ft_launcher) in every rank."""
ATTEMPT_DIR = "MEGATRON_PATCH_ATTEMPT_DIR"
"""Set by ``launch/``: where this attempt leaves its logs and exit codes."""


def leave_exit_code(rank: int, code: int, reason: str) -> None:
    """Leave ``exit/00003`` where the batch script looks for it; nothing without a launcher."""
    folder = os.environ.get(ATTEMPT_DIR, "")
    if folder:
        path = Path(folder) / "exit" / f"{rank:05d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"{code} {time.time():.3f} {first_line(reason)}\n"
        write_whole(path, text, durable=False)  # a reader sees all of it or nothing


def first_line(text: str) -> str:
    """Printable, at most 200 characters."""
    line = text.splitlines()[0] if text else ""
    return "".join(c if c.isprintable() else " " for c in line)[:200]


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies: no orphan holds GPUs or ports.

    ``parent``: its process id, where this process may be too late to see it alive.
    """
    if sys.platform == "linux":
        parent = os.getppid() if parent is None else parent
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), signal.SIGKILL)


def die_with_launcher() -> None:
    """`die_with_parent` in a rank that torchrun started; nothing in any other process."""
    if LAUNCHED in os.environ:
        die_with_parent()

"""Processes that belong together end together: a launcher, its ranks, and whoever started them.

torchrun gives every rank a session of its own. A signal to torchrun's process group does not reach
the ranks, and a torchrun that is killed leaves them behind: they train on, on GPUs that look free.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Set by torchrun (and ft_launcher) in every rank."""
ATTEMPT_DIR = "MEGATRON_PATCH_ATTEMPT_DIR"
"""Set by ``launch/``: where this attempt leaves its logs and exit codes."""


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

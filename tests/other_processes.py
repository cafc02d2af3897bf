"""What tests ask of processes that they did not start themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether a condition became true in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

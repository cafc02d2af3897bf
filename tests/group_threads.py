"""Gloo keeps three threads for every process group that anything still refers to.

A test process that trains again and again refers to all its old models (autograd hooks hold them
from C++, where no collector looks), hence to thousands of threads, each of which wakes up many
times a second. `forget` takes the groups away from what the destroyed run left behind.
"""

from __future__ import annotations

import contextlib
import gc
import os

ENOUGH = 300
"""Threads from which on the search is worth its second."""


def forget() -> None:
    """Set every attribute and dict value that is a process group to None; call after destroying.

    Does nothing as long as the process has few threads.
    """
    if len(os.listdir("/proc/self/task")) < ENOUGH:
        return
    from torch.distributed import ProcessGroup, is_initialized

    assert not is_initialized(), "destroy the process groups first"
    gc.collect()
    for found in gc.get_objects():
        values = found if type(found) is dict else _attributes(found)
        if not values:
            continue
        for name in [name for name, x in values.items() if isinstance(x, ProcessGroup)]:
            values[name] = None
    gc.collect()


def _attributes(found: object) -> dict[str, object] | None:
    with contextlib.suppress(Exception):
        values = object.__getattribute__(found, "__dict__")
        return values if type(values) is dict else None
    return None

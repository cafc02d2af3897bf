"""Gloo keeps three threads for every process group that anything still refers to.

A test process that trains again and again refers to all its old models (autograd hooks hold them
from C++, where no collector looks), hence to thousands of threads, each of which wakes up many
times a second. `forget` takes the groups away from what the destroyed run left behind.
"""

from __future__ import annotations

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
    # Both searches run in C; asking every object for its attributes took seconds.
    seen = gc.get_referents(*gc.get_objects())
    groups = {id(x): x for x in seen if type(x) is ProcessGroup}
    del seen
    for found in gc.get_referrers(*groups.values()):
        values = found if type(found) is dict else getattr(found, "__dict__", {})
        if values is groups:
            continue
        for name in [name for name, x in values.items() if type(x) is ProcessGroup]:
            values[name] = None
    groups.clear()
    gc.collect()

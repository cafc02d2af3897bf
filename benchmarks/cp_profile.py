"""What a pass of context-parallel attention spends its time on, by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cp_tables
import torch

LISTED = 8  # kernels that take longest


def profile(run: Callable[[], object], together: Callable[[], object]) -> dict[str, Any]:
    """Time NCCL's kernels took in one pass of ``run``, and how much of it nothing else covered.

    ``together`` returns once every rank has called it: the profiler starts at different times, and
    a rank that comes first would wait in NCCL's kernels for the others.
    """
    from torch.autograd import DeviceType

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        together()
        run()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    took: dict[str, float] = {}
    for event in trace.events() or []:
        # Collectives also leave named ranges ("nccl:...") among the kernels.
        if event.device_type != DeviceType.CUDA or event.name.startswith("nccl:"):
            continue
        span = (event.time_range.start, event.time_range.end)
        spans["nccl" in event.name.lower()].append(span)
        name = event.name.split("<")[0].split("(")[0].removeprefix("void ")[:60]
        took[name] = took.get(name, 0.0) + (span[1] - span[0]) / 1e3
    longest = sorted(took, key=lambda name: -took[name])[:LISTED]
    found: dict[str, Any] = {"kernels_ms": {name: round(took[name], 3) for name in longest}}
    if spans[True]:  # nothing was seen of NCCL: no figure rather than 0
        total, alone = cp_tables.exposed(spans[True], spans[False])
        found |= {"transfer_ms": round(total / 1e3, 4), "exposed_ms": round(alone / 1e3, 4)}
    return found

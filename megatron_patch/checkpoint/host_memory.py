"""Whether a node's memory holds what its ranks bring there for a save or a load.

A save copies what a rank writes to host memory: its share of the optimizer state (main weights and
two moments, 12 bytes a parameter, the format of the file) and, on the first data-parallel rank of
each model-parallel shard, the weights. Without room for that every save kills the job, and the
first one comes after hours.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatron_patch.checkpoint import reshardable
from megatron_patch.checkpoint.optimizer_state import parts as owners
from megatron_patch.schema.problem import Problem

if TYPE_CHECKING:
    from megatron_patch.checkpoint.collective import Collective
    from megatron_patch.checkpoint.content import Parts

STATE = 12
"""Bytes a parameter: FP32 main weight and both moments."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of host memory one rank fills, and where."""

    node: str
    limit: int
    bytes: int


def of_rank(parts: Parts, optimizer_sharding: str) -> int:
    """Bytes this rank holds in host memory at the worse of a save and a load of its checkpoints."""
    weights = optimizer = 0
    for _, model in parts.models().items():
        for parameter in model.parameters():
            if _is_first_replica(parameter):
                weights += parameter.numel() * parameter.element_size()
                optimizer += 0 if parts.distributed_optimizer else STATE * parameter.numel()
    loads = 0
    for part in owners(parts.optimizer) if parts.distributed_optimizer else ():
        save, load = _shares(part, optimizer_sharding == "fully_reshardable")
        optimizer += STATE * save
        loads += STATE * load
    return max(weights + optimizer, loads)


def _is_first_replica(parameter: Any) -> bool:
    from megatron.core import parallel_state

    if getattr(parameter, "allreduce", True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_expert_data_parallel_group()
    return bool(group.rank() == 0)


def _shares(part: Any, whole: bool) -> tuple[int, int]:
    """(elements at a save, at a load) of a sharded optimizer; ``whole``: of whole parameters."""
    if not hasattr(part, "data_parallel_group"):  # Muon's: this rank has what is in its groups
        owned = sum(p.numel() for group in part.optimizer.param_groups for p in group["params"])
        return owned, owned
    rank = part.data_parallel_group.rank()
    save = load = 0
    for place in reshardable.places(part):
        mine = dict(place.shares).get(rank, 0)
        if not mine:
            continue
        full = sum(count for _, count in place.shares) if whole else mine
        # What another rank writes is sent from a copy.
        save += full if place.owner == rank else mine
        load += full
    return save, load


def limit() -> int:
    """Bytes the processes of this node may fill together."""
    whole = psutil.virtual_memory().total + psutil.swap_memory().total
    groups = _group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min([whole, *groups])


def _group_limits(membership: Path, root: Path) -> list[int]:
    """Limits of this process's control groups (version 2 and 1) and of those around them."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = folder / path.lstrip("/")
        for group in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):  # "max", or not seen from a container
                found.append(int((group / name).read_text()))
            if group == folder:
                break
    return found


def check(parts: Parts, optimizer_sharding: str, ranks: Collective) -> tuple[str, list[Problem]]:
    """A line for the log, and what speaks against starting. Collective, the same on all ranks."""
    mine = Need(socket.gethostname(), limit(), of_rank(parts, optimizer_sharding))
    nodes: dict[str, list[Need]] = {}
    for need in ranks.all_gather(mine):
        nodes.setdefault(need.node, []).append(need)
    most = max(nodes.values(), key=lambda needs: sum(need.bytes for need in needs))
    for node, needs in nodes.items():
        total = sum(need.bytes for need in needs)
        if total > min(need.limit for need in needs):
            problem = _problem(node, needs, parts, optimizer_sharding)
            return f"checkpoints: {_numbers(most)}", [problem]
    return f"checkpoints: {_numbers(most)}", []


def _numbers(needs: list[Need]) -> str:
    total = sum(need.bytes for need in needs)
    limit, largest = min(need.limit for need in needs), max(need.bytes for need in needs)
    return (
        f"a save or a load takes {total / GIB:,.1f} GiB of {limit / GIB:,.1f} GiB of host memory "
        f"on a node of {len(needs)} rank(s), {largest / GIB:,.1f} GiB on the rank that holds most"
    )


def _problem(node: str, needs: list[Need], parts: Parts, optimizer_sharding: str) -> Problem:
    remedy = "use more nodes, so that each holds less of the state"
    if not parts.distributed_optimizer:
        remedy = "set parallel.use_distributed_optimizer: true, or use more nodes"
    elif optimizer_sharding == "fully_reshardable":
        remedy += (
            ", or checkpoint.optimizer_sharding: dp_reshardable, which puts no whole parameters "
            "together (docs/checkpoints.md says what it cannot do)"
        )
    return Problem("checkpoint", f"{_numbers(needs)} ({node}), which is not there: {remedy}")

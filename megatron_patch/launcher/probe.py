"""Bandwidth of all-reduce, measured by one rank a GPU before training; a program of ``rank.py``.

Among the ranks of every node (NVLink), and among all ranks where there are several nodes (the
network).

``<out>/links.json``: a list of ``{"node", "kind", "what", "gb_per_s"}``, written by the first rank:
``kind`` is ``node`` (one row a rank) or ``network`` (one row).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

REPEATS = 5
TIMEOUT = timedelta(seconds=180)  # for NCCL to find every node, and for one collective


def main(argv: list[str] | None = None) -> int:
    """Measure and gather; every rank calls it."""
    parser = argparse.ArgumentParser(prog="probe", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=256)
    args = parser.parse_args(argv)
    import torch
    import torch.distributed as dist

    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=device if cuda else None
    )
    try:
        found = measure(device, per_node=per_node, size=args.megabytes << 20)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
        if dist.get_rank() == 0:
            rows = [row for rank_rows in gathered for row in rank_rows]
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "links.json").write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        dist.destroy_process_group()
    return 0


def measure(device: Any, *, per_node: int, size: int) -> list[dict[str, Any]]:
    """This rank's rows. Collective over all ranks.

    Args:
        device: where the buffer is.
        per_node: ranks on every node.
        size: bytes of one message.
    """
    import torch
    import torch.distributed as dist

    from megatron_patch.faults import ledger

    rank, world = dist.get_rank(), dist.get_world_size()
    nodes, node = world // per_node, ledger.node()
    buffer = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    rows: list[dict[str, Any]] = []
    # new_group is collective over the world: every rank makes every group, in the same order.
    groups = [dist.new_group(range(n * per_node, (n + 1) * per_node)) for n in range(nodes)]
    if per_node > 1:
        rate = _rate(buffer, groups[rank // per_node])
        rows.append({"node": node, "kind": "node", "what": f"GPU {rank % per_node}"} | rate)
    if nodes > 1:
        rate = _rate(buffer, None)
        if rank == 0:
            rows.append({"node": node, "kind": "network", "what": f"{nodes} nodes"} | rate)
    return rows


def _rate(buffer: Any, group: Any) -> dict[str, float]:
    """Bus bandwidth of all-reduce in ``group``: median, after two unmeasured ones.

    What every link carries in a ring of n ranks, 2 (n-1)/n of the message. Collective over all
    ranks: the barriers are everybody's.
    """
    import torch
    import torch.distributed as dist

    times = []
    for _ in range(REPEATS + 2):
        dist.barrier()
        if buffer.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if buffer.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    ranks = dist.get_world_size(group)
    moved = 2 * (ranks - 1) / ranks * buffer.nbytes
    return {"gb_per_s": moved / statistics.median(times[2:]) / 1e9}


if __name__ == "__main__":
    sys.exit(main())

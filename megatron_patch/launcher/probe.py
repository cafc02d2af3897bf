"""Bandwidth of collectives, measured by one rank a GPU before training; a program of ``rank.py``.

Two figures a rank: all-reduce among the ranks of its node (NVLink), and sending to the next node
while receiving from the one before (the network).

``<out>/links.json``: a list of ``{"node", "kind", "what", "gb_per_s"}``, written by the first rank.
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
        device: where the buffers are.
        per_node: ranks on every node.
        size: bytes of one message.
    """
    import torch
    import torch.distributed as dist

    from megatron_patch.launcher.preflight import node_name

    rank, world = dist.get_rank(), dist.get_world_size()
    nodes, node, local = world // per_node, rank // per_node, rank % per_node
    buffer = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    other = torch.empty_like(buffer)
    rows = []
    # new_group is collective over the world: every rank makes every group, in the same order.
    groups = [dist.new_group(range(n * per_node, (n + 1) * per_node)) for n in range(nodes)]
    if per_node > 1:
        seconds = _median_time(device, lambda: dist.all_reduce(buffer, group=groups[node]))
        # Bus bandwidth: what every link carries in a ring, 2 (n-1)/n of the message.
        rate = 2 * (per_node - 1) / per_node * size / seconds / 1e9
        rows.append({"kind": "node", "what": f"all-reduce, GPU {local}", "gb_per_s": rate})
    if nodes > 1:
        to, source = (rank + per_node) % world, (rank - per_node) % world

        def ring() -> None:
            operations = [
                dist.P2POp(dist.isend, buffer, to),
                dist.P2POp(dist.irecv, other, source),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        rate = size / _median_time(device, ring) / 1e9
        rows.append({"kind": "network", "what": f"ring, GPU {local}", "gb_per_s": rate})
    return [{"node": node_name(), **row} for row in rows]


def _median_time(device: Any, run: Any) -> float:
    """Seconds of one call, the median after two unmeasured ones."""
    import torch
    import torch.distributed as dist

    times = []
    for repeat in range(REPEATS + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())

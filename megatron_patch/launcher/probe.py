"""Bandwidth of collectives, measured by one rank a GPU before training; a program of ``rank.py``.

A rank's figures: all-reduce among the ranks of its node (NVLink), and exchanging with several other
nodes, one after the other (the network). Nodes meet in pairs because the time of a pair has nothing
of a third node in it: a node that is slow with everybody is slow itself. In a ring, the neighbors
of a slow node are as slow as it is.

``<out>/links.json``: a list of ``{"node", "kind", "what", "gb_per_s"}``, for the network with the
other node's name as ``"peer"`` as well; written by the first rank.
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
PAIR_REPEATS = 3  # of every one of a node's pairs
ALL_PAIRS = 8  # nodes up to which everybody meets everybody; 7 rounds, and 7 for more nodes too
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
    rows: list[dict[str, Any]] = []
    # new_group is collective over the world: every rank makes every group, in the same order.
    groups = [dist.new_group(range(n * per_node, (n + 1) * per_node)) for n in range(nodes)]
    if per_node > 1:
        seconds = _median_time(device, lambda: dist.all_reduce(buffer, group=groups[node]))
        # Bus bandwidth: what every link carries in a ring, 2 (n-1)/n of the message.
        rate = 2 * (per_node - 1) / per_node * size / seconds / 1e9
        rows.append({"kind": "node", "what": f"all-reduce, GPU {local}", "gb_per_s": rate})
    names: list[Any] = [None] * world
    dist.all_gather_object(names, node_name())
    for partners in meetings(nodes):
        partner = partners[node]
        peer = None if partner is None else partner * per_node + local

        def exchange(peer: int | None = peer) -> None:
            if peer is None:
                return
            operations = [
                dist.P2POp(dist.isend, buffer, peer),
                dist.P2POp(dist.irecv, other, peer),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        # Also where nobody is met: the barriers in it are everybody's.
        seconds = _median_time(device, exchange, repeats=PAIR_REPEATS)
        if peer is not None:
            row = {"kind": "network", "what": f"GPU {local}", "gb_per_s": size / seconds / 1e9}
            rows.append(row | {"peer": names[peer]})
    return [{"node": names[rank], **row} for row in rows]


def meetings(nodes: int) -> list[list[int | None]]:
    """Who exchanges with whom: a list of rounds, each the partner of every node (None: it waits).

    Up to `ALL_PAIRS` nodes everybody meets everybody. More nodes meet their neighbors, which are
    likely to be under the same switch, and some that are spread over all nodes: no more rounds than
    the `ALL_PAIRS` nodes need, so the time does not grow.
    """
    if nodes < 2:
        return []
    # The circle method: i meets j in round (i + j) % circle, the last node whoever is left.
    even = nodes + nodes % 2
    circle = even - 1

    def round_of(number: int) -> list[int | None]:
        partners: list[int | None] = [(number - node) % circle for node in range(circle)]
        left = number * (even // 2) % circle
        partners[left] = even - 1
        partners.append(left)
        # With an odd number of nodes, the last one is made up and its partner waits.
        return [None if p is None or p >= nodes else p for p in partners[:nodes]]

    if nodes <= ALL_PAIRS:
        return [round_of(number) for number in range(circle)]
    near: list[list[int | None]] = []
    for first in (0, 1):  # 0-1, 2-3, ..., then 1-2, 3-4, ...
        partners = [node + 1 if (node - first) % 2 == 0 else node - 1 for node in range(nodes)]
        near.append([p if 0 <= p < nodes else None for p in partners])
    far = ALL_PAIRS - 1 - len(near)
    return near + [round_of(number * circle // far) for number in range(far)]


def _median_time(device: Any, run: Any, *, repeats: int | None = None) -> float:
    """Seconds of one call, the median after two unmeasured ones; collective over all ranks."""
    import torch
    import torch.distributed as dist

    times = []
    for repeat in range((repeats or REPEATS) + 2):
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

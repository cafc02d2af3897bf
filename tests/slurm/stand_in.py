"""A training program with the trainer's contract and nothing else; without torch, it starts fast.

stand_in.py RUN_DIR STEPS [hold:STEP]: one number, changed every step by a sum
over the ranks; a checkpoint every 10 steps and on a graceful stop; heartbeat, FINISHED and exit
codes as the trainer leaves them. ``hold`` stays in that step until the file RUN_DIR/go is there or
a stop was asked for, so that a test needs no clock.
"""

import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path

run_dir, steps = Path(sys.argv[1]), int(sys.argv[2])
held = int(sys.argv[3].removeprefix("hold:")) if len(sys.argv) > 3 else 0
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
asked = False


def ask(*_):
    global asked
    asked = True


class Ranks:
    """Sums over all ranks through the first one; a peer that dies is an error for the others."""

    def __init__(self):
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 5)
        self.peers = []
        if rank == 0:
            server = socket.create_server(address, backlog=world)
            for _ in range(world - 1):
                self.peers.append(server.accept()[0].makefile("rw"))
            self.peers.sort(key=lambda p: int(p.readline()))
            return
        while not self.peers:
            try:
                self.peers.append(socket.create_connection(address).makefile("rw"))
            except ConnectionRefusedError:
                time.sleep(0.1)
        print(rank, file=self.peers[0], flush=True)

    def sum(self, value):
        if rank:
            print(value.hex(), file=self.peers[0], flush=True)
            return self.read(self.peers[0])
        total = value
        for peer in self.peers:
            total += self.read(peer)
        for peer in self.peers:
            print(total.hex(), file=peer, flush=True)
        return total

    def read(self, peer):
        line = peer.readline()
        if not line.endswith("\n"):
            raise ConnectionError("a peer is gone")
        return float.fromhex(line)


def save(step, value):
    if rank == 0:
        temporary = checkpoint.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": step, "value": value.hex()}))
        os.replace(temporary, checkpoint)
    ranks.sum(0.0)


signal.signal(signal.SIGUSR1, ask)
signal.signal(signal.SIGTERM, ask)
checkpoint = run_dir / "checkpoint.json"
saved = {"step": 0, "value": (1.0).hex()}
if checkpoint.exists():
    saved = json.loads(checkpoint.read_text())
step, value = saved["step"], float.fromhex(saved["value"])
print(
    f"rank {rank} of {world} local {os.environ['LOCAL_RANK']} on {os.environ['SLURMD_NODENAME']} "
    f"at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, from step {step}",
    flush=True,
)
ranks = Ranks()
while step < steps:
    if rank == 0:
        Path(os.environ["MEGATRON_PATCH_HEARTBEAT"]).write_text(f"{step + 1}\n")
    while (step + 1, rank) == (held, 0) and not (run_dir / "go").exists():
        if asked:
            break
        time.sleep(0.05)
    value += ranks.sum(math.sin(value * (rank + 1)) / world)
    step += 1
    if rank == 0:
        with (run_dir / "losses").open("a") as out:
            out.write(f"{step} {value.hex()}\n")
    stop = ranks.sum(float(asked)) > 0
    if step % 10 == 0 or stop:
        save(step, value)
    if stop:
        print(f"stopped gracefully after step {step}", flush=True)
        sys.exit(0)
save(step, value)
if rank == 0:
    (run_dir / "FINISHED").write_text(json.dumps({"step": step}) + "\n")
print("finished", flush=True)

"""Disks, directories, data and network that fail or change under a run."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from free_port import free_port

from fault_lab import hooks
from fault_lab.case import Case, Scene
from fault_lab.lab import Outcome, Running
from fault_lab.processes import PEER, Inject, beside, in_rank, slow_steps

# ------------------------------------------------------------------------------------------- disks


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(4096))
        except OSError:
            return


def full_disk(after: int, *, free: int | None = None) -> Inject:
    """A disk of 8 MB is full after a step; ``free``: somebody makes room after that step."""

    def inject(scene: Scene) -> Outcome:
        folder = scene.lab.run_dir
        folder.mkdir(exist_ok=True)
        mount("-t", "tmpfs", "-o", "size=8m", "none", str(folder))

        def outside(attempt: Running) -> None:
            attempt.wait_step(after)
            fill(folder)
            attempt.mark("the disk is full")
            if free is not None:
                attempt.wait_step(free)
                (folder / "ballast").unlink()

        return scene.play(hook=slow_steps(0.15), outside=outside)

    return inject


def free_disk(scene: Scene) -> None:
    """What a person does: make room; what failed saves wrote is gone already."""
    left = [f for f in (scene.lab.store / "aside").glob("*/*") if f.name != "reason.txt"]
    assert not left, left
    (scene.lab.run_dir / "ballast").unlink(missing_ok=True)


def read_only_store(scene: Scene) -> Outcome:
    def act(attempt: Running) -> None:
        # A mount of its own: one in which a lock file is open for writing stays writable.
        mount("--bind", str(scene.lab.store), str(scene.lab.store))
        mount("-o", "remount,ro,bind", str(scene.lab.store))
        attempt.mark("the store is read-only")

    return beside(act)(scene)


def no_more_files() -> None:
    """Every further open() fails."""
    hooks.injected("RLIMIT_NOFILE is 3")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))


DISKS = [
    Case(name="disk full at a save, room at the next", resumes=False, code=0, needs_mount=True,
         inject=full_disk(2, free=4), says="the disk or quota is full"),
    Case(name="disk full until the end", inject=full_disk(4), needs_mount=True, repair=free_disk,
         says="the disk or quota is full", most_lost=5),
    Case(name="checkpoint directory becomes read-only", inject=read_only_store, needs_mount=True,
         says="Read-only file system", most_lost=5,
         repair=lambda scene: mount("-o", "remount,rw,bind", str(scene.lab.store))),
    Case(name="out of file descriptors", says="Too many open files", most_lost=5,
         inject=lambda scene: scene.play(hook=in_rank(0, "step end", no_more_files, step=4))),
]  # fmt: skip

# ------------------------------------------------------------------------------------------- files


def change_data(change: Callable[[Path], None]) -> Inject:
    """Change the token file while it is used."""

    def act(attempt: Running) -> None:
        attempt.mark("corpus.bin changes")
        change(attempt.lab.folder / "corpus.bin")

    def inject(scene: Scene) -> Outcome:
        scene.keep["bytes"] = (scene.lab.folder / "corpus.bin").read_bytes()
        return beside(act, step=2)(scene)

    return inject


def put_back(scene: Scene) -> None:
    (scene.lab.folder / "corpus.bin").write_bytes(scene.keep["bytes"])


def damaged_checkpoint(scene: Scene) -> Outcome:
    """Train past two checkpoints, flip a bit of the newest, go on."""
    scene.first_part(6)
    file = sorted(sorted(scene.lab.store.glob("step_*"))[-1].glob("__*.distcp"))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    return scene.play()


def empty_marker(scene: Scene) -> Outcome:
    scene.first_part()
    (scene.lab.run_dir / "FINISHED").write_bytes(b"")
    return scene.play()


FILES = [
    # It stays open: nothing is lost.
    Case(name="data file deleted while training", inject=change_data(os.unlink), code=0,
         resumes=False),
    Case(name="data file truncated while training", rank_code=2, repair=put_back,
         inject=change_data(lambda path: os.truncate(path, 0)),
         says=r"ended at byte .* while it was used"),
    Case(name="newest checkpoint: one bit flipped", inject=damaged_checkpoint, code=0,
         says="refused: .*SHA-256", resumes=False, quick=True),
    Case(name="FINISHED without content", inject=empty_marker, code=0, resumes=False),
]  # fmt: skip

# ----------------------------------------------------------------------------------------- network


def port_in_use(scene: Scene) -> Outcome:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        return scene.play(port=holder.getsockname()[1])


def dead_host(scene: Scene) -> Outcome:
    """Node 1 of 2 looks for a first node that is not there."""
    scene.lab.attempts += 1  # counted where node 0 starts
    return scene.play(node=(1, 2), ranks=1, address="127.0.0.2", port=free_port(), limit=90)


def missing_node(scene: Scene) -> Outcome:
    """Node 0 of 2 waits for a second node that never comes."""
    return scene.play(node=(0, 2), ranks=1, limit=150)


def lost_node(scene: Scene) -> Outcome:
    """One of two nodes goes away in the middle: torchrun and its rank die there."""
    port = free_port()
    first, second = (
        scene.lab.start(node=(n, 2), ranks=1, port=port, hook=slow_steps()) for n in (0, 1)
    )
    first.wait_step(4)
    first.mark("SIGKILL to torchrun of node 1")
    os.kill(second.pid, signal.SIGKILL)
    second.finish(20, alone=False)
    return first.finish(80)


NETWORK = [
    Case(name="port in use", inject=port_in_use, says="EADDRINUSE"),
    Case(name="rendezvous host is dead", inject=dead_host,
         says="failed to connect|timed out|Timed out"),
    Case(name="second node never comes", inject=missing_node, says="[Tt]imed out|timeout",
         sets=("parallel.distributed_timeout_minutes=0.1",)),
    Case(name="a node is lost in the middle", inject=lost_node, says=PEER),
]  # fmt: skip

CASES = [*DISKS, *FILES, *NETWORK]

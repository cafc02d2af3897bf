"""Nodes emulated on this machine: ``launch/node.sh`` once for each, in processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from free_port import free_port

ROOT = Path(__file__).resolve().parents[2]
SOCKETS_ALONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""NCCL then has only sockets, as between two machines."""
Found = TypeVar("Found")


class Nodes:
    """A job of ``nodes`` nodes with ``ranks`` ranks each, in ``folder``.

    Args:
        folder: working directory; gets ``attempt/`` and ``node0.log``, ``node1.log`` ...
        config: text of the run's configuration.
        device: ``cpu`` or ``cuda``; node n gets GPUs n * ranks and up.
        agent: ``torchrun`` or ``nvrx``.
        keys: further settings, ``section.key=value``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: str,
        device: str,
        nodes: int = 1,
        ranks: int = 2,
        agent: str = "torchrun",
        keys: tuple[str, ...] = (),
    ) -> None:
        self.device = device
        self.attempt = folder / "attempt"
        for name in ("exit", "asked"):
            (self.attempt / name).mkdir(parents=True)
        (folder / "run.yaml").write_text(config)
        job = os.environ | {
            "PYTHON": sys.executable, "DEVICE": device, "RANK_AGENT": agent, "MAX_RESTARTS": "2",
            "ATTEMPT_DIR": str(self.attempt), "CONFIG": "run.yaml",
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": str(nodes),
            "RANKS_PER_NODE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
            "MEGATRON_PATCH_ATTEMPT_DIR": str(self.attempt),
            "MEGATRON_PATCH_HEARTBEAT": str(self.attempt / "step"),
            "TORCH_FR_DUMP_TEMP_FILE": str(self.attempt / "nccl_trace_rank_"),
        }  # fmt: skip
        job |= SOCKETS_ALONE if device == "cuda" else {"TRITON_INTERPRET": "1"}
        command = ["bash", ROOT / "launch" / "node.sh", "train", "megatron_patch", "train"]
        command += ["--config", "run.yaml", *(part for key in keys for part in ("--set", key))]
        self.logs = [folder / f"node{n}.log" for n in range(nodes)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for n, log in enumerate(self.logs):
            local = folder / f"local{n}"
            local.mkdir()
            own = {"SLURM_NODEID": str(n), "SLURMD_NODENAME": f"node{n}", "LOCAL_DIR": str(local)}
            if device == "cuda":
                gpus = range(n * ranks, (n + 1) * ranks)
                own["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
            with log.open("wb") as out:
                self.processes.append(
                    subprocess.Popen(command, cwd=folder, env=job | own, stdout=out, stderr=out)
                )

    def kill(self) -> None:
        """Everything that carries this job's attempt in its environment."""
        for process in self.processes:
            process.kill()
            process.wait()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"ATTEMPT_DIR={self.attempt}" in (folder / "environ").read_text().split("\0"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def wait(self, condition: Callable[[], Found], seconds: float = 900.0) -> Found:
        """What ``condition`` gives as soon as it is true; nobody may have ended before that."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert all(p.poll() is None for p in self.processes), self.words()
            assert time.monotonic() < end, self.words()
            time.sleep(0.02)
        return found

    def ended(self, seconds: float = 900.0) -> list[int]:
        """Exit codes of the node scripts."""
        end = time.monotonic() + seconds
        return [p.wait(max(1.0, end - time.monotonic())) for p in self.processes]

    def words(self) -> str:
        """The last lines of every node and of its ranks."""
        files = [*self.logs, *sorted(self.attempt.glob("rank_*.log"))]
        return "\n".join(f"== {f.name}\n{f.read_text()[-2000:]}" for f in files if f.exists())

    def text(self, rank: int) -> str:
        """What a rank has written so far."""
        log = self.attempt / f"rank_{rank:05d}.log"
        return log.read_text() if log.exists() else ""

    def rank(self, number: int, restart: int = 0) -> int:
        """Process of a rank; 0 while there is none."""
        wanted = {f"RANK={number}", f"TORCHELASTIC_RESTART_COUNT={restart}",
                  f"MEGATRON_PATCH_ATTEMPT_DIR={self.attempt}"}  # fmt: skip
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted <= set((folder / "environ").read_text().split("\0")):
                    return int(folder.name)
            except OSError:
                continue
        return 0

    def codes(self) -> dict[str, str]:
        """Rank -> exit code that it left."""
        return {f.name: f.read_text().split()[0] for f in (self.attempt / "exit").iterdir()}

"""The real ft_launcher of nvidia-resiliency-ext, where it is installed, started by node.sh.

Elsewhere these tests are skipped: no environment of this repository installs it. What is rendered
for it is tested everywhere (test_agents.py). It ran with release 0.4.1; docs/faults.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900.0
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia_resiliency_ext") is None,
        reason="nvidia-resiliency-ext is not installed",
    ),
]

CONFIG = """\
name: t
run_dir: run
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 16}
training: {device: cpu, precision: fp32, train_steps: 600, global_batch_size: 2,
           micro_batch_size: 1}
optimizer: {lr: 1.0e-2}
data: {blend: [{path: tiny}], num_workers: 0}
attention: {backend: reference}
checkpoint: {interval: 20}
faults: {hang_seconds: 10, hang_pause_seconds: 15, hang_startup_seconds: 300}
logging: {interval: 5, tensorboard: false}
"""


class Node:
    """node.sh with two ranks."""

    def __init__(self, folder: Path) -> None:
        self.attempt = folder / "attempt"
        self.attempt.mkdir()
        (folder / "local").mkdir()
        (folder / "run.yaml").write_text(CONFIG)
        beat = self.attempt / "step"
        environment = os.environ | {
            "PYTHON": sys.executable, "DEVICE": "cpu", "RANK_AGENT": "nvrx", "MAX_RESTARTS": "2",
            "LOCAL_DIR": str(folder / "local"), "ATTEMPT_DIR": str(self.attempt),
            "CONFIG": "run.yaml", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NODEID": "0",
            "SLURM_NNODES": "1", "RANKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
            "MEGATRON_PATCH_ATTEMPT_DIR": str(self.attempt), "MEGATRON_PATCH_HEARTBEAT": str(beat),
            "TRITON_INTERPRET": "1",
        }  # fmt: skip
        command = ["bash", ROOT / "launch" / "node.sh", "train", "megatron_patch", "train"]
        self.log = folder / "node.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--config", "run.yaml"], cwd=folder, env=environment, stdout=out,
                stderr=out,
            )  # fmt: skip

    def kill(self) -> None:
        """Everything that carries this test's attempt in its environment."""
        self.process.kill()
        self.process.wait()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"ATTEMPT_DIR={self.attempt}" in (folder / "environ").read_text().split("\0"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def wait(self, condition: Any) -> Any:
        end = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end
            time.sleep(0.02)
        return found

    def rank(self, number: int, restart: int) -> int:
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

    def resumed(self, times: int) -> bool:
        """Whether the first rank has begun to train for the n-th time, and is past that step."""
        log = self.attempt / "rank_00000.log"
        text = log.read_text() if log.exists() else ""
        starts = re.split("checkpoint: starting|resuming after", text)[1:]
        return len(starts) == times and "| loss" in starts[-1]

    def codes(self) -> dict[str, str]:
        return {f.name: f.read_text().split()[0] for f in (self.attempt / "exit").iterdir()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path)
    yield started
    started.kill()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    from megatron_patch.data.prepare import PrepareOptions, prepare

    (tmp_path / "text.txt").write_text(" ".join(str(k * k) for k in range(3000)))
    options = PrepareOptions(
        inputs=[str(tmp_path / "text.txt")], out=str(tmp_path / "tiny"), workers=1, quiet=True
    )
    prepare(options)
    return tmp_path / "tiny"


def test_a_killed_rank_and_a_hang_are_restarted(corpus: Path, node: Node, tmp_path: Path) -> None:
    for restart, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        pid = node.wait(lambda restart=restart: node.rank(1, restart))
        node.wait(lambda restart=restart: node.resumed(restart + 1))
        os.kill(pid, number)
    assert node.process.wait(PATIENCE) == 0, node.log.read_text()[-3000:]
    assert node.codes() == {"00000": "0", "00001": "0"}
    assert (tmp_path / "run" / "FINISHED").exists()
    entries = [json.loads(x) for x in (tmp_path / "run" / "crashes.jsonl").read_text().splitlines()]
    # The peer of the killed rank, then the peer of the one that was stopped.
    assert [(e["rank"], e["exit_code"]) for e in entries] == [(0, 1), (0, 6)]
    (summary,) = (tmp_path / "run" / "hangs").glob("*/summary.txt")
    assert "rank 1 (" in summary.read_text().splitlines()[0]


def test_a_data_error_is_not_started_again(node: Node) -> None:
    assert node.process.wait(PATIENCE) == 1
    assert node.codes() == {"00000": "2", "00001": "2"}
    assert "not started again" in (node.attempt / "rank_00000.log").read_text()

"""Errors that a retry would meet again, in real ranks started as launch/node.sh starts them.

One torchrun a node, each in a directory of its own: what one node lacks, the other may have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from free_port import free_port
from training_ranks import run_ranks

pytestmark = pytest.mark.multiprocess

PATIENCE = 300.0
CONFIG = """\
name: t
run_dir: {run}
model: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 16}}
training: {{device: cpu, precision: fp32, train_steps: 4, global_batch_size: 2,
           micro_batch_size: 1}}
optimizer: {{lr: 1.0e-2}}
data: {{blend: [{{path: tiny}}], num_workers: 0}}
attention: {{backend: reference}}
checkpoint: {{interval: 1}}
logging: {{interval: 1, tensorboard: false}}
"""


def node(folder: Path, corpus: Path, number: int) -> Path:
    """The directory of a node: configuration and data."""
    path = folder / f"node{number}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.yaml").write_text(CONFIG.format(run=folder / "run"))
    for file in corpus.parent.glob("tiny*"):
        shutil.copy(file, path)
    return path


def launch(folder: Path, nodes: list[Path], *sets: str) -> dict[int, tuple[int, str]]:
    """One rank a node, to the end; rank -> the exit code and the reason that it left."""
    attempt = folder / f"attempt{len(list(folder.glob('attempt*')))}"
    attempt.mkdir()
    port = free_port()
    environment = os.environ | {
        "MEGATRON_PATCH_ATTEMPT_DIR": str(attempt), "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }  # fmt: skip
    words = ["--config", "run.yaml", *(word for item in sets for word in ("--set", item))]
    started = []
    for number, path in enumerate(nodes):
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}",
            "--nproc-per-node=1", f"--node-rank={number}", "--rdzv-backend=static",
            "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0",
            "--signals-to-handle=SIGINT", "-m", "megatron_patch.launcher.rank", "megatron_patch",
            "train", *words,
        ]  # fmt: skip
        with (attempt / f"node{number}.log").open("wb") as out:
            started.append(
                subprocess.Popen(
                    command, cwd=path, env=environment, stdout=out, stderr=out,
                    start_new_session=True,
                )
            )  # fmt: skip
    try:
        for process in started:
            process.wait(PATIENCE)
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    found = {}
    for file in (attempt / "exit").iterdir():
        code, _, reason = file.read_text().strip().split(" ", 2)
        found[int(file.name)] = (int(code), reason)
    return found


def test_data_that_one_node_does_not_see(tmp_path, corpus):
    """Both ranks end with 2 and say what is missing: no restart, no requeue."""
    nodes = [node(tmp_path, corpus, n) for n in range(2)]
    for file in nodes[1].glob("tiny*"):
        file.unlink()
    found = launch(tmp_path, nodes)
    assert {rank: code for rank, (code, _) in found.items()} == {0: 2, 1: 2}
    assert all("tiny.manifest.json" in reason for _, reason in found.values()), found


def test_damaged_checkpoints_end_every_attempt_alike(tmp_path, corpus):
    """Exit code 4 from both ranks, and all stays for the next attempt to find the same."""
    nodes = [node(tmp_path, corpus, n) for n in range(2)]
    plan = [{"set": ["training.exit_at_step=2"]}]
    (trained,) = run_ranks(nodes[0], corpus, 2, plan, config=nodes[0] / "run.yaml")
    assert [rank["code"] for rank in trained] == [0, 0]
    saved = tmp_path / "run" / "checkpoints"
    for shard in saved.glob("step_*/__*.distcp"):
        shard.write_bytes(shard.read_bytes()[::-1])
    before = sorted(saved.rglob("*"))
    (again,) = run_ranks(nodes[0], corpus, 2, [{"set": []}], config=nodes[0] / "run.yaml")
    assert [rank["code"] for rank in again] == [4, 4]
    assert "no good checkpoint" in again[0]["error"]
    assert sorted(saved.rglob("*")) == before and not (tmp_path / "run" / "FINISHED").exists()

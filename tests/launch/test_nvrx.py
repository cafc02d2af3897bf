"""The real ft_launcher of nvidia-resiliency-ext, where it is installed, started by node.sh.

Elsewhere these tests are skipped: no environment of this repository installs it. What is rendered
for it is tested everywhere (test_agents.py). It ran with release 0.4.1; docs/clusters.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_nodes import Nodes

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


def resumed(job: Nodes, times: int) -> bool:
    """Whether the first rank has begun to train for the n-th time, and is past that step."""
    starts = re.split("checkpoint: starting|resuming after", job.text(0))[1:]
    return len(starts) == times and "| loss" in starts[-1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tmp_path, config=CONFIG, device="cpu", agent="nvrx")
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


def test_a_killed_rank_and_a_hang_are_restarted(corpus, node, tmp_path):
    for restart, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        pid = node.wait(lambda restart=restart: node.rank(1, restart))
        node.wait(lambda restart=restart: resumed(node, restart + 1))
        os.kill(pid, number)
    assert node.ended() == [0], node.words()
    assert node.codes() == {"00000": "0", "00001": "0"}
    assert (tmp_path / "run" / "FINISHED").exists()
    entries = [json.loads(x) for x in (tmp_path / "run" / "crashes.jsonl").read_text().splitlines()]
    # The peer of the killed rank, then the peer of the one that was stopped.
    assert [(e["rank"], e["exit_code"]) for e in entries] == [(0, 1), (0, 6)]
    (summary,) = (tmp_path / "run" / "hangs").glob("*/summary.txt")
    assert "rank 1 (" in summary.read_text().splitlines()[0]


def test_a_data_error_is_not_started_again(node):
    assert node.ended() == [1]
    assert node.codes() == {"00000": "2", "00001": "2"}
    assert "not started again" in node.text(0)

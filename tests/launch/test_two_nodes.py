"""Two emulated nodes of two ranks: they train, one hangs, the guard switches on every rank.

pytest -m gpu tests/launch/test_two_nodes.py          # four GPUs, NCCL over sockets, 2 minutes
pytest -m slow tests/launch/test_two_nodes.py         # the same on CPU over gloo
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import cuda_devices
from emulated_nodes import Nodes

from megatron_patch.runtime.records import read_rows
from megatron_patch.stability import record

CONFIG = """\
name: t
run_dir: run
model: {num_layers: 2, hidden_size: 256, num_attention_heads: 4, seq_length: 256}
training: {train_steps: 60, global_batch_size: 8, micro_batch_size: 2, seed: 7}
optimizer: {lr: 1.0e-3, warmup_steps: 5}
parallel: {tensor_model_parallel_size: 2, sequence_parallel: true, use_distributed_optimizer: true}
data: {blend: [{path: tiny}], tokenizer: {kind: bytes}, num_workers: 0}
attention: {backend: stable_flash}
checkpoint: {interval: 50}
stability: {interval: 10}
faults: {hang_seconds: 15, hang_startup_seconds: 300}
logging: {interval: 5, tensorboard: false}
"""
SMALL = (
    "training.device=cpu", "training.precision=fp32", "attention.backend=reference",
    "model.hidden_size=32", "model.seq_length=32",
)  # fmt: skip
pytestmark = pytest.mark.multiprocess
Start = Callable[..., Nodes]


FOUR = pytest.mark.skipif(cuda_devices() < 4, reason="needs four GPUs")
ON_GPUS = pytest.param("cuda", marks=[pytest.mark.gpu, FOUR])
ON_CPU = pytest.param("cpu", marks=pytest.mark.slow)


@pytest.fixture(params=[ON_GPUS, ON_CPU])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Start the job with these keys."""
    from megatron_patch.data.prepare import PrepareOptions, prepare

    (tmp_path / "text.txt").write_text(" ".join(str(k * k) for k in range(60_000)))
    text, out = str(tmp_path / "text.txt"), str(tmp_path / "tiny")
    prepare(PrepareOptions(inputs=[text], out=out, workers=1, quiet=True))
    started: list[Nodes] = []

    def begin(*keys: str) -> Nodes:
        keys = (*(SMALL if request.param == "cpu" else ()), *keys)
        job = Nodes(tmp_path, config=CONFIG, device=request.param, nodes=2, keys=keys)
        started.append(job)
        return job

    yield begin
    for job in started:
        job.kill()


def test_they_train_and_save(start, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    job = start()
    assert job.ended() == [0, 0], job.words()
    assert job.codes() == {f"{n:05d}": "0" for n in range(4)}
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    assert int(rows[-1]["step"]) == 60
    assert float(rows[-1]["loss"]) < 0.8 * float(rows[0]["loss"])
    assert json.loads((tmp_path / "run" / "last_checkpoint.json").read_text())["step"] == 60
    if "NCCL INFO" in job.text(0):
        assert "via NET/Socket" in job.text(0), "the second node was reached some other way"


def test_a_rank_that_stops_is_found_and_named(start, tmp_path):
    job = start("training.train_steps=100000", "checkpoint.interval=null")
    job.wait(lambda: "step 20" in re.sub(r"step +", "step ", job.text(0)))
    os.kill(job.rank(3), signal.SIGSTOP)
    codes = job.ended()
    assert all(codes), job.words()
    (summary,) = (tmp_path / "run" / "hangs").glob("*/summary.txt")
    first = summary.read_text().splitlines()[0]
    assert re.match(r"hang at step \d+: rank 3 \(", first), first
    left = job.codes()
    assert {left[f"{n:05d}"] for n in range(3)} == {"6"}, left
    if job.device == "cpu":  # NCCL only queues: the host waits elsewhere
        waiting = json.loads((summary.parent / "rank_00000.txt").read_text().splitlines()[0])
        assert waiting["collective"], waiting


@pytest.mark.parametrize("start", [ON_GPUS], indirect=True)
def test_the_guard_switches_every_rank(start, tmp_path):
    """Every error of delta is danger by this rule, so that plain numerics last two records."""
    job = start(
        "attention.stabilizer=none", "stability.guard=switch", "stability.rule.danger_error=1.0e-9",
        "stability.rule.confirm_steps=10",
    )  # fmt: skip
    assert job.ended() == [0, 0], job.words()
    assert "stability guard:" in job.text(0), job.words()
    telemetry = record.read(tmp_path / "run")
    plain, used = (telemetry.heads[f"{name}_error_rms"] for name in ("delta", "used"))
    switched, steps = telemetry.switched_at, telemetry.steps
    assert switched and steps[0] <= switched <= 40
    # Two heads lie on each tensor-parallel rank. What is left is the rounding of P.
    for heads in (slice(0, 2), slice(2, 4)):
        ratio = used[..., heads] / plain[..., heads]
        assert np.median(ratio[steps <= switched]) > 0.9, ratio
        assert np.median(ratio[steps > switched]) < 0.7, ratio

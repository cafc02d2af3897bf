"""A request to stop reaches a trainer that has compiled its kernels: its compiler takes signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_trainer

pytestmark = pytest.mark.gpu

DEVICE = ["training.device=cuda", "attention.backend=stable_flash", "training.deterministic=false"]
STEPS = 5


def start(folder: Path, corpus: Path, *keys: str) -> subprocess.Popen[bytes]:
    """The trainer in a process of its own, its kernels compiled anew."""
    command = tiny_trainer.train(folder / "run", corpus, *DEVICE, *keys)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_ALWAYS_COMPILE": "1"}
    with (folder / "out.txt").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_patch", *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        )


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_it_saves_and_stops(name, tmp_path, corpus):
    process = start(tmp_path, corpus, "training.train_steps=1000000")
    metrics = tmp_path / "run" / "metrics.csv"
    limit = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < limit:
        if metrics.exists() and metrics.read_text().count("\n") > STEPS:
            break
        time.sleep(0.2)
    said = (tmp_path / "out.txt").read_text
    assert process.poll() is None, said()
    process.send_signal(getattr(signal, name))
    assert process.wait(timeout=60) == 0, said()
    assert f"received {name}" in said() and "stopped gracefully" in said()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    done = int(saved.name[5:13])
    assert done >= STEPS
    again = start(
        tmp_path, corpus, "training.train_steps=1000000", f"training.exit_at_step={done + 1}"
    )
    assert again.wait(timeout=300) == 0, said()
    assert f"step {done + 1:,}" in said()

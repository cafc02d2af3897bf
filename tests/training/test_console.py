"""A console on a full disk: a run under a launcher has a file for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import training_ranks


def test_a_console_that_takes_nothing_does_not_end_the_run(tmp_path: Path, corpus: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(training_ranks.CONFIG.replace("CORPUS", str(corpus)))
    command = [sys.executable, "-m", "megatron_patch", "train", "--config", str(config)]
    with open("/dev/full", "w") as console:
        done = subprocess.run(
            [*command, "--set", "training.train_steps=3"], cwd=tmp_path, stdout=console,
            stderr=subprocess.PIPE, text=True, timeout=600, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "tiny"
    assert sorted(training_ranks.metrics(run)) == [1, 2, 3] and (run / "FINISHED").exists()
    log = (run / "train.log").read_text()
    assert log.count("warning: the console: cannot be written ([Errno 28]") == 1

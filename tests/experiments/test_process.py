"""The process of a run: its command line, its GPUs, and what its end says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatron_patch.experiments import process, runner
from megatron_patch.experiments.process import cell_command
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.store import Store


def test_the_command_of_a_run(protocol: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "out", read(protocol))
    run = store.experiment.runs[1]
    one = cell_command(store, run, gpus=1, steps=50, left=90.0)
    assert one[1:5] == ["-m", "megatron_patch", "experiment", "cell"]
    keys = [b for a, b in itertools.pairwise(one) if a == "--set"]
    assert keys[0] == "optimizer.lr=2e-3" and "training.seed=1" in keys
    assert "training.train_steps=100" in keys and "training.exit_at_step=50" in keys
    assert "training.exit_after_minutes=1.500" in keys
    two = cell_command(store, run, gpus=2, steps=100, left=float("inf"))
    assert two[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert not any("exit_" in part for part in two)
    store.close()


def test_seats_are_counted_among_the_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runner.visible_devices([0, 3]) == "0,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc,6")
    assert runner.visible_devices([1, 2]) == "GPU-abc,6"
    with pytest.raises(ValueError, match="number 3 of 3 in CUDA_VISIBLE_DEVICES=4,GPU-abc,6"):
        runner.visible_devices([0, 3])


TORCHRUN = """\
megatron-patch: step 7: gradients not finite; stopped before the update
  parameters with a non-finite gradient ...
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 18085)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 3 (pid: 18084)
============================================================
"""


def test_the_exit_code_behind_torchrun() -> None:
    """torchrun ends with 1 whatever its ranks ended with; the state must not depend on that."""
    assert process.rank_exit_code(TORCHRUN) == 3
    assert process.rank_exit_code("killed") == 1
    assert process.last_words(TORCHRUN).startswith("step 7: gradients not finite")
    assert process.last_words("a\n\n[rank0]: OutOfMemoryError\n") == "OutOfMemoryError"
    assert process.last_words("") == ""
    reasons = "a\nmegatron-patch: no backend; unmet:\n  - device is cpu\n  - no x\nothers: none\n"
    assert process.last_words(reasons) == "no backend; unmet: device is cpu; no x"

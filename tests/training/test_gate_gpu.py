"""The trainer on a GPU launches an update before it knows whether it may be taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import poisoned_step
import pytest
import tiny_trainer

pytestmark = pytest.mark.gpu

HEAD = """
import sys, torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron_patch.__main__ import main
step, calls = ChainedOptimizer.step, []
"""
WITHOUT_WAITING = """
synchronize = torch.cuda.Event.synchronize
def waits(self):
    raise RuntimeError("the host waits inside the optimizer's step")
def strict(self):
    calls.append(1)
    if len(calls) > 2:  # the first ones allocate
        torch.cuda.Event.synchronize = waits
        torch.cuda.set_sync_debug_mode("error")
    try:
        return step(self)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.Event.synchronize = synchronize
ChainedOptimizer.step = strict
"""


def train(folder: Path, corpus: Path, script: str, *keys: str) -> tuple[int, str]:
    """(exit code, output) of six steps of the tiny model, the trainer changed by ``script``."""
    command = tiny_trainer.train(
        folder / "run", corpus, "training.device=cuda", "training.precision=bf16",
        "training.deterministic=false", "training.train_steps=6",
        "attention.backend=stable_flash", "stability.interval=2", *keys,
    )  # fmt: skip
    code = HEAD + script + "sys.exit(main(sys.argv[1:]))\n"
    found = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=300
    )
    return found.returncode, found.stdout + found.stderr


def test_no_step_waits_before_its_update(tmp_path, corpus):
    code, said = train(tmp_path, corpus, WITHOUT_WAITING)
    assert code == 0, said
    assert "finished: 6 steps" in said


def test_a_rule_that_may_drop_the_update_is_waited_for(tmp_path, corpus):
    """And the test above would see a wait."""
    code, said = train(tmp_path, corpus, WITHOUT_WAITING, "faults.spike.action=skip")
    assert code == 1 and "the host waits inside" in said


def test_a_bad_update_changes_nothing(tmp_path, corpus):
    code, said = train(tmp_path, corpus, poisoned_step.SCRIPT)
    assert code == 3, said
    assert "rank 0" in said and "as before" in said and "step 3: gradients not finite" in said

"""The gate on two ranks: a bad gradient on one of them, and no rank changes anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import poisoned_step
import pytest
import tiny_trainer

CPU = """
from megatron_patch.core_patches import cpu_mode
cpu_mode.install()
"""
GATED = """
from megatron_patch.__main__ import main
from megatron_patch.training import optimizer, session
build, gate_of = optimizer.build_optimizer, session.gate_of

def fused(run, chunks):  # as on a GPU
    made, line = build(run, chunks)
    optimizer.use_fused_kernel(made)
    return made, line

def gated(made):
    gate = gate_of(made)
    assert gate is not None
    return gate

optimizer.build_optimizer, session.gate_of = fused, gated
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_no_rank_updates_where_one_gradient_is_bad(
    tmp_path: Path, corpus: Path, sharded: str
) -> None:
    (tmp_path / "gated.py").write_text(CPU + poisoned_step.SCRIPT + GATED)
    command = tiny_trainer.train(
        tmp_path / "run", corpus, "training.precision=bf16", "training.micro_batch_size=2",
        "training.deterministic=false", f"parallel.use_distributed_optimizer={sharded}",
        "training.train_steps=6",
    )  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [str(tmp_path / "gated.py"), *command],
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = found.stdout + found.stderr
    assert found.returncode != 0 and "step 3: gradients not finite" in said, said
    assert said.count("as before") == 2 and "changed" not in said, said

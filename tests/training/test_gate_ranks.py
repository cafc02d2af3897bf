"""The gate on two ranks: a bad gradient on one of them, and no rank changes anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import math, os, sys, torch
from megatron_patch.runtime import cpu_mode
cpu_mode.install()
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron_patch.__main__ import main
from megatron_patch.training import optimizer, startup
build, gate_of, step, calls = optimizer.build_optimizer, startup.gate_of, ChainedOptimizer.step, []

def fused(run, chunks):  # as on a GPU
    made, line = build(run, chunks)
    optimizer.use_fused_kernel(made)
    return made, line

def gated(made):
    gate = gate_of(made)
    assert gate is not None
    return gate

def models(part):  # of a sharded optimizer, of a whole one
    return getattr(part, "model_float16_groups", None) or part.float16_groups

def state(self):
    found = []
    for part in self.chained_optimizers:
        found += [weight for group in models(part) for weight in group]
        for group in part.optimizer.param_groups:
            for weight in group["params"]:
                found += [weight, *part.optimizer.state[weight].values()]
    return [x.detach().clone() for x in found]

def poisoned(self):
    calls.append(1)
    if len(calls) != 3:
        return step(self)
    before = state(self)
    if os.environ["RANK"] == "1":
        models(self.chained_optimizers[0])[0][-1].main_grad.view(-1)[7] = math.nan
    try:
        return step(self)
    finally:
        same = all(map(torch.equal, before, state(self)))
        print("rank", os.environ["RANK"], "as before" if same else "changed", flush=True)

optimizer.build_optimizer, startup.gate_of, ChainedOptimizer.step = fused, gated, poisoned
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_no_rank_updates_where_one_gradient_is_bad(
    tmp_path: Path, corpus: Path, sharded: str
) -> None:
    keys = [
        f"run_dir={tmp_path / 'run'}",
        f"data.blend.0.path={corpus}",
        "training.precision=bf16",
        "training.micro_batch_size=2",
        "training.deterministic=false",
        f"parallel.use_distributed_optimizer={sharded}",
        "training.train_steps=6",
    ]
    (tmp_path / "gated.py").write_text(SCRIPT)
    config = ROOT / "configs" / "stability" / "base" / "tiny_cpu.yaml"
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [str(tmp_path / "gated.py"), "train", "--config", str(config)]
        + [part for key in keys for part in ("--set", key)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = found.stdout + found.stderr
    assert found.returncode != 0 and "step 3: gradients not finite" in said, said
    assert "rank 0 as before" in said and "rank 1 as before" in said, said

"""Shipped configurations at full size: peak of one rank's forward and backward pass, and the plan.

Two things are turned off, because they cannot run on fake tensors: torch.compile's fusions, and the
early gathering of weights. Neither changes the other tensors. A minute and a half together.
"""

from pathlib import Path

import dry_run
import pytest

from megatron_patch import config
from megatron_patch.planner import memory
from megatron_patch.planner.layout import layout_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "nodes"
PLAIN = [
    "training.compile_fusions=false",
    "training.device=cpu",
    "parallel.overlap_grad_reduce=false",
    "parallel.overlap_param_gather=false",
]
VOCAB = 128256
# Name, nodes, sequences a step (enough to fill the pipelines), ranks looked at.
RUNS = [
    ("llama_8b_8k_1n", 1, 8, [0]),
    ("llama_8b_128k_2n", 2, 1, [0]),
    ("llama_70b_8k_8n", 8, 8, [0, 63]),
    ("llama_70b_8k_16n", 16, 32, [0]),
    ("llama_70b_128k_8n", 8, 2, [0]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nodes", "batch", "ranks"), RUNS, ids=[run[0] for run in RUNS])
def test_peak_of_a_rank(name, nodes, batch, ranks):
    sets = [*PLAIN, f"training.global_batch_size={batch}"]
    run = config.load(CONFIGS / f"{name}.yaml", sets).config
    layout = layout_of(run, nodes, 8)
    stages = memory.memory_of(run, layout, VOCAB)
    for rank in ranks:
        found = dry_run.step(run, rank=rank, world=layout.world, vocab=VOCAB)
        planned = stages[rank * layout.pp // layout.world]
        assert planned.dynamic == pytest.approx(found.activations, rel=0.05)

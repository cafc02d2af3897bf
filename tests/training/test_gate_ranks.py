"""The gate on two ranks: a bad gradient on one of them, and no rank changes anything."""

import poisoned_step
import pytest
import tiny_trainer
from torch.distributed import TCPStore
from training_ranks import end_all, start_ranks

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
    optimizer.core.use_fused_kernel(made)
    return made, line

def gated(made):
    gate = gate_of(made)
    assert gate is not None
    return gate

optimizer.build_optimizer, session.gate_of = fused, gated
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_no_rank_updates_where_one_gradient_is_bad(tmp_path, corpus, sharded):
    (tmp_path / "gated.py").write_text(CPU + poisoned_step.SCRIPT + GATED)
    command = tiny_trainer.train(
        tmp_path / "run", corpus, "training.precision=bf16", "training.micro_batch_size=2",
        "training.deterministic=false", f"parallel.use_distributed_optimizer={sharded}",
        "training.train_steps=6",
    )  # fmt: skip
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    ranks = start_ranks(tmp_path / "gated.py", command, tmp_path, store.port, logs)
    for rank in ranks:
        rank.join(300)
    codes = end_all(ranks)
    said = "".join(log.read_text() for log in logs)
    assert all(codes) and "step 3: gradients not finite" in said, (codes, said)
    assert said.count("as before") == 2 and "changed" not in said, said

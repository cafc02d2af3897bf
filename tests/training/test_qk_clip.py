"""``optimizer.qk_clip`` with AdamW: continued, and in several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_corpus import byte_corpus
from training_ranks import distance, figures, run_ranks

pytestmark = pytest.mark.multiprocess


def test_a_step_that_was_clipped_is_continued_with_every_bit(tmp_path: Path):
    """Weights and main weights are scaled each in its own type: rounded alike they are not."""
    corpus = byte_corpus(tmp_path / "tiny", (f"{n} is followed by {n + 1}. " for n in range(300)))
    keys = ["training.precision=bf16", "model.num_layers=2", "optimizer.qk_clip=0.01"]
    plan = [
        {"set": ["name=whole", *keys]},
        {"set": ["name=broken", *keys, "training.exit_at_step=3"]},
        {"set": ["name=broken", *keys]},
    ]
    (whole,), (stopped,), (again,) = run_ranks(tmp_path, corpus, 1, plan)
    assert (whole["code"], stopped["code"], again["code"]) == (0, 0, 0), again.get("error")
    assert again["weights"] == whole["weights"] != stopped["weights"]
    assert figures(tmp_path / "runs" / "broken") == figures(tmp_path / "runs" / "whole")


def test_tensor_parallel_ranks_clip_as_one_does(tmp_path: Path):
    """Each rank has groups of its own, or a part of one."""
    corpus = byte_corpus(tmp_path / "tiny", (f"{n} is followed by {n + 1}. " for n in range(300)))
    keys = ["training.train_steps=4", "model.num_layers=2", "optimizer.schedule=constant"]
    plan = []
    for groups in (2, 1):
        clipped = [*keys, f"model.num_query_groups={groups}", "optimizer.qk_clip=0.01"]
        split = [*clipped, "parallel.tensor_model_parallel_size=2"]
        plan += [
            {"set": [f"name=one{groups}", *clipped], "ranks": 1},
            {"set": [f"name=free{groups}", *clipped, "optimizer.qk_clip=null"], "ranks": 1},
            {"set": [f"name=split{groups}", *split], "ranks": 2},
        ]
    run_ranks(tmp_path, corpus, 2, plan)
    for groups in (2, 1):
        one, free, split = (
            figures(tmp_path / "runs" / f"{n}{groups}") for n in ("one", "free", "split")
        )
        assert distance(split, one, sorted(one)) < 1e-5 < distance(free, one, sorted(one))

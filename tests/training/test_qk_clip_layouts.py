"""``optimizer.qk_clip`` scales the same rows in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_corpus import byte_corpus
from training_ranks import distance, figures, run_ranks

pytestmark = pytest.mark.multiprocess


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

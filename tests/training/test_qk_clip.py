"""``optimizer.qk_clip`` with AdamW: a checkpoint of a step that was clipped is continued."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_corpus import byte_corpus
from training_ranks import figures, run_ranks

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

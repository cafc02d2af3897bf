"""A pipeline stage whose layers have no experts owns no parameters of the experts' optimizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_patch.runtime.records import read_rows

ROOT = Path(__file__).resolve().parents[2]
SPLIT = ("parallel.pipeline_model_parallel_size=2", "parallel.expert_model_parallel_size=2")


def train(run_dir: Path, corpus: Path, *keys: str, ranks: int) -> list[tuple[str, str]]:
    """(loss, gradient norm) of every step so far, as metrics.csv has them."""
    named = [
        f"run_dir={run_dir}",
        f"data.blend.0.path={corpus}",
        "training.train_steps=6",
        "training.micro_batch_size=1",
        "model.moe.num_experts=2",
        "model.moe.layer_freq=[0,1]",
        *keys,
    ]
    config = ROOT / "research" / "protocols" / "base" / "tiny_cpu.yaml"
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        + ["--nproc-per-node", str(ranks), "-m", "megatron_patch", "train"]
        + ["--config", str(config), *(p for key in named for p in ("--set", key))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return [(row["loss"], row["grad_norm"]) for row in read_rows(run_dir / "metrics.csv")]


def test_it_is_saved_and_resumes(tmp_path: Path, corpus: Path) -> None:
    """To every digit on the same layout; on one rank, which has everything, and from there."""
    half = "training.exit_at_step=3"
    unbroken = train(tmp_path / "whole", corpus, *SPLIT, ranks=4)
    train(tmp_path / "run", corpus, *SPLIT, half, ranks=4)
    assert train(tmp_path / "run", corpus, *SPLIT, ranks=4) == unbroken
    train(tmp_path / "one", corpus, half, ranks=1)
    moved = train(tmp_path / "one", corpus, *SPLIT, ranks=4)
    assert len(moved) == 6

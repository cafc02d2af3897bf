"""Every configuration for real runs passes its checks and fits the GPUs it is written for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_patch import config
from megatron_patch.planner import hardware, plan

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NODES = sorted((CONFIGS / "nodes").glob("*.yaml"))
# Their comments say that they need the larger GPU; everything else fits 80 GB.
LARGE = {"llama_8b_128k_1n", "llama_70b_8k_2n", "llama_70b_128k_2n"}
IDS = {"gpt2": 50257, "llama": 128256}
WANTED = {
    "gpt2_124m": {1, 2, 8, 16, 64},
    "gpt2_350m": {1, 2, 8, 16, 64},
    "gpt2_1p5b": {1, 2, 8, 16, 64},
    "llama_8b_8k": {1, 2, 8, 16, 64},
    "llama_8b_128k": {1, 2, 8, 16, 64},
    "llama_70b_8k": {2, 8, 16, 64},
    "llama_70b_128k": {2, 8, 16, 64},
}


def nodes_of(path: Path) -> int:
    match = re.search(r"_(\d+)n$", path.stem)
    assert match is not None, path
    return int(match[1])


def plan_of(path: Path, gpu: str, nodes: int) -> plan.Plan:
    run = config.load(path).config
    machine = plan.Machine(hardware.gpu_named(gpu), nodes, 8)
    assert not list(plan.problems_of(run, machine))
    return plan.make_plan(run, machine, plan.vocabulary_of(run, IDS[path.stem.split("_")[0]]))


def test_nothing_is_missing():
    found: dict[str, set[int]] = {}
    for path in NODES:
        found.setdefault(path.stem.rsplit("_", 1)[0], set()).add(nodes_of(path))
    assert found == WANTED


@pytest.mark.parametrize("path", NODES, ids=[path.stem for path in NODES])
def test_it_fits(path):
    gpu = "h200" if path.stem in LARGE else "h100"
    found = plan_of(path, gpu, nodes_of(path))
    assert found.fits, f"{found.worst.total / 2**30:.1f} GiB"
    assert found.room > 0.1 * found.machine.gpu.memory, "no room for what the plan does not know"
    assert found.run.name == path.stem
    assert found.layout.group("tp").link == "NVLink", "tensor parallelism stays in a node"
    if path.stem in LARGE:
        assert not plan_of(path, "h100", nodes_of(path)).fits


def test_host_memory_of_a_save():
    """One node writes everything once: 12 bytes a parameter and the BF16 weights."""
    path = CONFIGS / "nodes" / "llama_8b_8k_1n.yaml"
    alone, eight = plan_of(path, "h100", 1), plan_of(path, "h100", 8)
    assert alone.save_bytes == pytest.approx(14 * alone.counts.total, rel=1e-3)
    share = (12 / 8 + 2) * alone.counts.total  # the first node's two shards' weights
    assert eight.save_bytes == pytest.approx(share, rel=1e-3)
    assert max(plan_of(p, "h200", nodes_of(p)).save_bytes for p in NODES) < 500 * 2**30


def test_comments_argue():
    """Every file says why, and every layout beyond plain data parallelism names a source."""
    for path in [*NODES, *CONFIGS.glob("llama_*.yaml"), CONFIGS / "gpt2_1p5b.yaml"]:
        assert path.read_text().startswith("# "), path
    for path in CONFIGS.glob("llama_*.yaml"):
        assert "arXiv:" in path.read_text() or "as in" in path.read_text(), path

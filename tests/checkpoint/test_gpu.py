"""Resuming on GPUs: CUDA random streams, fused AdamW, background saves beside running kernels."""

import pytest
from rank_pool import load, save
from test_resume import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def gpu_ranks():
    import torch
    from rank_pool import RankPool

    with RankPool(min(2, torch.cuda.device_count()), cpu=False) as pool:
        yield pool


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("world", [1, 2])
def test_same_layout_resumes_bitwise(gpu_ranks, tmp_path, world, sharding, background):
    """BF16 with FP32 main weights, dropout on, training on while the background save writes."""
    if world > gpu_ranks.size:
        pytest.skip(f"needs {world} GPUs, {gpu_ranks.size} here")
    changes = {
        "layout": "dp" if world > 1 else "single",
        "model": {"hidden_dropout": 0.1},
        "training": {"device": "cuda", "precision": "bf16", "deterministic": True},
        "checkpoint": {"async_save": background, "optimizer_sharding": sharding},
    }
    root = str(tmp_path / "checkpoints")
    unbroken = save(gpu_ranks, root, 2, stop=4, world=world, **changes)
    resumed = load(gpu_ranks, root, stop=4, world=world, **changes)
    for before, after in zip(unbroken, resumed, strict=True):
        assert_same(before["at_save"], after["at_load"])
        assert_same(before["losses"][2:], after["losses"])
        for key in ("weights", "moments", "draws"):
            assert_same(before[key], after[key], key)

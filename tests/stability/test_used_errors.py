"""What the kernel's own rounding did, in every layout: `used_error_*`, `growth_noise`, which the
verdict's danger sign reads.

test_runs.py compares layouts on the exact `reference`, where these are not measured. Here the
product's kernels run under Triton's interpreter, on a model so small that this is affordable. One
process trains a step and saves; it and every layout do the next one. All rows but the first are
sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_ranks

from megatron_patch.stability import record

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("own_worker")]

KEYS = ["training.precision=bf16", "attention.backend=stable_flash", "model.num_layers=2",
        "training.global_batch_size=1", "training.deterministic=true",
        "optimizer.warmup_steps=0"]  # fmt: skip
PLAIN, COMPENSATED = "attention.stabilizer=none", "attention.stabilizer=compensated"
BEGIN = "checkpoint.load_from=runs/start"
WATCH = [BEGIN, "training.train_steps=2", "stability.interval=1", "stability.rows=1000"]
LAYOUTS = {
    "one": [],
    "tp2": ["parallel.tensor_model_parallel_size=2"],
    "pp2": ["parallel.pipeline_model_parallel_size=2"],
    "cp2": ["parallel.context_parallel_size=2"],
}
USED = ("used_error_mean", "used_error_rms", "growth_noise")


def run(name: str, *keys: str) -> dict[str, Any]:
    return {"set": [f"name={name}", *KEYS, *keys], "ranks": 2 if "2" in name else 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("used_errors")
    plan = [run("start", PLAIN, "training.exit_at_step=1", "training.train_steps=2",
                "stability.enabled=false")]  # fmt: skip
    plan += [run(name, PLAIN, *WATCH, *keys) for name, keys in LAYOUTS.items()]
    plan.append(run("kept_cp2", COMPENSATED, *WATCH, *LAYOUTS["cp2"]))
    results = training_ranks.run_ranks(folder, corpus, 2, plan)
    assert all(rank["code"] == 0 for result in results for rank in result), results
    return folder / "runs"


def told(runs: Path, name: str) -> dict[str, np.ndarray]:
    found = record.read(runs / name)
    assert found.steps.tolist() == [2]
    return {metric: values[0] for metric, values in found.heads.items()}


def test_pipeline_ranks_tell_the_very_same(runs):
    """The stages compute what one process computes, in the same order."""
    one, two = told(runs, "one"), told(runs, "pp2")
    for metric in (*USED, "delta_error_mean", "delta_error_rms", "kappa"):
        assert np.isfinite(one[metric]).all(), metric
        np.testing.assert_allclose(two[metric], one[metric], rtol=1e-5, err_msg=metric)


def test_tensor_parallel_ranks_tell_the_same_of_every_head(runs):
    """The first layer's q, k and v are the same in BF16, so its O rounds alike; its dO has come
    through sums of two ranks, each rounded. The next layer's inputs have, too: other roundings of
    the same size."""
    one, two = told(runs, "one"), told(runs, "tp2")
    for metric in USED:
        assert np.isfinite(two[metric]).all(), metric
    size = one["used_error_rms"]
    # A rank that told the other's heads would not pass: they differ by more than is allowed here.
    assert np.abs(size[0, :2] / size[0, 2:] - 1).max() > 0.1
    np.testing.assert_allclose(
        two["used_error_mean"][0], one["used_error_mean"][0], atol=0.02 * float(size[0].min())
    )
    for metric in ("used_error_rms", "growth_noise"):
        np.testing.assert_allclose(two[metric][0], one[metric][0], rtol=0.02, err_msg=metric)
        within(two[metric][1], one[metric][1], factor=4)


def test_context_parallel_ranks_tell_errors_of_the_same_size(runs):
    """Two of 28 sampled rows are others there, and O is merged from two parts."""
    one, two = told(runs, "one"), told(runs, "cp2")
    within(two["used_error_rms"], one["used_error_rms"], factor=2)
    within(two["growth_noise"], one["growth_noise"], factor=6)
    assert (np.abs(two["used_error_mean"]) < two["used_error_rms"]).all()


def test_a_merged_output_hands_out_no_low_order_part(runs):
    """What compensated numerics used is not known under context parallelism, and not made up; what
    plain ones would get wrong is."""
    kept, plain = told(runs, "kept_cp2"), told(runs, "cp2")
    for metric in USED:
        assert np.isnan(kept[metric]).all(), metric
    within(kept["delta_error_rms"], plain["delta_error_rms"], factor=2)


def within(found: np.ndarray, expected: np.ndarray, *, factor: float) -> None:
    """All of a size, but for ``factor``."""
    ratio = found / expected
    assert (ratio > 1 / factor).all() and (ratio < factor).all(), ratio

"""``optimizer.name: muon``: layouts agree, a resume repeats every bit, logits are clipped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from byte_corpus import byte_corpus
from megatron_cpu import tiny_run
from training_ranks import distance, figures, metrics, run_ranks

from megatron_patch.config import checks
from megatron_patch.core_patches import optimizer
from megatron_patch.schema.problem import ConfigError

pytestmark = pytest.mark.multiprocess
MUON = ("optimizer.name=muon", "training.train_steps=4", "checkpoint.interval=2")
BF16 = (*MUON, "training.precision=bf16")
WHOLE = (*MUON, "parallel.use_distributed_optimizer=false")
STOP = "training.exit_at_step=2"
EXPERTS = (*BF16, "model.moe.num_experts=2", "model.moe.ffn_hidden_size=32")
WHOLE_EXPERTS = (
    *EXPERTS, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
    "parallel.expert_tensor_parallel_size=1", "parallel.distributed_timeout_minutes=1",
)  # fmt: skip
"""One data-parallel rank, and two that hold every expert."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    pytest.importorskip("emerging_optimizers")
    folder = tmp_path_factory.mktemp("muon")
    corpus = byte_corpus(folder / "tiny", (f"{n} is followed by {n + 1}. " for n in range(300)))
    runs: dict[str, dict[str, Any]] = {}

    def run(name: str, ranks: int, *keys: str, attempt: str = "") -> None:
        keys = ("model.num_layers=2", *keys)
        runs[name + attempt] = {"set": [f"name={name}", *keys], "ranks": ranks}

    run("one", 1, *BF16)
    run("sharded", 2, *BF16, "optimizer.qk_clip=0.01")
    run("resumed", 2, *BF16, "optimizer.qk_clip=0.01", STOP)
    run("resumed", 2, *BF16, "optimizer.qk_clip=0.01", attempt=" again")
    run("unclipped", 2, *BF16)
    run("whole", 1, *WHOLE)
    run("split", 2, *WHOLE, "parallel.tensor_model_parallel_size=2")
    shared = ("model.num_query_groups=1",)
    run("grouped", 1, *WHOLE, *shared)
    run("shared", 2, *WHOLE, *shared, "parallel.tensor_model_parallel_size=2")
    run("grouped16", 1, *BF16, *shared)
    run("shared16", 2, *BF16, *shared, "parallel.tensor_model_parallel_size=2")
    run("other", 1, *BF16[1:], "checkpoint.load_from=one@4", "checkpoint.carry_over=[data]")
    run("narrower", 1, *BF16, "checkpoint.load_from=unclipped@2")
    run("experts", 1, *EXPERTS)
    run("copied", 2, *WHOLE_EXPERTS, STOP)
    run("copied", 2, *WHOLE_EXPERTS, attempt=" again")
    run("gathered", 1, *EXPERTS, "checkpoint.load_from=copied@2")
    results = run_ranks(folder, corpus, 2, list(runs.values()))
    return folder, dict(zip(runs, results, strict=True))


def test_every_run_ends_well(chain):
    _, results = chain
    assert {rank["code"] for ranks in results.values() for rank in ranks} == {0}


def test_a_resume_repeats_every_bit(chain):
    folder, results = chain
    whole, again = results["sharded"], results["resumed again"]
    assert [rank["weights"] for rank in again] == [rank["weights"] for rank in whole]
    assert figures(folder / "runs" / "resumed") == figures(folder / "runs" / "sharded")


@pytest.mark.parametrize(
    ("name", "expected", "limit"),
    [("unclipped", "one", 5e-3), ("narrower", "one", 5e-3), ("split", "whole", 1e-3),
     ("shared", "grouped", 1e-3), ("shared16", "grouped16", 1e-3), ("copied", "experts", 5e-3),
     ("gathered", "experts", 5e-3)],
)  # fmt: skip
def test_layouts_train_the_same(chain, name, expected, limit):
    """Sharded over two ranks, loaded from them by one, and with split matrices.

    With one query group both ranks have a part of W_Q, of W_K and of W_V; these are split as well.
    """
    runs = chain[0] / "runs"
    found = figures(runs / name)
    assert distance(found, figures(runs / expected), sorted(found)) < limit


def test_the_clip_holds_logits_down(chain):
    runs = chain[0] / "runs"
    assert metrics(runs / "sharded")[4]["loss"] != metrics(runs / "unclipped")[4]["loss"]


@pytest.mark.parametrize(
    ("parallel", "training", "path"),
    [
        ({}, {"precision": "fp32"}, "parallel.use_distributed_optimizer"),
        ({"overlap_param_gather": True}, {"precision": "bf16"}, "parallel.overlap_param_gather"),
    ],
)
def test_refused(parallel, training, path):
    run = tiny_run(parallel=parallel, training=training)
    run = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, name="muon"))
    assert path in {problem.path for problem in checks.optimizer_problems(run)}


@pytest.mark.parametrize(("name", "found"), [("muon", 1), ("adamw", 0)])
def test_whole_matrices_are_not_saved_by_slices(name, found):
    """The key changed nothing of what was saved, and kept it from loading on other layouts."""
    run = tiny_run(training={"precision": "bf16"})
    run = dataclasses.replace(
        run,
        optimizer=dataclasses.replace(run.optimizer, name=name),
        checkpoint=dataclasses.replace(run.checkpoint, optimizer_sharding="dp_reshardable"),
    )
    paths = [problem.path for problem in checks.checkpoint_problems(run)]
    assert paths == ["checkpoint.optimizer_sharding"] * found


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(optimizer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"optimizer.name: muon: .* megatron-patch-stable\[muon\]"
    ):
        optimizer.prepare_muon([])

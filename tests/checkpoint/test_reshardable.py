"""Optimizer state for any layout: what each rank holds, and that buckets do not shift it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pool import contents, convert, newest, save
from test_resume import assert_same

from megatron_patch.checkpoint import host_memory, optimizer_state
from megatron_patch.checkpoint.errors import CheckpointError
from megatron_patch.checkpoint.reshardable import Place
from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.training import saver

pytestmark = pytest.mark.multiprocess


def test_the_rank_with_most_of_a_parameter_writes_it():
    assert Place(0, None, ((3, 10),)).owner == 3
    assert Place(0, None, ((3, 10), (4, 11), (5, 11), (6, 2))).owner == 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_their_own(value):
    """`training.check_finite: false` lets them in; refused were they told of another fault."""
    weights = torch.tensor([1.0, value, 3.0]).bfloat16()
    span = {"param": SimpleNamespace(start=0, end=3)}
    part = SimpleNamespace(_get_model_param_range_map=lambda param: span)
    optimizer_state._check_main(part, weights, weights.float())
    for other in ([1.0, 2.0, 3.0], [value, 1.0, 3.0], [1.0, value]):
        with pytest.raises(CheckpointError, match="does not belong to its weights"):
            optimizer_state._check_main(part, weights, torch.tensor(other))


def test_weights_that_were_scaled_beside_their_main_weights_are_their_own():
    main = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    span = {"param": SimpleNamespace(start=0, end=1000)}
    part = SimpleNamespace(_get_model_param_range_map=lambda param: span)
    weights = main.bfloat16() * 0.9
    assert not torch.equal(weights, (main * 0.9).bfloat16())
    optimizer_state._check_main(part, weights, main * 0.9)
    with pytest.raises(CheckpointError, match="does not belong to its weights"):
        optimizer_state._check_main(part, weights, main * 0.93)


def test_no_rank_holds_more_than_its_share(ranks, tmp_path):
    """12 bytes a parameter, divided by the ranks, and at most one more parameter at a cut."""
    changes = {"layout": "dp", "model": {"num_layers": 4, "hidden_size": 64}}
    answers = ranks.play("sharing.shares", world=2, root=str(tmp_path), changes=changes)
    everything = 12 * answers[0]["parameters"]
    for answer in answers:
        share = everything / 2 + 12 * answer["largest"]
        assert share < 0.8 * everything, "this model shows nothing"
        assert 0 < answer["written"] <= share
        assert 0 < answer["requested"] <= share
        assert answer["staged"] <= answer["foreseen"] <= 1.1 * answer["staged"]
        (problem,) = answer["problems"]
        assert problem.startswith("checkpoint: a save or a load takes 0.0 GiB of 0.0 GiB of host")
        assert "a node of 2 rank(s)" in answer["line"] and "dp_reshardable" in problem
    assert sum(answer["written"] for answer in answers) == everything


def test_limits_of_control_groups_around_the_process(tmp_path):
    """Version 2 and version 1; "max" and what cannot be seen count as none."""
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("0::/job/step\n5:cpu,memory:/slurm\n6:pids:/\n")
    assert host_memory._group_limits(membership, root) == []
    for path, text in (
        ("job/step/memory.max", "max\n"),
        ("job/memory.max", "4096\n"),
        ("memory/slurm/memory.limit_in_bytes", "8192\n"),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    assert host_memory._group_limits(membership, root) == [4096, 8192, 9223372036854771712]
    assert host_memory._group_limits(tmp_path / "none", root) == []
    assert (host_memory.limit() or 0) > 0


def test_a_run_whose_saves_do_not_fit_does_not_start(monkeypatch):
    said: list[str] = []
    problem = Problem("checkpoint", "does not fit")
    monkeypatch.setattr(host_memory, "check", lambda *a: ("a line", [problem]))
    run = SimpleNamespace(checkpoint=SimpleNamespace(optimizer_sharding="fully_reshardable"))
    checkpointer: Any = SimpleNamespace(parts=None, run=run, ranks=None)
    monitor: Any = SimpleNamespace(say=said.append)
    with pytest.raises(ConfigError, match="does not fit"):
        saver.check_host_memory(checkpointer, monitor)
    assert said == ["a line"]


def test_padding_between_buckets_moves_nothing(ranks, tmp_path):
    """Core drops it when it collects the state, and counts it when it cuts parameters out."""
    arguments = {"bucket": 2000, "core": False, "precision": "fp32"}
    for answer in ranks.play("sharing.several_buckets", world=2, root=str(tmp_path), **arguments):
        assert answer["buckets"] > 2 and answer["padded"] > 0
        assert_same(answer["before"], answer["after"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_that_core_has_shifted_is_refused(ranks, tmp_path, precision):
    """Its main weights are not those of the model; when this fails core is repaired."""
    arguments = {"bucket": 2000, "core": True, "precision": precision}
    for answer in ranks.play("sharing.several_buckets", world=2, root=str(tmp_path), **arguments):
        assert "does not belong to its weights" in answer["error"]
        assert "load_weights_only" in answer["error"]


@pytest.mark.slow
def test_on_four_ranks(tmp_path):
    """Experts with replicas, stages that share a table, tensor and data parallelism: same bits."""
    from rank_pool import RankPool

    from megatron_patch.schema.model import MoEConfig

    tied = {"num_layers": 4, "tie_embeddings": True}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "experts": (
            {"moe": MoEConfig(num_experts=4)},
            {"parallel": {"expert_model_parallel_size": 2}},
        ),
        "stages": (tied, {"layout": "pp"}),
        "tensors": (tied, {"layout": "tp"}),
        "replicas": (tied, {"layout": "dp"}),
    }
    with RankPool(4) as pool:
        for name, (model, changes) in cases.items():
            one, four = tmp_path / name / "one", tmp_path / name / "four"
            save(pool, one, 2, model=model)
            convert(pool, one, "four", world=4, model=model, **changes)  # fmt: skip
            first = contents(pool, one)
            second = contents(pool, four)
            assert_same(first, second, name)
            assert len(list(newest(four).glob("*.distcp"))) == 4

"""What the training, optimizer and parallel sections refuse."""

from typing import Any

import pytest
from run_config import run_config

from megatron_patch.config import checks
from megatron_patch.parallel.setup import LayoutError, check_world_size, world_size_problems
from megatron_patch.schema.model import MoEConfig, MTPConfig


def paths(section: str, keys: dict[str, Any], **others: dict[str, Any]) -> list[str]:
    run = run_config(**{section: keys}, **others)
    return [p.path for p in checks.problems(run, [section])]


@pytest.mark.parametrize("section", ["training", "optimizer", "parallel"])
def test_a_good_section_has_no_problems(section):
    assert paths(section, {}) == []


@pytest.mark.parametrize(
    ("keys", "bad"),
    [
        ({"train_steps": 0}, "train_steps"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"micro_batch_size": 3}, "global_batch_size"),
        ({"eval_interval": 0}, "eval_interval"),
        ({"exit_at_step": 0}, "exit_at_step"),
        ({"exit_after_minutes": 0.0}, "exit_after_minutes"),
        ({"exit_after_minutes": float("nan")}, "exit_after_minutes"),
        ({"seed": -1}, "seed"),
        ({"batch_size_rampup": [2, 2]}, "batch_size_rampup"),
        ({"batch_size_rampup": [8, 2, 9]}, "batch_size_rampup"),
        ({"batch_size_rampup": [2, 4, 9]}, "batch_size_rampup"),
        ({"batch_size_rampup": [3, 5, 9], "micro_batch_size": 2}, "batch_size_rampup"),
    ],
)
def test_training(keys, bad):
    assert paths("training", keys) == [f"training.{bad}"]


@pytest.mark.parametrize(
    ("keys", "bad"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"lr": 1e300}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"warmup_steps": 20}, "warmup_steps"),
        ({"decay_steps": 4, "warmup_steps": 4}, "warmup_steps"),
        ({"schedule": "wsd"}, "wsd_decay_steps"),
        ({"schedule": "wsd", "wsd_decay_steps": 18, "warmup_steps": 3}, "wsd_decay_steps"),
        ({"beta2": 1.0}, "beta2"),
        ({"beta1": 1 - 1e-9}, "beta1"),
        ({"eps": 0.0}, "eps"),
        ({"eps": 1e-60}, "eps"),
        ({"eps": float("inf")}, "eps"),
        ({"clip_grad": -1.0}, "clip_grad"),
        ({"clip_grad": 1e39}, "clip_grad"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"weight_decay": 1e200}, "weight_decay"),
    ],
)
def test_optimizer(keys, bad):
    assert f"optimizer.{bad}" in paths("optimizer", keys)


HIERARCHY = "hierarchical_context_parallel_sizes"
BOTH = {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"}


@pytest.mark.parametrize(
    ("keys", "bad"),
    [
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size"),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1},
            "virtual_pipeline_model_parallel_size",
        ),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size"),
        ({"overlap_param_gather": True}, "overlap_param_gather"),
        ({"distributed_timeout_minutes": 0.0}, "distributed_timeout_minutes"),
        ({"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"}, "cp_comm_type"),
        ({**BOTH, "hierarchical_context_parallel_sizes": [2, 4]}, HIERARCHY),
        ({**BOTH, "hierarchical_context_parallel_sizes": [4, 1]}, HIERARCHY),
        ({**BOTH, "hierarchical_context_parallel_sizes": [-2, -2]}, HIERARCHY),
        ({**BOTH, "hierarchical_context_parallel_sizes": [4]}, HIERARCHY),
        ({**BOTH, "cp_comm_type": "p2p", HIERARCHY: [2, 2]}, HIERARCHY),
        ({HIERARCHY: [2, 2]}, HIERARCHY),
        ({"context_parallel_size": 2, "cp_comm_type": ["p2p"]}, "cp_comm_type"),
        ({"context_parallel_size": 2, "cp_comm_type": []}, "cp_comm_type"),
        ({"context_parallel_size": 4, "cp_comm_type": ["p2p", "a2a+p2p"]}, "cp_comm_type"),
    ],
)
def test_parallel(keys, bad):
    assert paths("parallel", keys) == [f"parallel.{bad}"]


@pytest.mark.parametrize(
    "keys",
    [
        {"context_parallel_size": 2, "cp_comm_type": ["a2a", "p2p"]},
        {**BOTH, HIERARCHY: [2, 2]},
        {**BOTH, "cp_comm_type": ["a2a+p2p", "all_gather"], HIERARCHY: [2, 2]},
        {"cp_comm_type": "a2a+p2p"},  # one rank: nothing travels
    ],
)
def test_context_parallel_modes(keys):
    assert paths("parallel", keys) == []


def test_a_list_of_modes_reaches_every_depth_of_multi_token_prediction():
    keys = {"context_parallel_size": 2, "cp_comm_type": ["p2p", "a2a"]}
    assert paths("parallel", keys, model={"mtp": MTPConfig(num_layers=2)}) == []
    three = {"mtp": MTPConfig(num_layers=3)}
    assert paths("parallel", keys, model=three) == ["parallel.cp_comm_type"]
    assert paths("parallel", keys | {"cp_comm_type": "a2a"}, model=three) == []


def test_the_type_gradients_travel_in_belongs_to_our_backends():
    keys = {"context_parallel_size": 2, "cp_gradient_wire": "bf16"}
    assert paths("parallel", keys, attention={"backend": "reference"}) == []
    assert paths("parallel", keys, attention={"backend": "te"}) == ["parallel.cp_gradient_wire"]


def test_the_type_gradients_travel_in_needs_a_mode_that_sends_shares():
    keys = {"context_parallel_size": 4, "cp_gradient_wire": "bf16"}
    for kinds in ("a2a", ["a2a", "a2a"]):
        assert paths("parallel", keys | {"cp_comm_type": kinds}) == ["parallel.cp_gradient_wire"]
    for kinds in ("p2p", "all_gather", ["a2a", "p2p"]):
        assert paths("parallel", keys | {"cp_comm_type": kinds}) == []
    both = {"cp_comm_type": "a2a+p2p", HIERARCHY: [2, 2]}
    assert paths("parallel", keys | both) == []


def world(ranks: int, parallel: dict[str, Any], **others: dict[str, Any]) -> list[str]:
    return [p.path for p in world_size_problems(run_config(parallel=parallel, **others), ranks)]


def test_world_size():
    two = {"tensor_model_parallel_size": 2}
    assert world(1, {}) == world(2, two) == world(8, two) == []
    assert world(3, two) == ["parallel"]
    assert world(3, {}) == ["training.global_batch_size"]
    virtual = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    batch = {"global_batch_size": 12, "micro_batch_size": 2}
    assert world(4, virtual, training=batch) == ["training.global_batch_size"]
    experts = {"expert_model_parallel_size": 4}
    moe = {"moe": MoEConfig(num_experts=4)}
    assert world(2, experts, model=moe) == ["parallel.expert_model_parallel_size"]
    assert world(4, experts, model=moe) == []


def test_the_error_names_the_remedy():
    run = run_config(parallel={"tensor_model_parallel_size": 4})
    with pytest.raises(LayoutError, match="start a multiple of 4 ranks") as caught:
        check_world_size(run, 6)
    assert caught.value.exit_code == 2

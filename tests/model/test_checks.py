"""Model problems are found before any process starts, and only real ones are.

The property: a shape without problems is one that Megatron-Core's own configuration accepts.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from megatron_cpu import tiny_run

from megatron_patch.config import checks
from megatron_patch.config.checks.model import problems
from megatron_patch.schema.model import MLAConfig, MoEConfig, MTPConfig, ffn_hidden_size
from megatron_patch.schema.training import RecomputeConfig

COMM = "parallel.cp_comm_type"
MLA = MLAConfig(kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)


def paths(run) -> list[str]:
    return [p.path for p in problems(run)]


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"num_layers": 0}, "model.num_layers"),
        ({"hidden_size": -4}, "model.hidden_size"),
        ({"num_attention_heads": 0}, "model.num_attention_heads"),
        ({"num_attention_heads": 3}, "model.num_attention_heads"),
        ({"num_query_groups": 3}, "model.num_query_groups"),
        ({"max_position_embeddings": 8}, "model.max_position_embeddings"),
        ({"rotary_percent": 0.0}, "model.rotary_percent"),
        ({"kv_channels": 9}, "model.rotary_percent"),
        ({"norm_epsilon": 0.0}, "model.norm_epsilon"),
        ({"hidden_dropout": 1.0}, "model.hidden_dropout"),
        ({"attention_dropout": -0.1}, "model.attention_dropout"),
        ({"window": [4]}, "model.window"),
        ({"window": [4, 2]}, "model.window"),
        ({"window": [-1, 0]}, "model.window"),
        ({"window": [4, 0], "window_skip_freq": 0}, "model.window_skip_freq"),
        ({"window": [4, 0], "window_skip_freq": [1]}, "model.window_skip_freq"),
        ({"window": [4, 0], "window_skip_freq": [1, 2]}, "model.window_skip_freq"),
        ({"window_skip_freq": 2}, "model.window_skip_freq"),
        ({"layer_spec": "te"}, "model.layer_spec"),
        ({"moe": MoEConfig(num_experts=2, top_k=3)}, "model.moe.top_k"),
        ({"moe": MoEConfig(num_experts=2, layer_freq=[1])}, "model.moe.layer_freq"),
        ({"moe": MoEConfig(num_experts=2, layer_freq=0)}, "model.moe.layer_freq"),
        ({"moe": MoEConfig(num_experts=2, aux_loss_coeff=-1.0)}, "model.moe.aux_loss_coeff"),
        ({"mla": MLA, "num_query_groups": 2}, "model.num_query_groups"),
        ({"mla": MLA, "kv_channels": 8}, "model.kv_channels"),
        ({"mla": MLA, "add_qkv_bias": True}, "model.add_qkv_bias"),
        ({"mla": MLA, "position_embedding": "none"}, "model.position_embedding"),
        (
            {"mla": dataclasses.replace(MLA, qk_pos_emb_head_dim=3)},
            "model.mla.qk_pos_emb_head_dim",
        ),
        (
            {"mtp": MTPConfig(), "position_embedding": "learned_absolute"},
            "model.position_embedding",
        ),
        ({"mtp": MTPConfig(num_layers=0)}, "model.mtp.num_layers"),
        ({"mtp": MTPConfig(loss_scaling_factor=0.0)}, "model.mtp.loss_scaling_factor"),
    ],
)
def test_one_wrong_value_is_one_problem(model, path):
    assert paths(tiny_run(model)) == [path]


@pytest.mark.parametrize(
    ("model", "parallel", "path"),
    [
        (
            {"ffn_hidden_size": 66},
            {"tensor_model_parallel_size": 3},
            "parallel.tensor_model_parallel_size",
        ),
        ({"num_query_groups": 1}, {"tensor_model_parallel_size": 2}, None),
        (
            {"num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 60},
            {"tensor_model_parallel_size": 8},
            "parallel.tensor_model_parallel_size",
        ),
        ({"mla": MLA}, {"tensor_model_parallel_size": 2}, None),
        (
            {"mla": dataclasses.replace(MLA, kv_lora_rank=15)},
            {"tensor_model_parallel_size": 2},
            "parallel.tensor_model_parallel_size",
        ),
        (
            {"mla": dataclasses.replace(MLA, q_lora_rank=15)},
            {"tensor_model_parallel_size": 2},
            "parallel.tensor_model_parallel_size",
        ),
        (
            {"mla": dataclasses.replace(MLA, q_lora_rank=16), "qk_layernorm": True},
            {"tensor_model_parallel_size": 2},
            "parallel.sequence_parallel",
        ),
        ({}, {"pipeline_model_parallel_size": 3}, "parallel.pipeline_model_parallel_size"),
        (
            {"num_layers": 6},
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "parallel.virtual_pipeline_model_parallel_size",
        ),
        (
            {"seq_length": 15},
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "model.seq_length",
        ),
        ({"seq_length": 14}, {"context_parallel_size": 2}, "model.seq_length"),
        (
            {"seq_length": 20},
            {
                "context_parallel_size": 2,
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
            },
            "model.seq_length",
        ),
        ({"seq_length": 36}, {"context_parallel_size": 6, "cp_comm_type": "a2a"}, COMM),
        ({"seq_length": 36}, {"context_parallel_size": 6, "cp_comm_type": "p2p"}, None),
        (  # 8 heads over TP4 leave 2 for a2a over 4
            {"num_attention_heads": 8},
            {"context_parallel_size": 4, "tensor_model_parallel_size": 4, "cp_comm_type": "a2a"},
            COMM,
        ),
        (  # 6 query heads divide by 2; the 3 key/value heads are replicated as needed
            {"num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 8},
            {"context_parallel_size": 2, "cp_comm_type": "a2a"},
            None,
        ),
        (  # one key/value head is handed to both
            {"num_query_groups": 1},
            {"context_parallel_size": 2, "cp_comm_type": ["p2p", "a2a"]},
            None,
        ),
        (
            {"num_attention_heads": 6, "kv_channels": 8, "seq_length": 32},
            {
                "context_parallel_size": 8,
                "cp_comm_type": "a2a+p2p",
                "hierarchical_context_parallel_sizes": [4, 2],
            },
            "parallel.hierarchical_context_parallel_sizes",
        ),
        (
            {"num_attention_heads": 6, "kv_channels": 8, "seq_length": 32},
            {
                "context_parallel_size": 8,
                "cp_comm_type": "a2a+p2p",
                "hierarchical_context_parallel_sizes": [2, 4],
            },
            None,
        ),
        (
            {"moe": MoEConfig(num_experts=4, load_balancing="sinkhorn")},
            {"context_parallel_size": 2},
            "model.moe.load_balancing",
        ),
        (
            {"moe": MoEConfig(num_experts=3)},
            {"expert_model_parallel_size": 2},
            "parallel.expert_model_parallel_size",
        ),
        (
            {"moe": MoEConfig(num_experts=2)},
            {"tensor_model_parallel_size": 2},
            "parallel.sequence_parallel",
        ),
        (
            {"moe": MoEConfig(num_experts=2), "add_bias_linear": True},
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "model.add_bias_linear",
        ),
        (
            {
                "moe": MoEConfig(num_experts=2, shared_expert_ffn_hidden_size=32),
                "add_bias_linear": True,
            },
            {},
            "model.add_bias_linear",
        ),
        (
            {"moe": MoEConfig(num_experts=2, shared_expert_ffn_hidden_size=33)},
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "model.moe.shared_expert_ffn_hidden_size",
        ),
    ],
)
def test_what_the_layout_cannot_divide(model, parallel, path):
    assert paths(tiny_run(model, parallel=parallel)) == ([] if path is None else [path])


@pytest.mark.parametrize(
    ("recompute", "path"),
    [
        (RecomputeConfig(granularity="full", num_layers=3), "training.recompute.num_layers"),
        (RecomputeConfig(granularity="full", num_layers=0), "training.recompute.num_layers"),
        (RecomputeConfig(granularity="selective", modules=["moe"]), "training.recompute.modules"),
        (
            RecomputeConfig(granularity="selective", modules=["mla_up_proj"]),
            "training.recompute.modules",
        ),
        (
            RecomputeConfig(granularity="selective", modules=["moe_act"]),
            "training.recompute.modules",
        ),
        (
            RecomputeConfig(granularity="selective", modules=["layernorm"]),
            "training.recompute.modules",
        ),
    ],
)
def test_recompute_that_cannot_work(recompute, path):
    assert paths(tiny_run(training={"recompute": recompute})) == [path]


def test_every_problem_is_found_at_once():
    run = tiny_run(
        {"num_query_groups": 3, "window": [1], "hidden_dropout": 2.0, "init_std": 0.0},
        parallel={"pipeline_model_parallel_size": 4},
    )
    assert sorted(paths(run)) == [
        "model.hidden_dropout",
        "model.init_std",
        "model.num_query_groups",
        "model.window",
        "parallel.pipeline_model_parallel_size",
    ]


def test_default_mlp_width():
    assert ffn_hidden_size(tiny_run({"ffn_hidden_size": None, "activation": "gelu"}).model) == 128
    llama = tiny_run({"ffn_hidden_size": None, "hidden_size": 4096}).model
    assert ffn_hidden_size(llama) == 11008


# Mostly valid, so that the property below has something to say (about a third has no problem).
moes = st.builds(
    MoEConfig,
    num_experts=st.sampled_from([2, 4]),
    top_k=st.integers(1, 2),
    layer_freq=st.integers(1, 2),
    load_balancing=st.sampled_from(["aux_loss", "seq_aux_loss", "sinkhorn", "none"]),
    token_dispatcher=st.sampled_from(["allgather", "alltoall"]),
)
shapes = st.fixed_dictionaries(
    {
        "num_layers": st.sampled_from([4, 4, 8, 6]),
        "hidden_size": st.sampled_from([32, 64]),
        "num_attention_heads": st.sampled_from([4, 4, 8, 6]),
        "ffn_hidden_size": st.sampled_from([None, 64, 60]),
        "activation": st.sampled_from(["gelu", "swiglu", "relu", "squared_relu"]),
        "normalization": st.sampled_from(["RMSNorm", "LayerNorm"]),
        "add_bias_linear": st.booleans(),
        "qk_layernorm": st.booleans(),
        "softmax_type": st.sampled_from(["vanilla", "off-by-one", "learnable"]),
        "moe": st.none() | moes,
        "mtp": st.none() | st.builds(MTPConfig, num_layers=st.integers(1, 2)),
    },
    optional={
        "window": st.just([4, 0]),
        "window_skip_freq": st.integers(0, 3),
        "num_query_groups": st.sampled_from([1, 2, 4]),
        "kv_channels": st.sampled_from([8, 9]),
    },
)
latent_shapes = shapes.map(
    lambda s: (
        {k: v for k, v in s.items() if k not in ("num_query_groups", "kv_channels")} | {"mla": MLA}
    )
)
layouts = st.builds(
    lambda tp, pp, ep: {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": 2 if pp > 1 else None,
        "expert_model_parallel_size": ep,
    },
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 1, 2]),
)
recomputes = st.builds(
    RecomputeConfig,
    granularity=st.sampled_from(["none", "selective", "full"]),
    modules=st.sampled_from([["core_attn", "mlp"], ["mlp"], ["moe"], ["mla_up_proj"], ["moe_act"]]),
    method=st.sampled_from(["uniform", "block"]),
    num_layers=st.integers(1, 2),
)


@given(shapes | latent_shapes, layouts, recomputes)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_megatron_core_accepts_what_has_no_problem(model, parallel, recompute):
    from megatron_patch.model.transformer_config import transformer_config

    run = tiny_run(model, parallel=parallel, training={"recompute": recompute})
    clean = not [*checks.problems(run, ("model", "parallel"))]
    event("no problem" if clean else "refused")
    if clean:
        config = transformer_config(run)
        assert config.num_layers == run.model.num_layers
        assert config.ffn_hidden_size == ffn_hidden_size(run.model)


WHOLE = "parallel.use_distributed_optimizer"


@pytest.mark.parametrize(
    ("freq", "layers", "parallel", "found"),
    [
        ([0, 1], 2, {}, True),
        ([1, 0], 2, {}, True),
        (2, 4, {}, False),  # layers 1 and 3: one on either stage
        (4, 4, {}, True),
        ([0, 1], 2, {"use_distributed_optimizer": True}, False),
        ([0, 1], 2, {"expert_model_parallel_size": 1}, False),
        ([0, 1], 2, {"pipeline_model_parallel_size": 1}, False),
        # chunks of one layer: stage 0 has layers 1 and 3, stage 1 has 2 and 4
        ([1, 1, 0, 0], 4, {"virtual_pipeline_model_parallel_size": 2}, False),
        ([1, 0, 1, 0], 4, {"virtual_pipeline_model_parallel_size": 2}, True),
    ],
)
def test_a_whole_optimizer_needs_experts_on_every_stage(freq, layers, parallel, found):
    split = {
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "use_distributed_optimizer": False,
    }
    moe = MoEConfig(num_experts=2, layer_freq=freq)
    run = tiny_run({"num_layers": layers, "moe": moe}, parallel=split | parallel)
    assert (WHOLE in paths(run)) == found

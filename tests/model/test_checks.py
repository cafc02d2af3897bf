"""Model problems are found before any process starts, and only real ones are.

The property: a shape without problems is one that Megatron-Core's own configuration accepts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from megatron_cpu import CP, DIST, EP, MLA, PP, QUERY_MLA, SP, TP, VP, tiny_run

from megatron_patch.config import checks
from megatron_patch.config.checks.model import problems
from megatron_patch.model.transformer_config import transformer_config
from megatron_patch.schema.model import MoEConfig, MTPConfig, RopeScalingConfig, ffn_hidden_size
from megatron_patch.schema.training import RecomputeConfig

LEARNED = "learned_absolute"
ROPE = "model.rope_scaling"
KIND, SIZES = "cp_comm_type", "hierarchical_context_parallel_sizes"


def paths(run) -> list[str]:
    return [p.path for p in problems(run)]


def moe(experts: int, **keys) -> MoEConfig:
    return MoEConfig(num_experts=experts, **keys)


def rope(kind: str, length: int, factor: float = 4.0) -> RopeScalingConfig:
    return RopeScalingConfig(kind=kind, factor=factor, original_max_position_embeddings=length)


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
        ({"rope_scaling": rope("llama3", 4096)}, f"{ROPE}.original_max_position_embeddings"),
        ({"rope_scaling": rope("yarn", 0)}, f"{ROPE}.original_max_position_embeddings"),
        ({"rope_scaling": rope("yarn", 16, factor=1.0)}, f"{ROPE}.factor"),
        ({"rope_scaling": rope("yarn", 16), "position_embedding": "none"}, ROPE),
        ({"rope_scaling": rope("yarn", 16), "mla": MLA}, ROPE),
        ({"rope_scaling": rope("yarn", 16), "rotary_percent": 0.5}, "model.rotary_percent"),
        ({"moe": moe(2, top_k=3)}, "model.moe.top_k"),
        ({"moe": moe(2, layer_freq=[1])}, "model.moe.layer_freq"),
        ({"moe": moe(2, layer_freq=0)}, "model.moe.layer_freq"),
        ({"moe": moe(2, aux_loss_coeff=-1.0)}, "model.moe.aux_loss_coeff"),
        ({"mla": MLA, "num_query_groups": 2}, "model.num_query_groups"),
        ({"mla": MLA, "kv_channels": 8}, "model.kv_channels"),
        ({"mla": MLA, "add_qkv_bias": True}, "model.add_qkv_bias"),
        ({"mla": MLA, "position_embedding": "none"}, "model.position_embedding"),
        ({"mla": replace(MLA, qk_pos_emb_head_dim=3)}, "model.mla.qk_pos_emb_head_dim"),
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


FP8 = {"layer_spec": "te", "seq_length": 32}
GPU = {"device": "cuda", "precision": "bf16"}


@pytest.mark.parametrize(("model", "training", "path", "text"), [
    ({"rope_fusion": "own"}, {}, "model.rope_fusion", "needs a GPU"),
    ({"rope_fusion": "te", "mla": MLA}, GPU, "model.rope_fusion", "Use own"),
    ({"rope_fusion": "te", "position_embedding": "none"}, GPU, "model.rope_fusion", "no effect"),
    ({"rope_fusion": "own"}, GPU, None, ""),
    ({"layer_spec": "te", "fp32_residual_connection": True}, GPU, "model.fp32_residual_connection",
     "the type of their weights"),
    (FP8, GPU | {"fp8": "current"}, None, ""),
    ({"seq_length": 32}, GPU | {"fp8": "current"}, "training.fp8", "model.layer_spec: te"),
    (FP8, {"device": "cuda", "fp8": "blockwise"}, "training.fp8", "precision: bf16"),
    ({}, {"grouped_experts": True}, "training.grouped_experts", "dense"),
    ({"moe": moe(2), "add_bias_linear": True}, {"grouped_experts": True},
     "training.grouped_experts", "biases"),
    (FP8 | {"moe": moe(2)}, GPU | {"fp8": "current"}, "training.fp8", "experts"),
    (FP8 | {"ffn_hidden_size": 72}, GPU | {"fp8": "current"}, "training.fp8", "is 72"),
    (FP8 | {"seq_length": 20}, GPU | {"fp8": "current"}, "training.fp8", "there are 40"),
])  # fmt: skip
def test_what_transformer_engine_would_end_with_a_traceback(model, training, path, text):
    found = list(problems(tiny_run(model, training=training)))
    assert [p.path for p in found] == ([path] if path else [])
    assert all(text in p.message for p in found)


SHAPE6 = {"num_attention_heads": 6, "kv_channels": 8}
BOTH = {CP: 8, KIND: "a2a+p2p"}
UNDIVIDED = [
    ({"ffn_hidden_size": 66}, {TP: 3}, f"parallel.{TP}"),
    ({"num_query_groups": 1}, {TP: 2}, None),
    ({"num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 60}, {TP: 8},
     f"parallel.{TP}"),
    ({"mla": MLA}, {TP: 2}, None),
    ({"mla": replace(MLA, kv_lora_rank=15)}, {TP: 2}, f"parallel.{TP}"),
    ({"mla": replace(MLA, q_lora_rank=15)}, {TP: 2}, f"parallel.{TP}"),
    ({"mla": MLA, "qk_layernorm": True}, {}, "model.qk_layernorm"),
    ({"mla": QUERY_MLA, "qk_layernorm": True}, {}, None),
    ({"mla": QUERY_MLA, "qk_layernorm": True}, {TP: 2},
     "parallel.sequence_parallel"),
    ({}, {PP: 3}, f"parallel.{PP}"),
    ({"num_layers": 6}, {PP: 2, VP: 2}, f"parallel.{VP}"),
    ({"seq_length": 15}, {TP: 2, **SP}, "model.seq_length"),
    ({"seq_length": 14}, {CP: 2}, "model.seq_length"),
    ({"seq_length": 20}, {CP: 2, TP: 2, **SP}, "model.seq_length"),
    ({"seq_length": 36}, {CP: 6, KIND: "a2a"}, f"parallel.{KIND}"),
    ({"seq_length": 36}, {CP: 6, KIND: "p2p"}, None),
    # 8 heads over TP4 leave 2 for a2a over 4
    ({"num_attention_heads": 8}, {CP: 4, TP: 4, KIND: "a2a"}, f"parallel.{KIND}"),
    # 6 query heads divide by 2; the 3 key/value heads are replicated as needed
    (SHAPE6 | {"num_query_groups": 3}, {CP: 2, KIND: "a2a"}, None),
    # one key/value head is handed to both
    ({"num_query_groups": 1}, {CP: 2, KIND: ["p2p", "a2a"]}, None),
    (SHAPE6 | {"seq_length": 32}, BOTH | {SIZES: [4, 2]}, f"parallel.{SIZES}"),
    (SHAPE6 | {"seq_length": 32}, BOTH | {SIZES: [2, 4]}, None),
    ({"moe": moe(4, load_balancing="sinkhorn")}, {CP: 2}, "model.moe.load_balancing"),
    ({"moe": moe(4, load_balancing="sinkhorn")}, {TP: 2, **SP}, "model.moe.load_balancing"),
    ({"moe": moe(4, load_balancing="sinkhorn")}, {}, None),
    ({"moe": moe(3)}, {EP: 2}, f"parallel.{EP}"),
    ({"moe": moe(2)}, {TP: 2}, "parallel.sequence_parallel"),
    ({"moe": moe(2), "add_bias_linear": True}, {TP: 2, **SP}, "model.add_bias_linear"),
    ({"moe": moe(2, shared_expert_ffn_hidden_size=32), "add_bias_linear": True}, {},
     "model.add_bias_linear"),
    ({"moe": moe(2, shared_expert_ffn_hidden_size=33)}, {TP: 2, **SP},
     "model.moe.shared_expert_ffn_hidden_size"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "parallel", "path"), UNDIVIDED)
def test_what_the_layout_cannot_divide(model, parallel, path):
    assert paths(tiny_run(model, parallel=parallel)) == ([] if path is None else [path])


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"granularity": "full", "num_layers": 3}, "num_layers"),
        ({"granularity": "full", "num_layers": 0}, "num_layers"),
        *(
            ({"granularity": "selective", "modules": [module]}, "modules")
            for module in ("moe", "mla_up_proj", "moe_act", "layernorm")
        ),
    ],
)
def test_recompute_that_cannot_work(keys, name):
    run = tiny_run(training={"recompute": RecomputeConfig(**keys)})
    assert paths(run) == [f"training.recompute.{name}"]


@pytest.mark.parametrize(("method", "found"), [("uniform", 1), ("block", 0)])
def test_groups_of_layers_are_not_recomputed_beside_further_tokens(method, found):
    """Core asserts it in the first step of the depths; it keeps them under `block`."""
    keys = RecomputeConfig(granularity="full", method=method, num_layers=2)
    run = tiny_run({"mtp": MTPConfig()}, training={"recompute": keys})
    assert paths(run) == ["training.recompute.num_layers"] * found


def test_every_problem_is_found_at_once():
    run = tiny_run(
        {"num_query_groups": 3, "window": [1], "hidden_dropout": 2.0, "init_std": 0.0},
        parallel={PP: 4},
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
    lambda tp, pp, ep: (
        {TP: tp, "sequence_parallel": tp > 1, PP: pp, VP: 2 if pp > 1 else None, EP: ep}
    ),
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


@pytest.mark.parametrize(
    ("freq", "layers", "parallel", "found"),
    [
        ([0, 1], 2, {}, True),
        ([1, 0], 2, {}, True),
        (2, 4, {}, False),  # layers 1 and 3: one on either stage
        (4, 4, {}, True),
        ([0, 1], 2, {DIST: True}, False),
        ([0, 1], 2, {EP: 1}, False),
        ([0, 1], 2, {PP: 1}, False),
        # chunks of one layer: stage 0 has layers 1 and 3, stage 1 has 2 and 4
        ([1, 1, 0, 0], 4, {VP: 2}, False),
        ([1, 0, 1, 0], 4, {VP: 2}, True),
    ],
)
def test_a_whole_optimizer_needs_experts_on_every_stage(freq, layers, parallel, found):
    split = {PP: 2, EP: 2, DIST: False}
    model = {"num_layers": layers, "moe": moe(2, layer_freq=freq)}
    assert (f"parallel.{DIST}" in paths(tiny_run(model, parallel=split | parallel))) == found


FIRST, LAST = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


@pytest.mark.parametrize(
    ("layers", "parallel"),
    [
        (8, {PP: 4}),
        (7, {PP: 4, FIRST: 1}),
        (7, {PP: 4, LAST: 1}),
        (8, {PP: 4, FIRST: 1, LAST: 3}),
        (5, {PP: 2, FIRST: 2, LAST: 3}),
        (6, {PP: 2, FIRST: 2, LAST: 4, VP: 2}),
        (12, {PP: 4, FIRST: 2, LAST: 2, VP: 2}),
        (14, {PP: 4, FIRST: 2, VP: 2}),
    ],
)
def test_stages_hold_the_layers_that_megatron_core_gives_them(layers, parallel):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    run = tiny_run({"num_layers": layers}, parallel=parallel)
    assert paths(run) == []
    config, p = transformer_config(run), run.parallel
    for stage in range(p.pipeline_model_parallel_size):
        for virtual in range(p.virtual_pipeline_model_parallel_size or 1):
            where = {"vp_stage": virtual if VP in parallel else None, "pp_rank": stage}
            offset = get_transformer_layer_offset(config, **where)
            count = get_num_layers_to_build(config, **where)
            ours = p.chunk_layers(layers, stage=stage, virtual=virtual)
            assert list(ours) == list(range(offset + 1, offset + count + 1))


@pytest.mark.parametrize(
    ("layers", "parallel", "path"),
    [
        (8, {PP: 4, FIRST: 1}, FIRST),
        (4, {PP: 2, FIRST: 1, LAST: 2}, FIRST),
        (4, {PP: 4, LAST: 4}, LAST),
        (12, {PP: 4, FIRST: 3, LAST: 3, VP: 2}, FIRST),
    ],
)
def test_layers_that_cannot_be_dealt_out_are_refused(layers, parallel, path):
    found = list(problems(tiny_run({"num_layers": layers}, parallel=parallel)))
    assert [p.path for p in found] == [f"parallel.{path}"]
    assert "must hold equal numbers" in found[0].message

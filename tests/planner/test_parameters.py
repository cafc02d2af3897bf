"""Names, shapes, order and groups of the parameters of every rank are those of the built model."""

from __future__ import annotations

import dry_run
import megatron_cpu
import pytest
from megatron_cpu import CP, EP, ETP, PP, QUERY_MLA, SP, TP, VP, tiny_run

from megatron_patch.planner import parameters
from megatron_patch.schema.model import MoEConfig, MTPConfig

VOCAB = 60
GPT2 = {
    "position_embedding": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "tie_embeddings": True,
}
GQA = {"num_attention_heads": 8, "num_query_groups": 2, "qk_layernorm": True}
MLA = {"mla": QUERY_MLA, "qk_layernorm": True}
DIRECT = {"mla": megatron_cpu.MLA}
MOE = {"moe": MoEConfig(num_experts=4, layer_freq=[0, 1, 1, 1], ffn_hidden_size=48)}
SHARED = {"moe": MoEConfig(num_experts=4, shared_expert_ffn_hidden_size=16)}
TIED_MTP = {"mtp": MTPConfig(), "tie_embeddings": True}
BIASES = {"moe": MoEConfig(num_experts=4), "add_bias_linear": True}

CASES = {
    "gpt2": (GPT2, {}),
    "gpt2 tp2": (GPT2, {TP: 2}),
    "gpt2 pp2": (GPT2, {PP: 2}),
    "gpt2 tp2 sp pp2 vp2": (GPT2, {TP: 2, PP: 2, VP: 2, **SP}),
    "gqa": (GQA, {}),
    "gqa, fewer kv heads than ranks": (GQA, {TP: 4, **SP}),
    "gqa pp4": (GQA, {PP: 4}),
    "gqa cp2 pp2": (GQA, {CP: 2, PP: 2}),
    "sinks": ({"softmax_type": "learnable"}, {TP: 2}),
    "squared relu, fixed sink": (
        {"softmax_type": "off-by-one", "activation": "squared_relu", "kv_channels": 16},
        {TP: 2},
    ),
    "mla": (MLA, {}),
    "mla tp2 sp": (MLA, {TP: 2, **SP}),
    "mla, direct queries": (DIRECT, {PP: 2}),
    "moe": (MOE, {}),
    "moe ep2": (MOE, {EP: 2}),
    "moe tp2 etp1": (MOE, {TP: 2, ETP: 1, **SP}),
    "moe tp2 ep2 pp2": (MOE, {TP: 2, EP: 2, PP: 2, **SP}),
    "shared expert": (SHARED, {EP: 4}),
    "biases in experts": (BIASES, {EP: 2}),
    "mtp": ({"mtp": MTPConfig(num_layers=2)}, {}),
    "mtp, tied": (TIED_MTP, {}),
    "mtp, tied, pp2": (TIED_MTP, {PP: 2}),
    "mtp, tied, pp2 vp2": (TIED_MTP, {PP: 2, VP: 2}),
    "mtp, pp2": ({"mtp": MTPConfig()}, {PP: 2}),
    "everything": ({**MLA, **MOE, "mtp": MTPConfig()}, {TP: 2, EP: 2, PP: 2, VP: 2, **SP}),
}


def world_of(parallel) -> int:
    size = parallel.get(TP, 1) * parallel.get(PP, 1) * parallel.get(CP, 1)
    experts = parallel.get(ETP, parallel.get(TP, 1)) * parallel.get(EP, 1) * parallel.get(PP, 1)
    return max(size, experts)


def built(run, rank: int, world: int):
    """[(name, shape, expert, tied)] of every chunk, and the padded vocabulary."""
    with dry_run.rank_of(run, rank, world):
        from megatron_patch.model.build import build_model
        from megatron_patch.planner.plan import padded

        model = build_model(run, vocab_size=VOCAB)
        found = [
            [
                (
                    name,
                    tuple(p.shape),
                    not getattr(p, "allreduce", True),
                    bool(getattr(p, "shared_embedding", False)),
                )
                for name, p in chunk.named_parameters()
            ]
            for chunk in model.chunks
        ]
        return found, padded(run, VOCAB)


@pytest.mark.parametrize(("model", "parallel"), CASES.values(), ids=CASES.keys())
def test_every_rank(model, parallel):
    run = tiny_run({"num_layers": 4, **model}, parallel=parallel, training={"precision": "bf16"})
    world = world_of(parallel)
    for rank in range(world):
        found, vocab = built(run, rank, world)
        stage = rank * run.parallel.pipeline_model_parallel_size // world
        expected = [
            [
                (p.name, p.shape, p.expert, p.tied)
                for p in parameters.chunk_parameters(run, c, vocab)
            ]
            for c in parameters.chunks_of(run, stage)
        ]
        assert found == expected


def test_published_counts():
    """Totals the models' authors give (Llama 3: 8.03B and 70.6B; GPT-2: 124,439,808)."""
    llama = {"num_query_groups": 8, "tie_embeddings": False}
    small = tiny_run(
        {**llama, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
        | {"ffn_hidden_size": 14336}
    )
    large = tiny_run(
        {**llama, "num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
        | {"ffn_hidden_size": 28672}
    )
    assert parameters.model_counts(small, 128256).total == 8_030_261_248
    assert parameters.model_counts(large, 128256).total == 70_553_706_496
    gpt2 = tiny_run(
        {**GPT2, "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
        | {"seq_length": 1024, "ffn_hidden_size": None}
    )
    assert parameters.model_counts(gpt2, 50257).total == 124_439_808


def test_active_parameters_leave_out_idle_experts():
    run = tiny_run(MOE | {"num_layers": 4})
    counts = parameters.model_counts(run, 64)
    experts = 3 * 4 * 3 * 48 * 32  # layers x experts x matrices x sizes
    assert counts.total - counts.active == experts * 2 // 4

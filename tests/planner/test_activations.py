"""Peak memory of one forward and backward pass of the real model, rank by rank, against the plan.

The model, the wrappers, the schedule and core's collectives are the real ones; `dry_run` says what
is not. Tolerance: 3% (the issue asks for 10% on GPUs), wider only where a comment says why.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from types import SimpleNamespace

import dry_run
import pytest
import torch
import torch.distributed as dist
from megatron_cpu import CP, PP, SP, TP, VP, single_rank, tiny_run
from test_parameters import GPT2

from megatron_patch.attention.backends import BACKENDS, reference
from megatron_patch.planner import activations, memory
from megatron_patch.planner.layout import layout_of
from megatron_patch.planner.plan import padded
from megatron_patch.schema.model import MLAConfig, MoEConfig, MTPConfig
from megatron_patch.schema.stability import StabilityConfig
from megatron_patch.schema.training import RecomputeConfig

SHAPE = {
    "num_layers": 4,
    "hidden_size": 1024,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "seq_length": 2048,
}
SMALL = {
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 640,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "seq_length": 512,
}
EVERY_HEAD = {"num_query_groups": None}
LATENT = MLAConfig(
    q_lora_rank=768, kv_lora_rank=256, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
)
MLA = {"mla": LATENT, "qk_layernorm": True, **EVERY_HEAD}
MOE = {"moe": MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=640)}
GATHERING = {"moe": MoEConfig(num_experts=8, ffn_hidden_size=640, token_dispatcher="allgather")}
SMALL_LATENT = MLAConfig(
    q_lora_rank=64, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=32
)


def recompute(granularity: str, **keys) -> dict:
    return {"recompute": RecomputeConfig(granularity=granularity, **keys)}


def compare(model, parallel=None, training=None, *, world=1, rank=0, vocab=1000, fake=True, **more):
    """(bytes measured, the plan's stage) of one rank."""
    loop = {
        "precision": "bf16",
        "micro_batch_size": 1,
        "global_batch_size": 8 if PP in (parallel or {}) else 2,
    }
    run = tiny_run(
        SHAPE | model,
        attention={"backend": "stable_flash"} | more,
        training=loop | (training or {}),
        parallel=parallel or {},
    )
    found = dry_run.step(run, rank=rank, world=world, vocab=vocab, fake=fake)
    layout = layout_of(run, 1, world)
    stages = memory.memory_of(run, layout, padded(run, vocab))
    return found.activations, stages[rank * layout.pp // world]


DENSE = {
    "llama-like": ({}, {}),
    "vocabulary 128k": ({}, {"vocab": 128256}),
    "gpt2": ({**GPT2, **EVERY_HEAD}, {}),
    "gpt2, micro-batch 8": (
        {**GPT2, **EVERY_HEAD},
        {"training": {"micro_batch_size": 8, "global_batch_size": 16}},
    ),
    "query and key norms": ({"qk_layernorm": True}, {}),
    "float32 residual stream": ({"fp32_residual_connection": True}, {}),
    "squared relu": ({"activation": "squared_relu"}, {}),
    "relu": ({"activation": "relu"}, {}),
    "gelu, no bias": ({"activation": "gelu"}, {}),
    "no positions": ({"position_embedding": "none"}, {}),
    "dropout": ({"hidden_dropout": 0.1}, {}),
    "no stabilizer": ({}, {"stabilizer": "none"}),
    "int8 o_lo": ({}, {"o_lo": "int8"}),
    "unfused attention": ({}, {"backend": "mcore_local"}),
    "reference attention": ({"seq_length": 1024}, {"backend": "reference"}),
    "latent attention": (MLA, {}),
    "latent attention, direct queries": ({"mla": MLAConfig(kv_lora_rank=256), **EVERY_HEAD}, {}),
    "multi-token prediction": ({"mtp": MTPConfig()}, {}),
    "multi-token prediction, vocabulary 32k": ({"mtp": MTPConfig()}, {"vocab": 32000}),
    "full recompute": ({}, {"training": recompute("full")}),
    "full recompute, groups of 2": ({}, {"training": recompute("full", num_layers=2)}),
    "full recompute of 2 layers": (
        {},
        {"training": recompute("full", method="block", num_layers=2)},
    ),
    "MLP recompute": ({}, {"training": recompute("selective")}),
    "attention recompute": ({}, {"training": recompute("selective", modules=["core_attn"])}),
}


@pytest.mark.parametrize(("model", "keys"), DENSE.values(), ids=DENSE.keys())
def test_one_rank(model, keys):
    measured, planned = compare(model, **keys)
    assert planned.dynamic == pytest.approx(measured, rel=0.035)


SPLIT = {
    "tp4 sp": ({TP: 4, **SP}, {}),
    "tp4 sp, vocabulary 128k": ({TP: 4, **SP}, {"vocab": 128256}),
    "tp4": ({TP: 4}, {}),
    "pp2": ({PP: 2}, {}),
    "pp4": ({PP: 4}, {}),
    "pp2, full recompute": ({PP: 2}, {"training": recompute("full")}),
    "pp2 vp2": ({PP: 2, VP: 2}, {}),
    "tp2 sp pp2 vp2": ({TP: 2, PP: 2, VP: 2, **SP}, {}),
}


SHARED = {
    "tp4 sp, 2 kv heads": (4, 2, 0, {}),
    "tp8 sp, 1 kv head": (8, 1, 0, {}),
    "tp8 sp, 2 kv heads": (8, 2, 5, {}),
    "tp4 sp, 2 kv heads, query and key norms": (4, 2, 0, {"qk_layernorm": True}),
    "tp4 sp, 2 kv heads, no positions": (4, 2, 0, {"position_embedding": "none"}),
}


@pytest.mark.parametrize(("tp", "groups", "rank", "model"), SHARED.values(), ids=SHARED.keys())
def test_fewer_key_value_heads_than_ranks(tp, groups, rank, model):
    """Core gathers the whole qkv projection on every rank, and k and v are views of it."""
    model = {"num_query_groups": groups, **model}
    measured, planned = compare(model, {TP: tp, **SP}, world=tp, rank=rank)
    assert planned.dynamic == pytest.approx(measured, rel=0.035)


@pytest.mark.parametrize(("parallel", "keys"), SPLIT.values(), ids=SPLIT.keys())
def test_every_stage(parallel, keys):
    tp, pp = parallel.get(TP, 1), parallel.get(PP, 1)
    for stage in range(pp):
        measured, planned = compare({}, parallel, world=tp * pp, rank=stage * tp, **keys)
        assert planned.dynamic == pytest.approx(measured, rel=0.05), f"stage {stage}"


SEQUENCE = {
    "p2p": ({CP: 2}, {}),
    "p2p, 4 ranks": ({CP: 4}, {}),
    "p2p, 8 ranks": ({CP: 8}, {}),
    "all_gather, 4 ranks": ({CP: 4, "cp_comm_type": "all_gather"}, {}),
    "a2a": ({CP: 2, "cp_comm_type": "a2a"}, {}),
    "p2p, tp2 sp": ({TP: 2, CP: 2, **SP}, {}),
    "p2p, full recompute": ({CP: 2}, {"training": recompute("full")}),
}


@pytest.mark.parametrize(("parallel", "keys"), SEQUENCE.values(), ids=SEQUENCE.keys())
def test_context_parallel(parallel, keys):
    """Communication is real code over a fake group; the chunk kernels are shapes only."""
    world = parallel[CP] * parallel.get(TP, 1)
    measured, planned = compare({}, parallel, world=world, **keys)
    assert planned.dynamic == pytest.approx(measured, rel=0.035)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_where_the_ring_is_the_peak(ranks):
    """One layer, a narrow MLP and as many key/value heads as query heads."""
    model = {"num_layers": 1, "num_query_groups": 8, "ffn_hidden_size": 256, "seq_length": 8192}
    measured, planned = compare(model, {CP: ranks}, world=ranks, vocab=64)
    assert planned.moment.startswith("attention kernel")
    assert planned.dynamic == pytest.approx(measured, rel=0.06)


def test_latent_attention_under_tensor_parallelism():
    measured, planned = compare(MLA, {TP: 4, **SP}, world=4)
    assert planned.dynamic == pytest.approx(measured, rel=0.035)


@pytest.mark.parametrize("model", [MOE, GATHERING], ids=["alltoall", "allgather"])
def test_experts(model):
    """Routing is not balanced in a model that was never trained, hence 6%."""
    measured, planned = compare(SMALL | model, vocab=512, fake=False)
    assert planned.dynamic == pytest.approx(measured, rel=0.06)


def test_experts_of_several_ranks_are_planned_for_the_fullest():
    def kept(ranks: int) -> int:
        run = tiny_run(SMALL | MOE, parallel={"expert_model_parallel_size": ranks})
        acts = activations.Activations(run, 512)
        return sum(x.size for x in acts.experts(run.model.moe) if "router" not in x.name)

    assert kept(2) == kept(4) == activations.UNBALANCED * kept(1)


def logits_alive(loss, rows: int, vocab: int) -> float:
    """Most float32 [rows, vocab] matrices that are alive at once in forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    logits = torch.randn(rows, 1, vocab).bfloat16().requires_grad_()
    target = torch.randint(0, vocab, (rows, 1))
    loss(logits, target).sum().backward()  # compiles
    logits.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss(logits, target).sum().backward()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(sizes) / (4 * rows * vocab)


@pytest.mark.slow  # a C++ compiler takes a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_what_the_compiled_cross_entropy_holds_beside_the_logits():
    """In the backward pass: their gradient in BF16."""
    from megatron_patch.core_patches.cross_entropy import cross_entropy

    with single_rank():
        group = dist.group.WORLD
        torch.compiler.set_stance("default")  # CPU mode runs eagerly
        compiled = logits_alive(lambda x, y: cross_entropy(x, y, group), 256, 8192)
    assert compiled == pytest.approx(0.5, abs=0.02)  # and the logits themselves, not counted here


def test_what_the_cross_entropy_holds_beside_the_logits():
    """In the backward pass: the gradient in BF16 and, unless compiled, a float32 softmax."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    with single_rank():
        group = dist.group.WORLD
        eager = logits_alive(lambda x, y: vocab_parallel_cross_entropy(x, y, 0.0, group), 256, 8192)
    assert eager == pytest.approx(1.5, abs=0.02)

    def saved(fused: bool) -> int:
        run = tiny_run(
            SHAPE, training={"device": "cuda", "precision": "bf16", "compile_fusions": fused}
        )
        acts = activations.Activations(run, 8192)
        (matrix,) = (x.size for x in acts.head() if "logits" in x.name)
        assert acts.head_moments()[0].freed == matrix
        return matrix

    rows = 2 * SHAPE["seq_length"]  # a micro-batch of two
    assert saved(False) == 4 * rows * 8192 and saved(True) == 2 * rows * 8192


def test_recomputed_up_projection():
    keys = recompute("selective", modules=["mla_up_proj"])
    model = {**SMALL, "mla": SMALL_LATENT, "qk_layernorm": True, **EVERY_HEAD}
    measured, planned = compare(model, training=keys, fake=False)
    assert planned.dynamic == pytest.approx(measured, rel=0.035)


def test_the_tile_of_the_reference_is_its_own():
    from stable_attention.reference import blockwise

    assert reference.TILE == blockwise.TILE_BYTES


def test_head_dims_whose_dq_is_summed_are_those_of_the_kernels():
    from stable_attention import dispatch

    (hopper,) = (row for row in dispatch.KERNEL_SETS if row.name == "hopper")
    assert tuple(hopper.head_dims) == BACKENDS["stable_flash"].summed_head_dims


def test_parts_of_query_heads_add_float32_gradients_of_keys():
    from megatron_patch.planner.activations import score_bytes

    def of(heads: int, ranks: int = 1) -> int:
        sizes = SimpleNamespace(T=10, q=heads, g=2, d=64, dv=64, w=2, s=10)
        training = {"device": "cuda", "precision": "bf16"}
        run = tiny_run(
            attention={"backend": "stable_flash"}, training=training,
            parallel={"context_parallel_size": ranks},
        )  # fmt: skip
        return score_bytes(run, sizes)

    assert of(4) - 2 * of(2) == 4 * 10 * (2 * 2 * 64 * 2)
    assert of(2, ranks=2) - of(2) == 4 * 10 * (2 * 2 * 64), "chunks add them with one part, too"


def switching(backend: str, stabilizer: str, guard: str) -> int:
    """Bytes the plan gives to the attention kernel."""
    run = tiny_run(
        SHAPE | {"hidden_size": 512},
        attention={"backend": backend, "stabilizer": stabilizer},
        training={"precision": "bf16"},
    )
    run = replace(run, stability=StabilityConfig(guard=guard))
    (stage,) = memory.memory_of(run, layout_of(run, 1, 1), 1024)
    return stage.kernel


@pytest.mark.parametrize("backend", ["stable_flash", "sdpa_flash"])
def test_a_guard_that_switches_is_planned_for_the_larger_numerics(backend):
    before = switching(backend, "none", "warn")
    after = switching("stable_flash", "compensated", "warn")
    assert switching(backend, "none", "switch") == after > before
    unfused = switching("mcore_local", "compensated", "warn")
    assert switching("mcore_local", "compensated", "switch") == unfused > after


def test_a_borrowed_backward_is_planned_with_what_stands_in_for_o():
    from megatron_patch.planner.activations import score_bytes

    sizes = SimpleNamespace(T=10, q=4, g=2, d=64, dv=64, w=2, s=10)

    def of(**attention):
        return score_bytes(tiny_run(attention=attention), sizes)

    assert of(backward="sdpa_flash") - of() == 10 * 4 * 64 * 2
    assert of(backward="own") == of()
    assert of(backward="own_x2") == of()
    assert of(backend="fa4") > of(backend="sdpa_flash")


def test_int8_attention_keeps_codes_instead_of_normalized_queries_and_keys():
    def of(backend: str, guard: str) -> int:
        run = tiny_run(
            SHAPE | {"kv_channels": 64, "qk_layernorm": True},
            attention={"backend": backend},
            training={"precision": "bf16"},
        )
        run = replace(run, stability=StabilityConfig(guard=guard))
        (stage,) = memory.memory_of(run, layout_of(run, 1, 1), 1024)
        return stage.activations + stage.kernel

    compensated = of("stable_flash", "warn")
    assert of("sage_int8", "warn") < compensated
    # The guard may bring the other numerics in the middle of a run.
    assert of("sage_int8", "switch") >= compensated


def test_the_measurement_sees_a_tensor_that_is_kept():
    """Were the norm to keep a second copy of its input, the comparison would fail."""
    plain, planned = compare({})

    before = dry_run.FusedNorm

    class Wasteful(before):
        @staticmethod
        def forward(ctx, x, weight):
            out = before.forward(ctx, x, weight)
            ctx.more = x.clone()
            return out

    dry_run.FusedNorm = Wasteful
    try:
        measured, _ = compare({})
    finally:
        dry_run.FusedNorm = before
    assert measured - plain >= 8 * 2 * 2048 * 1024
    assert planned.dynamic != pytest.approx(measured, rel=0.035)

"""Every model variant is built from the configuration and trains a step on the CPU."""

import logging

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron_cpu import MLA, QUERY_MLA, VOCAB, loss_and_grads, reseed, tiny_run

from megatron_patch.attention import registry
from megatron_patch.attention.core import CoreAttention
from megatron_patch.attention.registry import BackendError
from megatron_patch.config import checks
from megatron_patch.core_patches.norms import LayerNorm, RMSNorm
from megatron_patch.model.build import build_model
from megatron_patch.planner.plan import padded
from megatron_patch.schema.model import MoEConfig, MTPConfig
from megatron_patch.schema.training import RecomputeConfig

pytestmark = pytest.mark.usefixtures("rank")

VARIANTS = {
    "llama-like": {"num_query_groups": 2},
    "gpt2-like": {
        "normalization": "LayerNorm",
        "activation": "gelu",
        "position_embedding": "learned_absolute",
        "tie_embeddings": True,
        "add_bias_linear": True,
        "add_qkv_bias": True,
    },
    "no positions, relu, qk norm":
        {"position_embedding": "none", "activation": "relu", "qk_layernorm": True},
    "squared relu, partial rope, wide heads":
        {"activation": "squared_relu", "rotary_percent": 0.5, "kv_channels": 16},
    "window": {"window": [3, 0], "window_skip_freq": 2},
    "fixed sinks": {"softmax_type": "off-by-one"},
    "learnable sinks": {"softmax_type": "learnable"},
    "moe, all-to-all": {"moe": MoEConfig(num_experts=4)},
    "moe, shared expert, mixed layers": {
        "moe": MoEConfig(
            num_experts=4,
            top_k=1,
            layer_freq=[0, 1],
            token_dispatcher="allgather",
            ffn_hidden_size=48,
            shared_expert_ffn_hidden_size=32,
        )
    },
    "moe, sinkhorn": {"moe": MoEConfig(num_experts=4, top_k=1, load_balancing="sinkhorn")},
    "mla": {"mla": MLA},
    "mla, query latent, qk norm": {"mla": QUERY_MLA, "qk_layernorm": True},
    "mtp": {"mtp": MTPConfig(num_layers=2)},
    "mla, moe and mtp": {"mla": MLA, "moe": MoEConfig(num_experts=2), "mtp": MTPConfig()},
    "residual in fp32": {"fp32_residual_connection": True},
}  # fmt: skip


def built(run):
    reseed()
    # Core sizes its table of MoE losses once a process, by the first model's layers.
    destroy_moe_metrics_tracker()
    (chunk,) = build_model(run, vocab_size=VOCAB).chunks
    # What Megatron-Core's Float16Module does around it: some parameters come in float32, the
    # table of learned positions among them.
    return chunk.bfloat16() if run.training.precision == "bf16" else chunk


@pytest.mark.parametrize(
    ("name", "precision"), [("llama-like", "fp32"), *((name, "bf16") for name in VARIANTS)]
)
def test_variant_builds_and_trains_a_step(name, precision):
    run = tiny_run(VARIANTS[name], training={"precision": precision})
    assert not list(checks.problems(run, ("model", "attention")))
    chunk = built(run)
    loss, grads = loss_and_grads(chunk)
    # A fresh model predicts every token about equally: ln 64 = 4.16.
    assert abs(loss - 4.16) < 0.2
    assert set(grads) == {n for n, _ in chunk.named_parameters()}
    assert all(g.isfinite().all() for g in grads.values())
    # An expert that no token chose has a zero gradient; nothing else may.
    silent = [n for n, g in grads.items() if not g.any() and ".local_experts." not in n]
    assert not silent
    cores = [m for m in chunk.modules() if isinstance(m, CoreAttention)]
    depth = run.model.num_layers + (run.model.mtp.num_layers if run.model.mtp else 0)
    assert len(cores) == depth


@pytest.mark.parametrize("name", ["llama-like", "gpt2-like", "window", "learnable sinks"])
def test_reference_and_stock_attention_train_alike(name):
    results = []
    for backend in ("reference", "mcore_local"):
        run = tiny_run(VARIANTS[name], attention={"backend": backend})
        results.append(loss_and_grads(built(run)))
    (loss, grads), (stock_loss, stock_grads) = results
    assert loss == pytest.approx(stock_loss, rel=1e-6)
    for key, value in stock_grads.items():
        torch.testing.assert_close(grads[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(granularity="selective", modules=["core_attn", "mlp"]),
        RecomputeConfig(granularity="full"),
        RecomputeConfig(granularity="full", method="block", num_layers=1),
    ],
    ids=["selective", "full", "block"],
)
@pytest.mark.parametrize("name", ["llama-like", "gpt2-like", "mla, moe and mtp"])
def test_recompute_changes_nothing_even_with_dropout(name, recompute):
    shape = VARIANTS[name] | {"hidden_dropout": 0.2, "attention_dropout": 0.3}
    loss, grads = loss_and_grads(built(tiny_run(shape)))
    again, replayed = loss_and_grads(built(tiny_run(shape, training={"recompute": recompute})))
    assert loss == again
    assert all(torch.equal(grads[key], replayed[key]) for key in grads)


def test_recompute_of_the_latent_projection():
    plain = loss_and_grads(built(tiny_run({"mla": MLA, "hidden_dropout": 0.2})))
    recompute = RecomputeConfig(granularity="selective", modules=["mla_up_proj"])
    run = tiny_run({"mla": MLA, "hidden_dropout": 0.2}, training={"recompute": recompute})
    assert loss_and_grads(built(run))[0] == plain[0]


def test_all_norms_are_ours_including_the_last():
    for kind, ours in (("RMSNorm", RMSNorm), ("LayerNorm", LayerNorm)):
        shape = {"normalization": kind, "qk_layernorm": True, "mtp": MTPConfig()}
        chunk = built(tiny_run(shape))
        named = [m for name, m in chunk.named_modules() if name.endswith("norm")]
        norms = [m for m in named if not isinstance(m, IdentityOp)]
        assert len(norms) == 2 * 4 + 1 + 4 + 3  # two layers, the last, an MTP layer and its three
        assert {type(m) for m in norms} == {ours}
        assert type(chunk.decoder.final_layernorm) is ours


def test_initial_weights_follow_the_configuration():
    run = tiny_run({"hidden_size": 64, "init_std": 0.1, "num_layers": 8})
    state = built(run).state_dict()
    layer = "decoder.layers.0.self_attention."
    assert state[layer + "linear_qkv.weight"].std().item() == pytest.approx(0.1, rel=0.05)
    assert state[layer + "linear_proj.weight"].std().item() == pytest.approx(0.1 / 4, rel=0.05)


def test_vocabulary_is_padded_to_the_tensor_parallel_multiple():
    run_shape = {"make_vocab_size_divisible_by": 128}
    run = tiny_run(run_shape, parallel={"tensor_model_parallel_size": 4})
    assert padded(run, 1) == padded(run, 128) == 128
    assert padded(run, 50257) == 50304
    three = tiny_run(run_shape, parallel={"tensor_model_parallel_size": 3})
    assert padded(three, 50257) == 50304
    assert padded(three, 50305) == 50688


def test_start_up_lines_and_the_deprecation_note(caplog):
    run = tiny_run({"window": [3, 0], "window_skip_freq": 2, "mtp": MTPConfig()})
    with caplog.at_level(logging.INFO):
        model = build_model(run, vocab_size=VOCAB)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("attention: ")]
    assert lines == [s.line() for s in model.selections] and len(lines) == 3
    assert not [r for r in caplog.records if "GPTModel IS DEPRECATED" in r.getMessage()]
    assert [r for r in caplog.records if "HybridModel" in r.getMessage()]


@pytest.mark.parametrize("skip", [2, 3, [0, 1, 1, 0]])
def test_the_kinds_of_layers_are_those_that_core_builds(skip):
    """Depth k of multi-token prediction attends like layer k, whatever the last layer does."""
    run = tiny_run(
        {"num_layers": 4, "window": [3, 0], "window_skip_freq": skip,
         "mtp": MTPConfig(num_layers=2)}
    )  # fmt: skip
    model = build_model(run, vocab_size=VOCAB)
    found = {(".mtp." in f".{name}", module.window)
             for chunk in model.chunks for name, module in chunk.named_modules()
             if isinstance(module, CoreAttention)}  # fmt: skip
    kinds = registry.layer_kinds(run)
    assert found == {(k.kind.startswith("multi-token"), k.window) for k in kinds}


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is installed")
def test_transformer_engine_layers_without_it_say_what_to_install():
    run = tiny_run({"layer_spec": "te"})
    with pytest.raises(ValueError, match=r"cannot be imported here\. Install the te extra"):
        build_model(run, vocab_size=VOCAB)


def test_a_backend_that_cannot_serve_stops_the_build():
    run = tiny_run({"mla": MLA}, attention={"backend": "mcore_local"})
    with pytest.raises(BackendError, match="multi-latent attention"):
        build_model(run, vocab_size=VOCAB)

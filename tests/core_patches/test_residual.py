"""Additions to the residual stream that the next norm makes: errors, order, who makes them."""

import pytest
import torch
from error_bound import check
from megatron_cpu import QUERY_MLA, fused, loss_and_grads
from stream_cases import added, double, handed_on

from megatron_patch.core_patches import residual
from megatron_patch.schema.model import MoEConfig, MTPConfig
from megatron_patch.schema.training import RecomputeConfig

pytestmark = pytest.mark.usefixtures("rank")
NAMES = pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
STREAMS = pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])


def norm_and_plain(name):
    """The norm in the middle of a layer, and core's way of the same; equal random weights."""
    norm = fused({"normalization": name}).decoder.layers[0].pre_mlp_layernorm
    plain = fused({"normalization": name}, on=False).decoder.layers[0].pre_mlp_layernorm
    assert type(norm) is residual.stream_norm_class(name) is not type(plain)
    with torch.no_grad():
        for one, other in zip(norm.parameters(), plain.parameters(), strict=True):
            one.copy_(other.normal_())
    return norm, plain


@NAMES
@STREAMS
def test_a_norm_that_hands_the_stream_on_is_as_exact(compiles, name, stream):
    """Both outputs, and gradients of what came through both, against norm and stream apart."""
    norm, plain = norm_and_plain(name)
    x = (torch.randn(9, 2, 32) * 3 + 1).to(stream)
    given = x, torch.randn(9, 2, 32).bfloat16(), torch.randn(9, 2, 32).to(stream)
    found, eager = handed_on(norm, *given), handed_on(plain, *given)
    check(found, eager, handed_on(plain.double(), *double(*given)), floor=2.0**-9)
    assert [f.dtype for f in found] == [e.dtype for e in eager]
    assert torch.equal(found[1], x) and found[0].shape == x.shape


@NAMES
@STREAMS
@pytest.mark.parametrize("biased", [False, True])
def test_addition_and_norm_are_as_exact(compiles, name, stream, biased):
    """Stream and norm after an addition, and all gradients, against core's addition and a norm."""
    norm, plain = norm_and_plain(name)
    shape = (9, 2, 32)
    x, branch = (torch.randn(shape) * 3 + 1).to(stream), torch.randn(shape).bfloat16()
    shift = torch.randn(32).bfloat16() if biased else None
    dy, dstream = torch.randn(shape).bfloat16(), torch.randn(shape).to(stream)

    given = x, branch, shift, dy, dstream
    found, eager = added(norm, *given), added(plain, *given)
    check(found, eager, added(plain.double(), *double(*given)), floor=2.0**-9)
    assert [f.dtype for f in found] == [e.dtype for e in eager]
    assert [f.shape for f in found] == [e.shape for e in eager]
    if stream == torch.float32:
        assert torch.equal(found[1], eager[1])


def test_a_stream_that_nobody_reads(compiles):
    """The other gradient comes alone; without gradients there is no graph."""
    norm = fused().decoder.layers[0].input_layernorm
    x = torch.randn(5, 1, 32).bfloat16().requires_grad_()
    branch = torch.randn(5, 1, 32).bfloat16().requires_grad_()
    for more in ((), (branch, None)):
        inputs = (x, *more[:1])
        out, stream = norm(x, *more)
        of_out = torch.autograd.grad(out.float().square().sum(), inputs, retain_graph=True)
        of_stream = torch.autograd.grad(stream.sum(), inputs)
        assert all(g.abs().sum() > 0 for g in of_out)
        assert all(torch.equal(g, torch.ones_like(x)) for g in of_stream)
        with torch.no_grad():
            assert all(not y.requires_grad for y in norm(x.detach(), *more))


MODELS = {
    "llama": {},
    "squared relu": {"activation": "squared_relu"},
    "gpt2": {"normalization": "LayerNorm", "activation": "gelu", "fp32_residual_connection": True},
    "biases": {"normalization": "LayerNorm", "activation": "gelu", "add_bias_linear": True},
    "mla, mtp": {"mla": QUERY_MLA, "qk_layernorm": True, "mtp": MTPConfig(num_layers=2)},
    "moe, gqa": {"moe": MoEConfig(num_experts=4), "num_query_groups": 2, "qk_layernorm": True},
}


@pytest.fixture
def passes(monkeypatch):
    """What every pass over the stream was given: True where something is added to it."""
    seen = []
    apply = residual._StreamNorm.apply

    def count(kind, x, branch, *rest):
        seen.append(branch is not None)
        return apply(kind, x, branch, *rest)

    monkeypatch.setattr(residual._StreamNorm, "apply", count)
    return seen


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_addition_is_made_by_the_next_norm(passes, model):
    """Two layers: one norm behind the embedding, four additions with the norm behind each.

    With compiled loss, norms and activation the model trains as with core's own.
    """
    chunk = fused(model, precision="fp32")
    for layer in chunk.decoder.layers:
        assert isinstance(layer.self_attn_bda, residual._Adder)
        layer.self_attn_bda._plain = layer.mlp_bda._plain = None
    loss, grads = loss_and_grads(chunk)
    assert passes[:5] == [False, True, True, True, True]
    assert not any(passes[5:])  # the layers of multi-token prediction, and what follows them
    plain, expected = loss_and_grads(fused(model, on=False, precision="fp32"))
    assert loss == pytest.approx(plain, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(grads[name], value, rtol=1e-4, atol=1e-6)
    for module in chunk.modules():
        assert getattr(module, "_kept", None) is None, "nothing outlives the pass"


def test_evaluation_after_training(passes):
    chunk = fused(MODELS["gpt2"]).eval()
    with torch.no_grad():
        tokens = torch.arange(16)[None]
        losses = chunk(tokens, tokens, None, labels=tokens)
    assert losses.isfinite().all() and passes == [False, True, True, True, True]


def test_what_drops_out_is_added_by_core(passes):
    chunk = fused({"hidden_dropout": 0.1})
    loss_and_grads(chunk)
    assert passes == [False] * 5
    chunk.eval()
    with torch.no_grad():
        tokens = torch.arange(16)[None]
        chunk(tokens, tokens, None, labels=tokens)
    assert passes[5:] == [False, True, True, True, True]


def test_whole_layers_that_are_recomputed_are_left_as_they_are(passes):
    recompute = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
    chunk = fused(recompute=recompute)
    assert not any(isinstance(layer.mlp_bda, residual._Adder) for layer in chunk.decoder.layers)
    loss_and_grads(chunk)
    assert not any(passes)


def test_the_end_of_a_pipeline_stage(passes):
    """Without a norm behind it the last addition is core's; a stage may have no layer at all."""
    chunk = fused(precision="fp32")
    decoder = chunk.decoder
    last = decoder.layers[-1].mlp_bda._plain
    for layer in decoder.layers:
        layer.self_attn_bda, layer.mlp_bda = layer.self_attn_bda._plain, layer.mlp_bda._plain
    final, decoder.final_layernorm = decoder.final_layernorm, None
    assert residual.join(decoder) == 3 and decoder.layers[-1].mlp_bda is last
    decoder(torch.randn(16, 1, 32), None)
    assert passes == [False, True, True, True]
    decoder.final_layernorm, decoder.layers = final, torch.nn.ModuleList()
    assert residual.join(decoder) == 0


def test_the_weights_are_read_after_the_hooks_of_their_module(passes):
    """Core waits in them for weights that other ranks still send (``overlap_param_gather``)."""
    chunk = fused(precision="fp32")
    norm = chunk.decoder.layers[1].input_layernorm
    expected, _ = loss_and_grads(chunk)
    right = norm.weight.detach().clone()
    norm.weight.data.fill_(float("nan"))

    def arrive(module, arguments):
        module.weight.data.copy_(right)

    norm.register_forward_pre_hook(arrive)
    assert loss_and_grads(chunk)[0] == expected
    assert passes.count(True) == 8


def test_a_kept_norm_serves_the_stream_that_it_was_made_of_alone():
    norm, plain = norm_and_plain("LayerNorm")
    x, branch = torch.randn(3, 1, 32), torch.randn(3, 1, 32).bfloat16()
    norm.add(x, branch, None)
    other = torch.randn(3, 1, 32)
    assert torch.equal(norm(other)[0], plain(other))
    assert norm._kept is None

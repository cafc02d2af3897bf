"""The compiled loss and norms: errors, odd input. Models that train with them: test_residual.py."""

import pytest
import torch
import torch.distributed as dist
from error_bound import check
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_cpu import VOCAB, fused, loss_and_grads, tiny_run
from stream_cases import alone

from megatron_patch.core_patches import norms
from megatron_patch.core_patches.cross_entropy import cross_entropy
from megatron_patch.model.build import RECOMPILE_LIMIT, build_model

pytestmark = pytest.mark.usefixtures("rank")
SHAPE = (7, 3, 129)
INF = float("inf")


def ours(logits, labels):
    return cross_entropy(logits, labels, dist.group.WORLD)


def core(logits, labels):
    return vocab_parallel_cross_entropy(logits, labels, 0.0, dist.group.WORLD)


def case(*, scale=3.0, dtype=torch.float32, shape=SHAPE):
    make = torch.Generator().manual_seed(5)
    logits = (scale * torch.randn(shape, generator=make)).to(dtype)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=make)
    return logits, labels, torch.rand(shape[:-1], generator=make)


def loss_and_gradient(loss, logits, labels, weight):
    logits = logits.clone().requires_grad_()
    losses = loss(logits, labels)
    (losses * weight).sum().backward()
    return losses.detach(), logits.grad


def exact(logits, labels, weight):
    """In float64, from the same logits."""

    def loss(x, y):
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none")

    found, grad = loss_and_gradient(loss, logits.double(), labels, weight.double().flatten())
    return found.view(labels.shape), grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0, 3.0, 300.0])
def test_error_against_float64(dtype, scale):
    inputs = case(scale=scale, dtype=dtype)
    found = loss_and_gradient(ours, *inputs)
    assert found[0].dtype == torch.float32 and found[1].dtype == dtype
    check(found, loss_and_gradient(core, *inputs), exact(*inputs), floor=2.0**-23)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_functions_are_as_exact(compiles, dtype):
    inputs = case(dtype=dtype, shape=(5, 2, 100))
    found = loss_and_gradient(ours, *inputs)
    torch.compiler.set_stance("force_eager")
    check(found, loss_and_gradient(core, *inputs), exact(*inputs), floor=2.0**-22)


def test_masked_tokens_and_labels_outside_the_vocabulary_move_nothing():
    logits, labels, weight = case()
    labels[0], labels[1] = -100, SHAPE[-1]
    weight[:2] = 0
    losses, grad = loss_and_gradient(ours, logits, labels, weight)
    assert losses.isfinite().all() and not grad[:2].any() and grad[2:].any()


@pytest.mark.parametrize("value", [float("nan"), INF])
def test_a_bad_logit_is_seen_in_the_loss_of_its_token_alone(value):
    logits, labels, _ = case()
    logits[2, 1, 4] = value
    losses = ours(logits, labels)
    assert not losses[2, 1].isfinite() and losses.isfinite().sum() == losses.numel() - 1


def test_tokens_that_are_forbidden():
    logits, labels, weight = case()
    logits[..., 40:] = -INF  # as where a vocabulary is padded
    labels %= 40
    found = loss_and_gradient(ours, logits, labels, weight)
    check(found, loss_and_gradient(core, logits, labels, weight), exact(logits, labels, weight),
          floor=2.0**-23)  # fmt: skip
    assert not found[1][..., 40:].any()


def test_one_token():
    logits, labels, weight = case(shape=(1, 1, 2))
    assert ours(logits, labels).shape == weight.shape == (1, 1)


def test_without_compile_fusions_the_loss_is_cores(monkeypatch):
    from megatron_patch.core_patches import gpt

    monkeypatch.setattr(gpt, "cross_entropy", None)
    loss_and_grads(fused(on=False))
    with pytest.raises(TypeError):
        loss_and_grads(fused())


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_a_compiled_norm_is_as_exact(compiles, name, stream):
    """Output and gradients of input and weights, BF16 weights, against float64."""
    model = {"normalization": name, "qk_layernorm": True, "kv_channels": 32}
    norm, plain = (
        fused(model, on=on).decoder.layers[0].self_attention.q_layernorm for on in (True, False)
    )
    assert type(norm) is type(plain) is norms.norm_class(name) and norm.function != plain.function
    with torch.no_grad():
        for one, other in zip(norm.parameters(), plain.parameters(), strict=True):
            one.copy_(other.normal_())
    x = (torch.randn(9, 2, 32) * 3 + 1).to(stream)
    dy = torch.randn(9, 2, 32)
    found, eager = alone(norm, x, dy), alone(plain, x, dy)
    dy = dy.bfloat16()
    check(found, eager, alone(plain.double(), x.double(), dy.double()), floor=2.0**-9)
    assert [f.dtype for f in found] == [e.dtype for e in eager]


def test_no_norm_is_left_to_run_eagerly(compiles, monkeypatch):
    """Latent attention, more depths and full recompute make more shapes than torch's limit of 8."""
    compiled = []

    def count(module, example):
        compiled.append(module)
        return module.forward

    counting = torch.compile(norms._rms_norm, backend=count, dynamic=False)
    monkeypatch.setattr(norms, "_compiled_rms_norm", counting)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        config = build_model(tiny_run(training={"compile_fusions": True}), vocab_size=VOCAB).config
        for width in range(1, 13):
            norms.RMSNorm(config, width)(torch.ones(3, width))
        assert len(compiled) == 12 < torch._dynamo.config.recompile_limit == RECOMPILE_LIMIT

"""Compiled loss, norms and activations as a GPU runs them: errors to float64, memory."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from error_bound import check
from stream_cases import added, alone, double, handed_on

from megatron_patch.core_patches import activation, norms, residual
from megatron_patch.core_patches.cross_entropy import cross_entropy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(4096, 32768), (37, 50257), (1, 129)])
def test_cross_entropy(group, dtype, rows, vocab):
    torch.manual_seed(1)
    logits = (4 * torch.randn(rows, 1, vocab, device="cuda")).to(dtype)
    labels = torch.randint(0, vocab, (rows, 1), device="cuda")
    weight = torch.rand(rows, 1, device="cuda")

    def run(loss, logits):
        logits = logits.clone().requires_grad_()
        losses = loss(logits)
        (losses * weight).sum().backward()
        return losses.detach(), logits.grad

    def pytorch(x):
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view(rows, 1)

    found = run(lambda x: cross_entropy(x, labels, group), logits)
    peer, exact = run(lambda x: pytorch(x.float()), logits), run(pytorch, logits.double())
    # Triton's exp and division are within 2 units in the last place of float32, libm's within 1.
    check(found, peer, exact, floor=max(torch.finfo(dtype).eps / 2, 2**-23))


def test_cross_entropy_holds_the_logits_and_their_gradient(group):
    logits = torch.randn(2048, 1, 32768, device="cuda").bfloat16().requires_grad_()
    labels = torch.randint(0, 32768, (2048, 1), device="cuda")
    for _ in range(2):  # the first call compiles
        logits.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cross_entropy(logits, labels, group).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.1 * logits.numel() * 2


def norms_of(name, width, *, along_the_stream):
    """A compiled norm and an eager one with the same random weights."""
    facts = {"sequence_parallel": False, "use_cpu_initialization": False}
    compiled, eager = (
        kind(
            SimpleNamespace(cross_entropy_loss_fusion=on, params_dtype=torch.bfloat16, **facts),
            width,
        )
        for on, kind in (
            (True, (residual.stream_norm_class if along_the_stream else norms.norm_class)(name)),
            (False, norms.norm_class(name)),
        )
    )
    with torch.no_grad():
        for one, other in zip(compiled.parameters(), eager.parameters(), strict=True):
            one.copy_(other.normal_())
    return compiled, eager


NAMES = pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
STREAMS = pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
SIZES = pytest.mark.parametrize(("rows", "width"), [(8192, 768), (33, 4096), (1, 100)])


def judge(run, compiled, eager, *given):
    found, peer = run(compiled, *given), run(eager, *given)
    assert [x.dtype for x in found] == [x.dtype for x in peer]
    exact = run(eager.double(), *double(*given))
    check(found, peer, exact, floor=torch.finfo(torch.bfloat16).eps / 2)


def inputs(rows, width, stream):
    """A stream, and gradients of a norm's output and of the stream."""
    x = (3 * torch.randn(rows, 1, width, device="cuda") + 1).to(stream)
    return x, torch.randn_like(x, dtype=torch.bfloat16), torch.randn_like(x)


@NAMES
@STREAMS
@SIZES
def test_norms(name, stream, rows, width):
    torch.manual_seed(2)
    x, dy, _ = inputs(rows, width, stream)
    judge(alone, *norms_of(name, width, along_the_stream=False), x, dy)


@NAMES
@STREAMS
@SIZES
def test_norms_that_hand_the_stream_on(name, stream, rows, width):
    torch.manual_seed(2)
    given = inputs(rows, width, stream)
    judge(handed_on, *norms_of(name, width, along_the_stream=True), *given)


@NAMES
@STREAMS
@pytest.mark.parametrize("biased", [False, True])
@SIZES
def test_additions(name, stream, biased, rows, width):
    """What a norm adds to the stream and normalizes, against core's addition and a norm."""
    torch.manual_seed(3)
    x, dy, dstream = inputs(rows, width, stream)
    shift = torch.randn(width, device="cuda").bfloat16() if biased else None
    compiled, eager = norms_of(name, width, along_the_stream=True)
    judge(added, compiled, eager, x, torch.randn_like(dy), shift, dy, dstream)


@pytest.mark.parametrize("size", [1, 3000, 1 << 22])
def test_squared_relu(size):
    torch.manual_seed(4)
    ours, plain = activation.fused_squared_relu, activation.squared_relu
    x, dout = (2 * torch.randn(2, size, device="cuda")).bfloat16()
    found, peer = alone(ours, x, dout), alone(plain, x, dout)
    assert [f.dtype for f in found] == [p.dtype for p in peer]
    check(found, peer, alone(plain, x.double(), dout.double()), floor=2.0**-23)

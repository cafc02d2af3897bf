"""Every backend that needs a GPU, through `CoreAttention` and a whole model.

The error rule: against float32 attention, at most twice the error of the same inputs through
PyTorch's unfused BF16 arithmetic (plus a rounding of the output).
"""

from __future__ import annotations

import os

import pytest
import torch
from megatron_cpu import core_attention, tiny_run

from megatron_patch.attention import registry
from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.backends.row import LayerRequirements
from megatron_patch.attention.capabilities import unsupported

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]
S, B, HEADS, GROUPS = 192, 2, 8, 2
# Transformer Engine brings its own tests; it is part of the model test where it is installed.
FUSED = ["stable_flash", "sdpa_cudnn", "sdpa_flash"]


def here(backend: str, **changes) -> None:
    """Skip a backend that this machine lacks altogether (no Transformer Engine, an old GPU)."""
    plain = {"dtype": "bf16", "device": "cuda", "head_dim": 64, "v_head_dim": 64}
    wanted = LayerRequirements(kind="x", heads=8, kv_heads=8, **(plain | changes))
    missing = list(unsupported(backend, wanted, machine=registry.probe()))
    if missing:
        pytest.skip(f"{backend}: {missing}")


def core(backend: str, head_dim: int, **changes):
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "use_cpu_initialization": False}
    changes = bf16 | {"num_query_groups": GROUPS} | changes
    return core_attention(HEADS, head_dim, backend=backend, **changes)


def inputs(head_dim: int, dtype=torch.bfloat16):
    """q and k contiguous, v a strided view, as Megatron-Core passes them."""
    g = torch.Generator("cuda").manual_seed(0)
    options = {"generator": g, "device": "cuda"}
    q = torch.randn(S, B, HEADS, head_dim, **options).bfloat16().to(dtype).requires_grad_()
    k = torch.randn(S, B, GROUPS, head_dim, **options).bfloat16().to(dtype).requires_grad_()
    fused = torch.randn(S, B, GROUPS, 3 * head_dim, **options)
    return q, k, fused.bfloat16().to(dtype).requires_grad_()


def results(function, head_dim: int, dtype=torch.bfloat16):
    q, k, fused = inputs(head_dim, dtype)
    out = function(q, k, fused[..., -head_dim:])
    g = torch.Generator("cuda").manual_seed(9)
    out.backward(torch.randn(out.shape, generator=g, device="cuda").bfloat16().to(out.dtype))
    return [x.float() for x in (out, q.grad, k.grad, fused.grad)]


def unfused(q, k, v):
    """Plain arithmetic in the type of its inputs."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(S, S, dtype=torch.bool, device="cuda").triu(1)
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", p, v).reshape(S, B, -1)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("backend", [*FUSED, "fa4", "reference"])
def test_forward_and_gradients(backend, head_dim):
    here(backend, head_dim=head_dim, v_head_dim=head_dim)
    exact = results(unfused, head_dim, torch.float32)
    plain = results(unfused, head_dim)
    module = core(backend, head_dim)
    ours = results(lambda q, k, v: module(q, k, v, None), head_dim)
    for name, o, p, e in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        floor = (e + 0.3 - 0.3 - e).abs().max() + e.abs().max() * 2**-9
        assert (o - e).abs().max() <= 2 * (p - e).abs().max() + floor, name


@pytest.mark.parametrize("backend", ["stable_flash", "sdpa_flash"])
def test_repeats_bit_for_bit_when_deterministic(backend, monkeypatch):
    here(backend)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    module = core(backend, 64, deterministic_mode=True)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [results(lambda q, k, v: module(q, k, v, None), 64) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_flash_without_deterministic_algorithms_is_refused():
    module = core("sdpa_flash", 64, deterministic_mode=True)
    with pytest.raises(ValueError, match="use_deterministic_algorithms"):
        results(lambda q, k, v: module(q, k, v, None), 64)


@pytest.mark.parametrize("backend", [*FUSED, "reference"])
def test_recompute_replays_dropout(backend):
    from megatron.core.tensor_parallel import checkpoint, model_parallel_cuda_manual_seed

    here(backend)
    module = core(backend, 64, attention_dropout=0.3)
    seen = []
    for recompute in (False, True):
        model_parallel_cuda_manual_seed(4, force_reset_rng=True)
        q, k, fused = inputs(64)
        call = lambda a, b, c: module(a, b, c[..., -64:], None)  # noqa: E731
        out = checkpoint(call, False, q, k, fused) if recompute else call(q, k, fused)
        out.float().sum().backward()
        seen.append([out, fused.grad])
    assert torch.equal(seen[0][0], seen[1][0])
    torch.testing.assert_close(seen[0][1], seen[1][1], rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_model_trains_alike_with_every_backend(backend):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_patch.model.build import build_model

    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    here(backend)
    shape = {"hidden_size": 256, "num_query_groups": 2, "seq_length": 128}
    losses = []
    for name in ("reference", backend):
        run = tiny_run(
            shape, attention={"backend": name}, training={"device": "cuda", "precision": "bf16"}
        )
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        built = build_model(run, vocab_size=1000)
        assert built.selections[0].backend == name
        parameters = list(built.chunks[0].parameters())
        for p in parameters:  # the forward takes it: fused gradients of weights are added to it
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        tokens = torch.randint(0, 1000, (2, 128), generator=torch.Generator().manual_seed(3)).cuda()
        positions = torch.arange(128, device="cuda").repeat(2, 1)
        loss = built.chunks[0](tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        assert all((p.main_grad if p.grad is None else p.grad).isfinite().all() for p in parameters)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)

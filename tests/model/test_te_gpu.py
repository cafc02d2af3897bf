"""Models and optimizers by Transformer Engine and Apex beside our own (`make test-te`)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from megatron_cpu import SEQ, VOCAB, single_gpu, tiny_run
from regimes import make_regime

from megatron_patch.core_patches.rope import own_rope
from megatron_patch.core_patches.weight_gradient import weight_gradient
from megatron_patch.schema.model import MoEConfig
from megatron_patch.stability import probe

pytestmark = [pytest.mark.gpu, pytest.mark.te]
SHAPE = {"hidden_size": 256, "num_attention_heads": 2, "kv_channels": 128, "ffn_hidden_size": 512}
TE = {"layer_spec": "te", "rope_fusion": "te"}
GPU = {"device": "cuda", "precision": "bf16"}
PLAIN = {"gradient_accumulation_fusion": False, "compile_fusions": False}


def needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        if os.environ.get("REQUIRE_TE") and module == "transformer_engine":
            pytest.fail(f"REQUIRE_TE is set, but there is no {module}")
        pytest.skip(f"needs {module}")


@pytest.fixture(scope="module", autouse=True)
def one_gpu():
    needs("transformer_engine")
    with single_gpu():
        yield
        own_rope.undo()
        weight_gradient.undo()


def built(model=None, attention=None, **training):
    """A BF16 chunk of two layers of width 256 on the GPU, weights of one seed."""
    from megatron.core import tensor_parallel

    from megatron_patch.model.build import build_model

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    run = tiny_run(
        SHAPE | (model or {}),
        attention={"backend": "stable_flash"} | (attention or {}),
        training=GPU | PLAIN | training,
    )
    (chunk,) = build_model(run, vocab_size=VOCAB).chunks
    return chunk.bfloat16()


def result(chunk, weights=None):
    """(loss, gradients) with the weights of another chunk of the same names, if given."""
    if weights is not None:
        chunk.load_state_dict(weights, strict=False)
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(3)).cuda()
    positions = torch.arange(SEQ, device="cuda").repeat(2, 1)
    loss = chunk(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in chunk.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["te", "stable_flash"])
def test_rotary_kernels_and_attentions_agree(attention):
    """Te layers: our rotary kernel, Transformer Engine's and core's steps."""
    first = built(TE, {"backend": attention})
    weights = {k: v for k, v in first.state_dict().items() if isinstance(v, torch.Tensor)}
    loss, grads = result(first)
    for kernel in ("own", "none"):
        other, gradients = result(
            built(TE | {"rope_fusion": kernel}, {"backend": attention}), weights
        )
        assert abs(other - loss) < 2.0**-8 * loss, kernel
        for name, grad in grads.items():
            error = (gradients[name].float() - grad.float()).norm()
            assert error <= 0.05 * grad.float().norm() + 1e-6, (kernel, name)


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_fp8_linears_are_near_bf16(recipe):
    first = built(TE)
    weights = {k: v for k, v in first.state_dict().items() if isinstance(v, torch.Tensor)}
    loss, grads = result(first)
    other, gradients = result(built(TE, fp8=recipe), weights)
    assert abs(other - loss) < 0.02 * loss and other != loss
    for name, grad in grads.items():
        if "weight" in name and grad.dim() == 2:
            cosine = torch.cosine_similarity(
                gradients[name].flatten().float(), grad.flatten().float(), 0
            )
            assert cosine > 0.9, name


def test_fp8_attention_runs_and_is_coarser_than_bf16():
    q, k, v, dout = (x[None] for x in make_regime("gauss", heads=2, n=512, d=128, device="cuda"))
    tensors = probe.Tensors(q, k, v, dout, 128**-0.5, True, None)
    true = probe.reference(tensors)
    errors = {}
    for run in (probe.transformer_engine, probe.transformer_engine_fp8):
        found = run(tensors)
        for name in ("out", "dq"):
            want = getattr(true, name).float()
            error = (getattr(found, name).float() - want).norm() / want.norm()
            errors.setdefault(name, []).append(error.item())
    assert all(bf16 < 0.01 < fp8 for bf16, fp8 in errors.values()), errors
    assert errors["out"][1] < 0.2, errors


@pytest.mark.parametrize("name", ["te", "apex"])
def test_their_adamw_is_pytorchs(name):
    if name == "apex":
        needs("amp_C")
        from apex.optimizers import FusedAdam
    else:
        from transformer_engine.pytorch.optimizers import FusedAdam
    found = []
    for kind in (torch.optim.AdamW, FusedAdam):
        torch.manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
        optimizer = kind([weight], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
        for _ in range(10):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(*found, rtol=0, atol=4e-6)


def test_experts_of_both_kinds_read_each_others_checkpoints(tmp_path):
    """Ours of local layers and Transformer Engine's grouped linears: losses after the exchange."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject
    from torch.distributed.checkpoint import FileSystemReader

    from megatron_patch.checkpoint import content

    def state(chunk):
        found = chunk.sharded_state_dict()
        return {k: v for k, v in found.items() if not isinstance(v, ShardedObject)}

    moe = {"moe": MoEConfig(num_experts=4, ffn_hidden_size=256)}
    for number, (kind, other) in enumerate(((moe, TE | moe), (TE | moe, moe))):
        saved, loaded = built(kind, grouped_experts=True), built(other, grouped_experts=True)
        with torch.no_grad():
            for p in saved.parameters():
                p.add_(0.05 * torch.randn_like(p))
        folder = tmp_path / str(number)
        folder.mkdir()
        dist_checkpointing.save(state(saved), str(folder))
        request = state(loaded)
        content.ask_for_what_is_saved(request, FileSystemReader(folder).read_metadata())
        found = dist_checkpointing.load(request, str(folder))
        missing, unexpected = loaded.load_state_dict(found, strict=False)
        assert not unexpected and all("_extra_state" in name for name in missing)
        before, after = result(saved)[0], result(loaded)[0]
        assert abs(before - after) < 2e-2, (kind, before, after)
        assert abs(before - result(built(other, grouped_experts=True))[0]) > 5e-2

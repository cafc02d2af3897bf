"""The gradient norm and clipping without Transformer Engine and Apex."""

from __future__ import annotations

import math

import pytest
import torch
from megatron_cpu import VOCAB, single_rank, tiny_run
from torch.profiler import ProfilerActivity, profile

from megatron_patch.core_patches import optimizer as patches
from megatron_patch.core_patches.optimizer import norm_and_clipping
from megatron_patch.model.build import build_model
from megatron_patch.schema.model import MoEConfig
from megatron_patch.training.optimizer import build_optimizer, wrap_chunks


@pytest.fixture
def core():
    from megatron.core.optimizer import clip_grads

    norm_and_clipping.undo()
    with single_rank():
        yield clip_grads
    norm_and_clipping.undo()


def parameters(values=1.0):
    make = torch.Generator().manual_seed(3)
    found = []
    for shape in ((300, 7), (1,), (0, 4), (5, 5, 5)):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.grad = values * torch.randn(shape, generator=make)
        found.append(parameter)
    return found


def norm(core, found):
    return float(core.get_grad_norm_fp32([p.grad for p in found], grad_stats_parallel_group=None))


def test_norm_and_clipping_are_cores_own(core):
    """Against float64; Core's stand-ins beside them."""
    found, again = parameters(), parameters()
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in found))
    assert norm(core, again) == pytest.approx(exact, rel=1e-6)
    core.clip_grad_by_total_norm_fp32(again, 1.0, exact)
    assert norm_and_clipping.install()
    assert not norm_and_clipping.install()  # nothing is left to replace
    assert norm(core, found) == pytest.approx(exact, rel=1e-6)
    core.clip_grad_by_total_norm_fp32(found, 1.0, exact)
    assert norm(core, found) == pytest.approx(1.0, rel=1e-5)
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_makes_the_norm_bad(core, bad):
    norm_and_clipping.install()
    found = parameters()
    found[3].grad[0, 0, 0] = bad
    assert not math.isfinite(norm(core, found))


def reads(core) -> int:
    """Values that a norm brings to the host; each waits for the device."""
    found = parameters()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        norm(core, found)
    return sum(event.name == "aten::item" for event in seen.events())


def test_one_value_reaches_the_host(core):
    before = reads(core)
    assert before > len(parameters())
    norm_and_clipping.install()
    assert reads(core) == 1


def test_kernels_of_apex_and_transformer_engine_stay(core, monkeypatch):
    monkeypatch.setattr(core, "l2_norm_impl", print)
    monkeypatch.setattr(core, "multi_tensor_scale_impl", print)
    assert not norm_and_clipping.install()
    assert core.l2_norm_impl is print is core.multi_tensor_scale_impl


def test_beside_pytorchs_adamw_they_do_not(core, monkeypatch):
    """Else an install alone takes the update's gate away, which clips on the device."""
    monkeypatch.setattr(core, "l2_norm_impl", print)
    monkeypatch.setattr(core, "multi_tensor_scale_impl", print)
    assert norm_and_clipping.install(any_kernel=True) and patches.clips()
    assert norm(core, parameters()) > 0
    norm_and_clipping.undo()
    assert core.l2_norm_impl is print and not patches.clips()


def buffers(chunks):
    return [b.param_data for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]


@pytest.mark.parametrize("shape", [{}, {"moe": MoEConfig(num_experts=2)}])
def test_weights_are_copied_as_core_copies_them(shape):
    """Every bit of the model's BF16 buffers, beside core's own loop on the same main weights."""
    run = tiny_run(shape, training={"precision": "bf16"})
    with single_rank():
        chunks = wrap_chunks(run, build_model(run, vocab_size=VOCAB).chunks)
        optimizer, _ = build_optimizer(run, chunks)
        for part in optimizer.chained_optimizers:
            assert isinstance(part._copy_main_params_to_model_params, patches._CopyWeights)
            for group in part.shard_fp32_from_float16_groups:
                for shard in group:
                    shard.data.normal_()
        found = []
        for copy in (
            lambda part: part._copy_main_params_to_model_params(),
            lambda part: type(part)._copy_main_params_to_model_params(part),
        ):
            for buffer in buffers(chunks):
                buffer.fill_(math.nan)
            for part in optimizer.chained_optimizers:
                copy(part)
            found.append([buffer.clone() for buffer in buffers(chunks)])
    for ours, cores in zip(*found, strict=True):
        assert torch.equal(ours.view(torch.int16), cores.view(torch.int16))
        assert ours.isfinite().any()


def test_weights_find_their_place_again_when_core_exchanged_a_tensor():
    """A shard, then a bucket's buffer: what is copied, and where to, are those of now."""
    run = tiny_run(training={"precision": "bf16"})
    with single_rank():
        chunks = wrap_chunks(run, build_model(run, vocab_size=VOCAB).chunks)
        optimizer, _ = build_optimizer(run, chunks)
        (part,) = optimizer.chained_optimizers
        copy = part._copy_main_params_to_model_params
        copy()
        looked_up = copy._places
        copy()
        assert copy._places is looked_up
        shards = part.shard_fp32_from_float16_groups[0]
        shards[0] = torch.full_like(shards[0], 3.0)
        copy()
        model = part.model_float16_groups[0][0]
        assert copy._places is not looked_up and (model == 3.0).all()
        (bucket,) = chunks[0].buffers[0].buckets
        old, bucket.param_data = bucket.param_data, torch.zeros_like(bucket.param_data)
        before = old.clone()
        shards[0].fill_(4.0)
        copy()
        assert torch.equal(old, before) and (bucket.param_data == 4.0).any()


def test_clipping_that_changes_nothing_gathers_nothing(core, monkeypatch):
    """And where there is something to clip, or no telling, core is asked."""
    from megatron.core.optimizer import optimizer as callers

    asked = []
    monkeypatch.setattr(core, "clip_grad_by_total_norm_fp32", lambda *a, **b: asked.append((a, b)))
    before = callers.clip_grad_by_total_norm_fp32
    norm_and_clipping.install()
    clip = callers.clip_grad_by_total_norm_fp32
    try:
        for total in (0.0, 0.5, 1.0 - 1e-6):
            clip([], 1.0, total, use_decoupled_grad=False)
        assert not asked
        for total in (1.0, 7.0, math.inf, math.nan, torch.tensor(0.5)):
            clip([], 1.0, total, use_decoupled_grad=False)
        assert [a[2] for a, _ in asked[:3]] == [1.0, 7.0, math.inf] and len(asked) == 5
        assert all(b == {"use_decoupled_grad": False} for _, b in asked)
    finally:
        callers.clip_grad_by_total_norm_fp32 = before


def test_optimizers_that_are_not_sharded_keep_cores_way():
    run = tiny_run(parallel={"use_distributed_optimizer": False})
    with single_rank():
        chunks = wrap_chunks(run, build_model(run, vocab_size=VOCAB).chunks)
        optimizer, _ = build_optimizer(run, chunks)
        assert patches.copy_weights_at_once(optimizer) == 0

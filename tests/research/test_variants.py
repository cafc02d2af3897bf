"""Variants change rounding and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import variants
from run_config import run_config
from variants import VARIANTS

from megatron_patch.attention.backends import BACKENDS, reference, stable
from megatron_patch.attention.backends.call import AttentionCall
from stable_attention.problem import Options


def make_call(dtype: torch.dtype = torch.float32, **options: object) -> AttentionCall:
    """Causal, 2 sequences of 24 tokens, 3 heads; K and V far from zero mean."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(24, 2, 3, 16, generator=gen) for _ in range(3))
    k, v = k + 3, v - 2
    leaves = (x.to(dtype).requires_grad_() for x in (q, k, v))
    asked = Options.of(layout="sbhd", scale=0.25, causal=True, **options)
    return AttentionCall(**dict(zip("qkv", leaves, strict=True)), options=asked)


def results(run, call: AttentionCall) -> list[torch.Tensor]:
    out = run(call)[0]
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), (call.q, call.k, call.v))]


@pytest.mark.parametrize("name", ["k_centered", "v_centered", "fp32_attention"])
def test_exact_variants_are_the_same_mathematics(name):
    """In float32 output and all three gradients stay, to float32 rounding."""
    wrap = VARIANTS[name].wrap
    assert wrap is not None
    for mine, plain in zip(
        results(wrap(reference.run), make_call()), results(reference.run, make_call()), strict=True
    ):
        assert torch.allclose(mine, plain, rtol=1e-4, atol=2e-5)


def test_centering_does_what_it_says():
    """The kernel sees K (and V) without its common part."""
    seen: list[AttentionCall] = []

    def spy(call: AttentionCall):
        seen.append(call)
        return reference.run(call)

    call = make_call()
    variants.center_keys(spy)(call)
    assert seen[-1].k.mean(0).abs().max() < 1e-5 < call.k.mean(0).abs().min()
    variants.center_values(spy)(call)
    first, second = seen[-2:]
    mean = reference.run(call)[0].mean(0)
    assert torch.equal(first.v, call.v) and torch.allclose(second.v, call.v - mean)
    shared = make_call()
    shared.v = shared.v[:, :, :1]
    with pytest.raises(ValueError, match="as many of both"):
        variants.center_values(reference.run)(shared)


def test_largest_logits_of_centered_keys_are_not_handed_to_an_observer():
    """They would stand beside those of the control; without them it computes its own."""
    tops = {}
    for name in ("plain", "k_centered", "v_centered"):
        call = make_call()
        call.observed = {}
        (VARIANTS[name].wrap or (lambda run: run))(reference.run)(call)
        tops[name] = call.observed.get("max_logits")
    assert tops["k_centered"] is None
    assert torch.equal(tops["plain"], tops["v_centered"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("low_order_o", {"stabilizer": "low_order_o"}),
        ("consistent_sum", {"stabilizer": "consistent_sum"}),
        ("fp32_o", {"stabilizer": "low_order_o", "o_lo": "fp32"}),
        ("fp32_o_consistent_sum", {"stabilizer": "compensated", "o_lo": "fp32"}),
    ],
)
def test_setting_variants_reach_the_kernel(name, options):
    """Through the interpreter: the backend is called with the setting and runs with it."""
    seen: list[AttentionCall] = []

    def spy(call: AttentionCall):
        seen.append(call)
        return stable.run(call)

    wrap = VARIANTS[name].wrap
    assert wrap is not None
    held: dict[str, torch.Tensor] = {}
    call = make_call(torch.bfloat16, stabilizer="none")
    call.observed = held
    wrap(spy)(call)
    assert seen[0].options == dataclasses.replace(call.options, **options)
    assert call.options.stabilizer == "none"
    keeps = {"consistent_sum": None, "low_order_o": torch.bfloat16}.get(name, torch.float32)
    assert (held["low"].dtype if "low" in held else None) == keeps


def test_installing_changes_the_configured_backend_only(monkeypatch):
    run = run_config(attention={"backend": "reference"})
    before, other = BACKENDS["reference"], BACKENDS["stable_flash"]
    monkeypatch.setitem(BACKENDS, "reference", before)  # puts it back afterwards
    variants.install("plain", run)
    assert BACKENDS["reference"] is before
    variants.install("k_centered", run)
    after = BACKENDS["reference"].run
    assert after is not before.run and BACKENDS["stable_flash"] is other
    assert after.variant == "k_centered" and not hasattr(before.run, "variant")
    with pytest.raises(ValueError, match="it changes stable_flash"):
        variants.install("low_order_o", run)
    with pytest.raises(ValueError, match="it starts from 'none'"):
        variants.install("low_order_o", run_config(attention={"backend": "stable_flash"}))
    assert VARIANTS["k_centered"].unmet(run_config(model={"attention_dropout": 0.1}))

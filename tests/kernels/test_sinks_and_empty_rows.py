"""Sinks of any stride and of -inf; rows without keys, whatever gradient reaches their LSE."""

from __future__ import annotations

import math

import pytest
import torch

from stable_attention import chunks as kernels
from stable_attention import stable_attention
from stable_attention.reference import chunks as reference
from stable_attention.reference import reference_attention
from stable_attention.reference.emulators import COMPENSATED, emulate

LAYERS = torch.tensor([[1.0, 9.0], [-2.0, -9.0], [3.0, 9.0], [0.5, -9.0]])
VIEWS = {
    "column": lambda x: x[:, 0],
    "every other": lambda x: x.flatten()[::2],
    "expanded": lambda x: x[1, 0].expand(4),
}


def inputs(sq: int, sk: int, heads: int = 4) -> list[torch.Tensor]:
    return [torch.randn(1, s, heads, 16).bfloat16().requires_grad_() for s in (sq, sk, sk)]


@pytest.mark.parametrize("view", VIEWS)
def test_sinks_of_any_stride(view: str) -> None:
    """The kernels read sink h at address h: a column of [heads, layers] gave other heads' sinks."""
    q, k, v = inputs(33, 33)
    results = []
    for strided in (True, False):
        layers = LAYERS.clone().requires_grad_()
        sinks = VIEWS[view](layers)
        sinks = sinks if strided else sinks.contiguous()
        out, lse = stable_attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        loss = out.float().square().sum() + lse.sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v, layers))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("view", VIEWS)
def test_sinks_of_any_stride_between_chunks(view: str) -> None:
    sinks = VIEWS[view](LAYERS)
    assert sinks.stride(0) != 1
    partial, lse = torch.randn(1, 5, 4, 16), torch.randn(1, 4, 5)
    dout = torch.randn(1, 5, 4, 16).bfloat16()
    results = []
    for given in (sinks, sinks.contiguous()):
        total = lse.clone()
        out, low = kernels.finish_chunks(partial, total, dtype=torch.bfloat16, sinks=given)
        delta, dsinks = kernels.chunk_delta(dout, out, total, low=low, sinks=given)
        results.append((out, low, total, delta, dsinks))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("attention", [stable_attention, reference_attention])
@pytest.mark.parametrize("sinks", [None, -math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_into_the_lse_of_rows_without_keys(attention, sinks, bad: float) -> None:
    """Queries 0..3 see nothing. A mean of LSE squared over the others sends them 0 * inf = NaN."""
    q, k, v = inputs(12, 8)
    logits = None if sinks is None else torch.full((4,), sinks)
    out, lse = attention(q, k, v, causal=True, sinks=logits, return_lse=True)
    assert bool((lse[..., :4] == -math.inf).all()) and not out[:, :4].any()
    clean = torch.randn(lse.shape)
    clean[..., :4] = 0.0
    poisoned = clean.clone()
    poisoned[..., :4] = bad
    dout = torch.randn(out.shape).bfloat16()
    grads = [
        torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
        for dlse in (clean, poisoned)
    ]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b) and bool(torch.isfinite(a).all())
    assert not grads[1][0][:, :4].any()


@pytest.mark.parametrize("module", [kernels, reference])
def test_delta_of_chunks_without_keys(module) -> None:
    dout, out = torch.randn(1, 5, 2, 16).bfloat16(), torch.zeros(1, 5, 2, 16).bfloat16()
    lse = torch.full((1, 2, 5), -math.inf)
    sinks = torch.full((2,), -math.inf)
    dlse = torch.full_like(lse, math.nan)
    delta, dsinks = module.chunk_delta(dout, out, lse, dlse=dlse, sinks=sinks)
    assert not delta.any() and not dsinks.any()


@pytest.mark.parametrize("attention", [stable_attention, reference_attention])
def test_a_sink_of_minus_infinity_is_no_sink(attention) -> None:
    """Rows with keys and rows without: the numbers of a call without sinks, and dSink = 0."""
    q, k, v = inputs(12, 8)
    sinks = torch.full((4,), -math.inf, requires_grad=True)
    results = []
    for given in (sinks, None):
        out, lse = attention(q, k, v, causal=True, sinks=given, return_lse=True)
        loss = out.float().square().sum() + lse[..., 4:].sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v), retain_graph=True)))
        if given is not None:
            assert not torch.autograd.grad(loss, sinks)[0].any()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("module", [kernels, reference])
def test_finishing_chunks_without_keys_or_sink(module) -> None:
    lse = torch.full((1, 2, 5), -math.inf)
    sinks = torch.full((2,), -math.inf)
    out, _ = module.finish_chunks(torch.zeros(1, 5, 2, 16), lse, dtype=torch.bfloat16, sinks=sinks)
    assert not out.any() and bool((lse == -math.inf).all())


def test_emulated_rows_without_keys() -> None:
    q, k, v, dout = (torch.randn(1, 1, 6, 8) for _ in range(4))
    mask = torch.ones(6, 6, dtype=torch.bool).tril(-2)
    dlse = torch.full((1, 1, 6), math.nan)
    dlse[..., 2:] = 1.0
    done = emulate(q, k, v, dout, rounding=COMPENSATED, mask=mask, dlse=dlse)
    assert all(bool(torch.isfinite(x).all()) for x in (done.dq, done.dk, done.dv))

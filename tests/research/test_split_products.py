"""Attention of split products: float32's errors, not 16 bits', on BF16 inputs."""

from __future__ import annotations

import os
import re

import pytest
import split_products
import torch
from split_products import split_product_attention

from stable_attention.reference.geometry import from_bhsd, to_bhsd

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
NAMES = ("o", "dq", "dk", "dv")
MAX_FLOOR, RMS_FLOOR = 2.0**-21, 2.0**-23
"""Of the largest (RMS) sum of absolute terms behind a value: roundings of float32 sums and the last
bits of exp2, for which no order of addition is the right one. Two parts instead of three would be
2^-17 of single terms off, at random: the RMS says so."""


def inputs(
    b: int, s: int, h: int, d: int, *, size: float = 1.0, seed: int = 0
) -> list[torch.Tensor]:
    """q, k, v, dO [b, h, s, d]; ``size`` multiplies q."""
    gen = torch.Generator().manual_seed(seed)
    made = [torch.randn(b, h, s, d, generator=gen) for _ in range(4)]
    made[0] = made[0] * size
    return [x.bfloat16().to(DEVICE) for x in made]


def exact(x: list[torch.Tensor], causal: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """O, dQ, dK, dV by autograd in ``dtype``."""
    q, k, v = (t.to(dtype).requires_grad_() for t in x[:3])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.softmax(scores, -1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), x[3].to(dtype))]


def terms(x: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """Sums of the absolute terms behind O, dQ, dK, dV; dS of unreduced dP and delta."""
    q, k, v, do = (t.double() for t in x)
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    p = torch.softmax(scores, -1)
    ds = p * (do.abs() @ v.abs().mT + (do.abs() * (p @ v.abs())).sum(-1, keepdim=True)) * scale
    # A score is wrong by float32's rounding of its own size, and P by as much relative to itself.
    p, ds = (t * (1 + scores.nan_to_num(neginf=0.0).abs()) for t in (p, ds))
    return [p @ v.abs(), ds @ k.abs(), ds.mT @ q.abs(), p.mT @ do.abs()]


def unrounded(x: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """What the kernels compute, in float32."""
    how = {"scale": x[0].shape[-1] ** -0.5, "causal": causal}
    _, out, lse = split_products.run_forward(*x[:3], **how)
    grads = split_products.run_backward((*x[:3], out, lse), x[3], dtype=torch.float32, **how)
    return [out, *grads]


@pytest.mark.parametrize(
    ("s", "d", "causal", "size"),
    [(1, 16, True, 1), (37, 16, True, 1), (70, 64, False, 1), (129, 64, True, 1),
     (200, 32, True, 30), (65, 128, True, 4)],
)  # fmt: skip
def test_errors_are_float32s(s, d, causal, size):
    """At most twice PyTorch's in float32 plus the floor; 16-bit P alone would be 2^-9 off."""
    x = inputs(2, s, 3, d, size=size)
    true, torchs = exact(x, causal, torch.float64), exact(x, causal, torch.float32)
    for name, mine, theirs, right, of in zip(
        NAMES, unrounded(x, causal), torchs, true, terms(x, causal), strict=True
    ):
        assert mine.dtype == torch.float32
        error, torch_error = (x.double() - right for x in (mine, theirs))
        largest, torch_largest = (float(x.abs().max()) for x in (error, torch_error))
        assert largest <= 2 * torch_largest + MAX_FLOOR * float(of.max()), name
        rms, torch_rms, of_terms = (
            float(x.square().mean().sqrt()) for x in (error, torch_error, of)
        )
        assert rms <= 2 * torch_rms + RMS_FLOOR * of_terms, name


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_autograd_layouts_and_strides(layout):
    """As autograd sees it: BF16 in and out, views of one fused tensor, a dO that is a view."""
    x = inputs(2, 45, 3, 32)
    fused = torch.cat([from_bhsd(t, layout) for t in x[:3]], -1).requires_grad_()
    q, k, v = fused.split(32, -1)
    out = split_product_attention(q, k, v, layout=layout, causal=True)
    wide = torch.cat([from_bhsd(x[3], layout)] * 2, -1)
    (grad,) = torch.autograd.grad(out, fused, wide[..., 32:])
    assert out.dtype == grad.dtype == torch.bfloat16 and out.shape == q.shape
    found = [to_bhsd(t, layout) for t in (out, *grad.split(32, -1))]
    for name, mine, right in zip(NAMES, found, exact(x, True, torch.float64), strict=True):
        # The one rounding at the end: half an ulp of BF16, and float32's errors beneath.
        allowed = 2.0**-8 * right.abs() + 2.0**-16 * right.abs().max()
        assert bool(((mine.double() - right).abs() <= allowed).all()), name
    again = split_product_attention(q, k, v, layout=layout, causal=True)
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layout": "thd"}, "layout='thd': use bshd, sbhd or bhsd"),
        ({"scale": 0.0}, "scale=0.0: must be finite and above 0"),
        ({"k": (1, 8, 1, 16)}, "k has shape"),
        ({"v": torch.float16}, "v is torch.float16: split products are of"),
        ({"d": 48}, "head dim 48: use one of 16, 32, 64, 128"),
    ],
)
def test_what_is_not_served_is_refused(change, told):
    d = change.pop("d", 16)
    given = {name: torch.zeros(1, 8, 2, d, dtype=torch.bfloat16) for name in "qkv"}
    for name in "qkv":
        value = change.pop(name, None)
        if isinstance(value, tuple):
            given[name] = torch.zeros(*value, dtype=torch.bfloat16)
        elif value is not None:
            given[name] = given[name].to(value)
    with pytest.raises(ValueError, match=re.escape(told)):
        split_product_attention(**given, **change)

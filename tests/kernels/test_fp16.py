"""The backward with FP16 operands: gradients as exact as FP32 attention's, whatever the range."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from exactness import drawn, gradients, over_bound
from regimes import make_regime

from megatron_patch.stability.capture import CaptureFile
from stable_attention import AttentionArgumentError, fp16, stable_attention
from stable_attention.chunks import chunk_forward

CAPTURES = Path(__file__).resolve().parents[1] / "stability" / "captures"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every backward pass: whether FP16 held all its heads."""
    found: list[bool] = []
    powers = fp16._powers

    def noted(*arguments: Any) -> Any:
        result = powers(*arguments)
        found.append(int(result[2][3, 0]) == 0)
        return result

    monkeypatch.setattr(fp16, "_powers", noted)
    return found


@pytest.mark.parametrize("stabilizer", ["projected", "compensated_projected"])
@pytest.mark.parametrize("name", ["tie3", "one", "diffuse"])
def test_gradients_of_regimes_are_as_exact_as_fp32_attention(name: str, stabilizer: str) -> None:
    tensors = [x[None].to(DEVICE) for x in make_regime(name, heads=2, n=96)]
    assert max(over_bound(tensors, stabilizer=stabilizer)) <= 1.0


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("step_00006152.layer_001.tp_0.danger.pt", 8),
        ("step_00006452.layer_001.tp_0.watch.pt", 8),
        ("step_00007502.layer_001.tp_0.grad_norm.pt", 9),
    ],
)
def test_gradients_of_captured_heads_are_as_exact_as_fp32_attention(name: str, head: int) -> None:
    """Those of the tensors' own type are not: P and dS of a diverging head are what they round."""
    one = CaptureFile.load(CAPTURES / name)
    i = one.heads.index(head)
    tensors = [
        x[:256, :1, i : i + 1].permute(1, 2, 0, 3).contiguous().to(DEVICE)
        for x in (one.q, one.k, one.v, one.dout)
    ]
    assert max(over_bound(tensors, one.scale, stabilizer="projected")) <= 1.0
    if one.step < 7000:
        own = over_bound(tensors, one.scale, stabilizer="projected", backward="own")
        assert max(own) > 1.2


def _packed() -> dict[str, Any]:
    cu = torch.tensor([0, 0, 20, 21, 60], dtype=torch.int32, device=DEVICE)
    return {"layout": "thd", "cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}


CALLS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "bshd": ((2, 40, 4, 16), 4, {"causal": True}),
    "sbhd, GQA": ((40, 2, 4, 16), 2, {"layout": "sbhd", "causal": True}),
    "bhsd, one key head": ((2, 4, 40, 16), 1, {"layout": "bhsd"}),
    "packed, with empty and one-token sequences": ((64, 4, 16), 2, _packed()),
    "window": ((1, 48, 2, 16), 2, {"causal": True, "window": (7, 0)}),
    "softcap": ((1, 48, 2, 16), 2, {"softcap": 5.0, "stabilizer": "compensated"}),
    "dropout": ((1, 48, 2, 16), 1, {"dropout_p": 0.3, "dropout_seed": 3}),
    "gradient of LSE": ((1, 48, 2, 16), 2, {"causal": True, "return_lse": True}),
    "one token": ((1, 1, 2, 16), 2, {"causal": True}),
    "plain numerics": ((1, 48, 2, 16), 2, {"stabilizer": "none"}),
}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call_is_served(name: str, sinks: bool, served: list[bool]) -> None:
    shape, kv_heads, options = CALLS[name]
    layout = options.get("layout", "bshd")
    q, k, v, dout = drawn(shape)
    at = layout.index("h")
    k, v = (x.narrow(at, 0, kv_heads) for x in (k, v))  # strided views
    small = [torch.tensor([0.5, -1.0, 0.0, 2.0], device=DEVICE)[: q.shape[at]]] * sinks
    options = {"stabilizer": "projected"} | options
    found, own = (
        gradients([q, k, v, *small, dout], **options, backward=name) for name in ("own_fp16", "own")
    )
    for x, y in zip(found, own, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert (x.float() - y.float()).norm() <= 0.01 * y.float().norm()
    assert served == [True]


FACTORS = {
    "none": {},
    "large q, small k": {0: 2.0**50, 1: 2.0**-50},
    "small q, large k": {0: 2.0**-50, 1: 2.0**50},
    "large v": {2: 2.0**50},
    "small v": {2: 2.0**-50},
    "large dO": {3: 2.0**50},
    "small dO": {3: 2.0**-50},
}


@pytest.mark.parametrize("name", FACTORS)
def test_powers_of_two_change_no_digit(name: str, served: list[bool]) -> None:
    """Also of one of the heads: they have powers of their own."""
    tensors = drawn((1, 32, 2, 16))
    plain = gradients(tensors, causal=True, stabilizer="projected")
    factors = FACTORS[name]
    moved = [x.clone() for x in tensors]
    for i, factor in factors.items():
        moved[i][:, :, 1] *= factor
    found = gradients(moved, causal=True, stabilizer="projected")
    total = math.prod(factors.values())
    for i, (x, y) in enumerate(zip(found, plain, strict=True)):
        # dV has no factor of V, dQ and dK have all but their own.
        factor = factors.get(3, 1.0) if i == 2 else total / factors.get(i, 1.0)
        y = y.clone()
        y[:, :, 1] *= factor
        assert torch.equal(x, y)
    assert served == [True, True]


@pytest.mark.parametrize("zeros", [(0,), (1,), (2,), (3,), (0, 1), (0, 1, 2, 3)])
def test_heads_of_zeros(zeros: tuple[int, ...], served: list[bool]) -> None:
    tensors = drawn((1, 32, 2, 16))
    for i in zeros:
        tensors[i][:, :, 1] = 0
    found, own = (
        gradients(tensors, causal=True, stabilizer="projected", backward=x)
        for x in ("own_fp16", "own")
    )
    for x, y in zip(found, own, strict=True):
        for head in (0, 1):
            error = (x[:, :, head].float() - y[:, :, head].float()).norm()
            assert error <= 0.01 * y[:, :, head].float().norm()
    assert served == [True]


def test_the_largest_dp_and_gradients_of_lse_are_within_fp16(served: list[bool]) -> None:
    """Rows of V and dO that all point one way or the other, half of the keys each; dLSE alone."""
    q, k, v, dout = (x * 0.1 for x in drawn((1, 4, 1, 64)))
    v, dout = torch.full_like(v, 0.99), torch.full_like(v, 0.99)
    v[:, ::2] *= -1
    for options in ({}, {"return_lse": True}):
        small = dout * 2.0**-30 if options else dout
        found, own = (
            gradients([q, k, v, small], **options, stabilizer="projected", backward=x)
            for x in ("own_fp16", "own")
        )
        for x, y in zip(found[:2], own, strict=False):
            assert (x.float() - y.float()).norm() <= 0.02 * y.float().norm()
    assert served == [True, False]


def test_the_gradient_of_sinks_has_the_corrected_delta() -> None:
    """O is 5/6 in every row: rounded to 16 bits, and so is delta, by 2^-9 in the same direction."""
    q = k = torch.zeros(1, 5, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    v = dout = torch.ones_like(q)
    sinks = torch.zeros(1, device=DEVICE)
    exact = -5 * (1 / 6) * (64 * 5 / 6)
    plain, found = (
        float(gradients([q, k, v, sinks, dout], stabilizer=x)[3]) for x in ("none", "projected")
    )
    assert abs(plain - exact) > 5e-4 * -exact
    assert abs(found - exact) < 5e-5 * -exact


OUTSIDE = {
    "logits above 2^28": {0: 2.0**20, 1: 2.0**20},
    "logits below 2^-16": {0: 2.0**-20, 1: 2.0**-20},
    "far from 1": {2: 2.0**-80},
    "infinite": {2: math.inf},
    "not a number": {0: math.nan},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_fp16_cannot_hold_is_served_by_our_own_backward(
    name: str, packed: bool, served: list[bool]
) -> None:
    """With the same bits, sinks included; sequences of a batch are served or not as a whole."""
    q, k, v, dout = drawn((64, 2, 16) if packed else (2, 32, 2, 16))
    options = _packed() if packed else {"causal": True}
    for i, factor in OUTSIDE[name].items():
        (q, k, v)[i][..., 1, :] *= factor
    sinks = torch.tensor([0.5, -1.0], device=DEVICE)
    found, own = (
        gradients([q, k, v, sinks, dout], **options, stabilizer="projected", backward=x)
        for x in ("own_fp16", "own")
    )
    for x, y in zip(found, own, strict=True):
        assert torch.equal(x, y) or torch.equal(x.isnan(), y.isnan())
    assert served == [False]


def test_gradients_repeat() -> None:
    tensors = drawn((2, 64, 4, 16))
    first, second = (
        gradients(tensors, causal=True, stabilizer="compensated_projected") for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_what_is_not_served_is_refused_with_what_is() -> None:
    q, k, v, _ = drawn((1, 32, 2, 16))
    with pytest.raises(AttentionArgumentError, match=r"own_fp16.*lacks paper_bf16"):
        stable_attention(q, k, v, stabilizer="paper_bf16", allow_broken=True, backward="own_fp16")
    with pytest.raises(AttentionArgumentError, match="lacks FP16 tensors"):
        stable_attention(q.half(), k.half(), v.half(), backward="own_fp16")
    with pytest.raises(AttentionArgumentError, match="own_fp16"):
        chunk_forward(q, k, v, backward="own_fp16")

"""INT8 attention: the oracle against published figures, the kernels against the oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from int8_cases import CASES, NAMES, problems, run
from memory_poison import PoisonedMemory
from regimes import make_regime

from stable_attention import AttentionArgumentError
from stable_attention.describe import describe
from stable_attention.int8 import launch
from stable_attention.int8.settings import DEFAULT, PAPER, Settings
from stable_attention.problem import Options
from stable_attention.reference import int8 as oracle


@pytest.mark.parametrize("name", CASES)
def test_kernels_do_what_the_oracle_does(name: str) -> None:
    assert not problems(name)


def test_codes_and_scales_are_the_oracles_bit_for_bit() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 1, 64, generator=gen).bfloat16() for _ in range(3))
    q[0, 3] = 1e4
    settings = Settings(smooth_q=True)
    problem, extras = describe(q, k, v, Options.of(layout="bshd", stabilizer="none"))
    kept = launch.forward(q, k, v, problem, extras, settings)
    five = (x.permute(0, 2, 1, 3).float().unsqueeze(2) for x in (q, k))
    want = oracle.operands(*five, settings)
    for got, codes, scale in ((kept.q, want.q8, want.sq), (kept.k, want.k8, want.sk)):
        assert got.codes.abs().max() == 127
        assert torch.equal(got.codes.float().view_as(codes), codes)
        torch.testing.assert_close(got.scale.view_as(scale), scale, rtol=1e-6, atol=0)


def test_every_element_is_written_and_repeats() -> None:
    with PoisonedMemory() as memory:
        found = run("packed")
        memory.check()
    for x, y in zip(found, run("packed"), strict=True):
        assert torch.equal(x, y) and x.isfinite().all()


def test_the_size_of_dout_does_not_show() -> None:
    """An additive epsilon in the scale of dS would: published code has 1e-7 there."""
    size = 2.0**-24
    for what, x, y in zip(NAMES, run("causal", size=size), run("causal"), strict=True):
        wanted = y if what == "O" else y * size
        torch.testing.assert_close(x, wanted, rtol=1e-2, atol=0, msg=what)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_finite_stays_so(place: int) -> None:
    """Maxima drop NaN: without care, codes of a block with one would be finite and wrong."""
    inputs = [torch.ones(1, 64, 1, 64, dtype=torch.bfloat16) for _ in range(3)]
    inputs[place][0, 5, 0, 7] = float("nan")
    assert launch.int8_attention(*inputs).isnan().any()


REFUSED = {
    "head dims": (96, {}),
    "window": (64, {"window": (3,)}),
    "softcap": (64, {"softcap": 3.0}),
    "dropout_p": (64, {"dropout_p": 0.1}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused(name: str) -> None:
    d, asked = REFUSED[name]
    x = torch.zeros(1, 8, 1, d, dtype=torch.bfloat16)
    with pytest.raises(AttentionArgumentError, match=name):
        launch.attend(x, x, x, Options.of(**asked), DEFAULT)


@pytest.mark.parametrize("name", ["sinks", "dropout_p", "dropout_seed", "positions"])
def test_keywords_that_are_not_served_are_refused(name: str) -> None:
    """Sinks were left out without a word."""
    x = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(AttentionArgumentError, match=f"{name} is given"):
        launch.int8_attention(x, x, x, **{name: torch.zeros(1)})
    with pytest.raises(AttentionArgumentError, match="settings is a dict"):
        launch.int8_attention(x, x, x, {"scales": "row"})


def test_settings_are_checked() -> None:
    for wrong in ({"scales": "block"}, {"normalizer": "none"}, {"projection": "no"}):
        with pytest.raises(AttentionArgumentError, match=next(iter(wrong))):
            Settings(**wrong)


# --- the oracle -------------------------------------------------------------------------------


def truth(q, k, v, dout, *, causal: bool):
    """delta, dQ, dK, dV in float64."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    n, scale = q.shape[-2], q.shape[-1] ** -0.5
    s = q @ k.mT * scale
    if causal:
        s = s.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    p = s.softmax(-1)
    delta = (dout * (p @ v)).sum(-1)
    ds = p * (dout @ v.mT - delta[..., None])
    return delta, ds @ k * scale, ds.mT @ q * scale, p.mT @ dout


def errors(tensors, settings: Settings, *, causal: bool) -> dict[str, float]:
    """Of q, k, v, dO [h, n, d]: errors of delta (mean over RMS) and of the gradients (norms)."""
    *inputs, dout = tensors
    leaves = [x[None].detach().requires_grad_() for x in inputs]
    out = oracle.int8_reference(*leaves, settings, layout="bhsd", causal=causal)
    grads = torch.autograd.grad(out, leaves, dout[None])
    delta, *want = truth(*tensors, causal=causal)
    found = (out.detach()[0].double() * dout.double()).sum(-1)
    result = {"delta": ((found - delta).mean() / delta.pow(2).mean().sqrt()).item()}
    for name, x, y in zip(NAMES[1:], grads, want, strict=True):
        result[name] = ((x[0].double() - y).norm() / y.norm()).item()
    return result


# arXiv 2603.02170, Table 1: relative error of (dQ, dK, dV) at a standard deviation of Q and K.
TABLE_1 = {
    1: (0.0184, 0.0220, 0.0159), 3: (0.0758, 0.0777, 0.0387), 5: (0.2014, 0.2007, 0.0605),
    8: (0.4666, 0.4699, 0.0973), 10: (0.6648, 0.6684, 0.1157),
}  # fmt: skip


@pytest.mark.parametrize("sigma", TABLE_1)
def test_table_1_of_the_paper(sigma: int) -> None:
    """Tile scales from sigma 3 on, row scales at 1: there tile scales are 2.5 times worse than
    printed, and dV is off by a quarter all the same, so the authors' scales are finer than their
    text says."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1024, 64, generator=gen) for _ in range(4))
    settings = dataclasses.replace(PAPER, scales="row" if sigma == 1 else "tile")
    found = errors((q * sigma, k * sigma, v, dout), settings, causal=False)
    for name, published in zip(NAMES[1:], TABLE_1[sigma], strict=True):
        bound = 0.3 if (sigma, name) == (1, "dV") else 0.2
        assert found[name] == pytest.approx(published, rel=bound), name


def test_the_bias_of_the_paper_and_what_takes_it_away() -> None:
    """P is rounded above the line and not below: with a mean in V, delta is short by 0.6 %."""
    tensors = make_regime("near8w", heads=2, n=512)
    paper, ours = (errors(tensors, s, causal=True) for s in (PAPER, DEFAULT))
    assert paper["delta"] < -4e-3 and abs(ours["delta"]) < 1e-3
    assert paper["dQ"] > 1.5 and ours["dQ"] < 0.3
    assert paper["dK"] > 0.08 and ours["dK"] < 0.01


def test_projection_holds_where_keys_tie() -> None:
    """Rounding equal P alike breaks the row sums of dS alike: dQ was 40 times its size."""
    tensors = make_regime("tie3", heads=2, n=512)
    without = dataclasses.replace(DEFAULT, projection=False)
    assert errors(tensors, without, causal=True)["dQ"] > 10
    assert errors(tensors, DEFAULT, causal=True)["dQ"] < 0.3


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_second_derivatives_are_refused(name: str) -> None:
    """Also of what is not kept; they were left out of a sum without a word."""
    given = {x: torch.randn(1, 70, 2, 64).bfloat16().requires_grad_() for x in "qkv"}
    x = given[name]
    (dx,) = torch.autograd.grad(launch.int8_attention(**given).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(dx.square().sum() + x.sum(), x)

"""Identities of attention, which need no reference at all, and bitwise repeatability."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE, Case, make_inputs
from error_rule import run_ours
from oracle import oracle_attention
from suite import PROPERTIES, backend_result, saturated_sink

from stable_attention import stable_attention


def grid_values(*shape: int, seed: int = 0, step: float = 0.125) -> torch.Tensor:
    """Multiples of ``step`` in +-2: sums of two of them are exact in BF16."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=gen).float().mul(step).to(DEVICE).bfloat16()


def test_output_ignores_a_constant_added_to_all_keys() -> None:
    q, k, v = (grid_values(1, 60, 2, 32, seed=i) for i in range(3))
    shift = torch.full((32,), 1.5, device=DEVICE).bfloat16()
    plain = stable_attention(q, k, v, causal=True)
    moved = stable_attention(q, k + shift, v, causal=True)
    assert torch.equal((k + shift).float(), k.float() + shift.float())
    truth = oracle_attention(q, k, v, causal=True).out
    rms = lambda x: float(x.double().pow(2).mean().sqrt())  # noqa: E731
    assert rms(moved - plain) < 1.5 * rms(plain - truth)
    assert rms(moved - truth) < 1.1 * rms(plain - truth)


@pytest.mark.parametrize("name", PROPERTIES)
def test_identity(name: str) -> None:
    assert PROPERTIES[name]() == []


def test_plain_numerics_lose_the_saturated_sink() -> None:
    """What "compensated" is for: the same check fails under "none"."""
    assert any("dQ error" in problem for problem in saturated_sink("none"))


def test_gradient_sums() -> None:
    """Rows of P sum to one: sum_j dV_j = sum_i dO_i, and rows of dS sum to zero: sum_j dK_j = 0."""
    case = Case(sq=64, sk=64, hq=2, hk=2, causal=1, values="repeat", seed=5)
    given = make_inputs(case)
    ours = run_ours(case, given)
    rounding = 2.0**-9
    for total, parts in ((ours.dv, given.dout), (ours.dk, None)):
        got = total.double().sum(1)
        want = torch.zeros_like(got) if parts is None else parts.double().sum(1)
        # Every dS, P and gradient element was rounded once: random half ulps that add in squares.
        slack = 10 * rounding * total.double().pow(2).sum(1).sqrt()
        assert bool(((got - want).abs() <= slack).all())


@pytest.mark.parametrize("regime", ["near2", "diffuse"])
def test_delta_error_of_ties_and_spread_attention(regime: str) -> None:
    from regimes import make_regime

    from stable_attention.probes import probe

    given = [x[None] for x in make_regime(regime, heads=2, n=128, device=DEVICE)]
    result = backend_result(given)
    report = probe(*given, backend=result, layout="bhsd", causal=True, skip_rows=64)
    assert report.rms < 1.2e-4


REPEATED = [
    "sq=40 sk=40 causal=1 hq=4 hk=2",
    "layout=thd lens_q=33,5 lens_k=33,5 causal=1 sinks=learned dropout=0.1",
]


@pytest.mark.parametrize("line", REPEATED)
def test_repeats_are_bitwise_equal(line: str) -> None:
    case = Case.parse(line)
    given = make_inputs(case)
    first, second = (run_ours(case, given).named() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_batch_and_head_order_do_not_matter() -> None:
    case = Case(b=3, sq=33, sk=33, hq=4, hk=2, causal=1, seed=2)
    given = make_inputs(case)
    whole = run_ours(case, given)
    one = Case(b=1, sq=33, sk=33, hq=4, hk=2, causal=1)
    for i in (0, 2):
        part = make_inputs(one)
        part.q, part.k, part.v, part.dout = (
            x[i : i + 1].contiguous() for x in (given.q, given.k, given.v, given.dout)
        )
        single = run_ours(one, part)
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(getattr(single, name)[0], getattr(whole, name)[i]), name
    order = [2, 0, 1]
    swapped = make_inputs(case)
    for name in ("q", "k", "v", "dout"):
        # Key heads swap places, and with them their groups of two query heads.
        x = getattr(given, name)[order]
        pairs = x.unflatten(2, (2, -1)).flip(2).flatten(2, 3)
        setattr(swapped, name, pairs.contiguous())
    found = run_ours(case, swapped)
    for name in ("out", "dq", "dk", "dv"):
        want = getattr(whole, name)[order].unflatten(2, (2, -1)).flip(2).flatten(2, 3)
        assert torch.equal(getattr(found, name), want), name


def test_nan_stays_in_its_head() -> None:
    case = Case(sq=40, sk=40, hq=4, hk=2, causal=1)
    given = make_inputs(case)
    clean = run_ours(case, given)
    given.q[0, 17, 1, 3] = torch.nan
    dirty = run_ours(case, given)
    for name in ("out", "dq"):
        other = [0, 2, 3]
        assert torch.equal(getattr(dirty, name)[:, :, other], getattr(clean, name)[:, :, other])
        rows = torch.arange(40, device=DEVICE) != 17
        assert torch.equal(getattr(dirty, name)[:, rows, 1], getattr(clean, name)[:, rows, 1])
    assert torch.equal(dirty.dk[:, :, 1], clean.dk[:, :, 1])
    assert bool(dirty.out[0, 17, 1].isnan().all())

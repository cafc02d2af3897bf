"""Identities of attention, which need no reference at all, and bitwise repeatability."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, make_inputs
from error_rule import run_ours

from stable_attention import stable_attention
from stable_attention.probes import decode_residual
from stable_attention.reference import oracle_attention


def grid_values(*shape: int, seed: int = 0, step: float = 0.125) -> torch.Tensor:
    """Multiples of ``step`` in +-2: sums of two of them are exact in BF16."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=gen).float().mul(step).bfloat16()


def test_output_ignores_a_constant_added_to_all_keys() -> None:
    q, k, v = (grid_values(1, 60, 2, 32, seed=i) for i in range(3))
    shift = torch.full((32,), 1.5).bfloat16()
    plain = stable_attention(q, k, v, causal=True)
    moved = stable_attention(q, k + shift, v, causal=True)
    assert torch.equal((k + shift).float(), k.float() + shift.float())
    truth = oracle_attention(q, k, v, causal=True).out
    rms = lambda x: float(x.double().pow(2).mean().sqrt())  # noqa: E731
    assert rms(moved - plain) < 1.5 * rms(plain - truth)
    assert rms(moved - truth) < 1.1 * rms(plain - truth)


@pytest.mark.parametrize("residual", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_one_give_exactly_one(residual: str, dtype: torch.dtype) -> None:
    """The P / l mismatch (FA PR #2721): O is a mean only if l sums the P that multiplied V."""
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 90, 2, 32, generator=gen).to(dtype) * 2 for _ in range(2))
    v = torch.ones_like(k)
    out, low = stable_attention(
        q, k, v, causal=True, window=(50, 0), residual=residual, return_residual=True
    )
    assert torch.equal(out, torch.ones_like(out))
    assert float(decode_residual(out, low).abs().max()) < 2.0**-20
    plain = stable_attention(q, k, v, causal=True, stabilizer="none", return_lse=True)[0]
    # The same mismatch in "none" is below what 16 bits show, but not below the low-order part.
    assert float((plain.float() - 1).abs().max()) <= 2.0**-8


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


def test_delta_error_of_a_saturated_sink() -> None:
    """Plain BF16 O makes dQ 100 % wrong here; the low-order part brings it back."""
    from stable_attention.probes import BackendResult, probe
    from stable_attention.reference.regimes import make_regime

    q, k, v, dout = (x[None] for x in make_regime("one", heads=2, n=128))
    errors = {}
    for stabilizer in ("compensated", "none"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse, low = stable_attention(
            *leaves, layout="bhsd", causal=True, stabilizer=stabilizer, deterministic=True,
            return_lse=True, return_residual=True,
        )  # fmt: skip
        dq, dk, _ = torch.autograd.grad(out, leaves, dout)
        result = BackendResult(out=out, lse=lse, low=low, dq=dq, dk=dk)
        errors[stabilizer] = probe(
            q, k, v, dout, backend=result, layout="bhsd", causal=True, skip_rows=64
        )
    assert errors["none"].dq_error > 0.5
    assert errors["compensated"].dq_error < 0.03
    assert errors["compensated"].rms < 1e-6 and errors["compensated"].lse_error < 1e-5


@pytest.mark.parametrize("regime", ["tie2s", "near2", "diffuse"])
def test_delta_error_of_ties_and_spread_attention(regime: str) -> None:
    from stable_attention.probes import BackendResult, probe
    from stable_attention.reference.regimes import make_regime

    q, k, v, dout = (x[None] for x in make_regime(regime, heads=2, n=128))
    out, lse, low = stable_attention(
        q, k, v, layout="bhsd", causal=True, return_lse=True, return_residual=True
    )
    report = probe(
        q, k, v, dout, layout="bhsd", causal=True, skip_rows=64,
        backend=BackendResult(out=out, lse=lse, low=low),
    )  # fmt: skip
    assert report.rms < (2e-6 if regime == "tie2s" else 1.2e-4)


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
        rows = torch.arange(40) != 17
        assert torch.equal(getattr(dirty, name)[:, rows, 1], getattr(clean, name)[:, rows, 1])
    assert torch.equal(dirty.dk[:, :, 1], clean.dk[:, :, 1])
    assert bool(dirty.out[0, 17, 1].isnan().all())

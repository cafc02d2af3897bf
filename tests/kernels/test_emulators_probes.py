"""The emulators show the effects they are named after, and the probes see them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, make_inputs
from error_bound import check
from error_rule import run_oracle
from regimes import REGIMES, make_regime

from stable_attention import numerics
from stable_attention.probes import (
    BackendResult,
    decode_o_lo,
    probe,
    true_gradients,
)
from stable_attention.reference.emulators import (
    COMPENSATED,
    DYNAMIC_BOUND,
    DYNAMIC_MAX,
    DYNAMIC_MAX_PUBLISHED,
    FLASH2,
    FLASH4,
    PAPER,
    PAPER_DYNAMIC_MAX,
    Emulation,
    Rounding,
    emulate,
    half_ulp,
    low_order_part,
)
from stable_attention.reference.geometry import from_bhsd

HEADS, N = 8, 256
MASK = torch.ones(N, N).tril().bool()


def run(regime: str, rounding: Rounding, **probing):
    q, k, v, dout = (x[None] for x in make_regime(regime, heads=HEADS, n=N))
    e = emulate(q, k, v, dout, rounding=rounding, mask=MASK)
    result = BackendResult(out=e.out, lse=e.lse, low=e.low, dq=e.dq, dk=e.dk)
    named = {"layout": "bhsd", "causal": True, "skip_rows": 64} | probing
    return probe(q, k, v, dout, backend=result, **named)


def test_float32_emulation_equals_the_oracle() -> None:
    case = Case(layout="bhsd", b=2, sq=40, sk=56, hq=3, hk=3, d=16, dv=24, softcap=4.0)
    case = Case.parse(f"{case} sinks=learned dlse=1 causal=1")
    given = make_inputs(case, "cpu")
    truth = run_oracle(case, given, torch.float64)
    exact = Rounding(dtype=torch.float32, probabilities=False, dscores=False, o_lo="float32")
    found = emulate(
        given.q, given.k, given.v, given.dout,
        rounding=exact,
        mask=torch.ones(40, 56).tril(16).bool(),
        sink=given.sinks,
        softcap=4.0,
        dlse=given.dlse,
    )  # fmt: skip
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(truth, name), rtol=1e-4, atol=1e-5
        )


def test_storing_o_in_bf16_biases_delta_and_the_low_part_removes_it() -> None:
    """The paper's event in FA2's own storage format: 8.4e-4 of RMS(delta), the same in all rows."""
    flash, ours = run("tie2s", FLASH2), run("tie2s", COMPENSATED)
    assert flash.rms > 5e-4 and flash.coherence > 0.8 and abs(flash.t) > 5
    assert ours.rms < 2e-6 and ours.coherence < 0.3
    assert flash.dscore_row_sum_rms == pytest.approx(flash.rms, rel=1e-3)
    assert flash.dq_error > 3 and ours.dq_error < 0.3 * flash.dq_error


def test_paper_emulation_and_its_remedy() -> None:
    paper, remedy = run("tie2s", PAPER), run("tie2s", PAPER_DYNAMIC_MAX)
    assert paper.mean > 5e-4 and paper.coherence > 0.8
    assert abs(remedy.mean) < 0.3 * paper.mean


def test_dynamic_max_trades_the_bias_for_a_larger_error() -> None:
    plain, dynamic = run("tie2s", FLASH2), run("tie2s", DYNAMIC_MAX)
    assert abs(dynamic.mean) < 0.3 * abs(plain.mean)
    assert dynamic.rms > 1.3 * plain.rms


def test_the_dynamic_shift_is_emulated_in_float32() -> None:
    """Where a run in FP32 was captured, `megatron-patch probe` asks for it."""
    q, k, v, dout = torch.randn(4, 1, 1, 8, 16, generator=torch.Generator().manual_seed(1)).unbind()
    found, plain = (
        emulate(q, k, v, dout, rounding=replace(rule, dtype=torch.float32))
        for rule in (DYNAMIC_MAX, FLASH2)
    )
    torch.testing.assert_close(found.dq, plain.dq)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_published_rule_loses_rows_that_the_bounded_one_keeps(dtype: torch.dtype) -> None:
    """Repeated maxima of 220 and -200 in turn, and at last a row of small scores."""
    torch.manual_seed(1)
    q, k, v, dout = torch.randn(4, 1, 1, 8, 16).to(dtype).unbind()
    k[..., :3, :], k[..., 3:, :] = 10.0, 11.0
    q[..., ::2, :], q[..., 1::2, :] = 5.0, -5.0
    q[..., -1, :] = torch.randn(16).to(dtype) / 100
    exact = Rounding(dtype=torch.float32, probabilities=False, dscores=False)
    truth = emulate(q, k, v, dout, rounding=exact)
    plain, bounded, published, clamped = (
        emulate(q, k, v, dout, rounding=replace(rule, dtype=dtype))
        for rule in (FLASH2, DYNAMIC_MAX, DYNAMIC_MAX_PUBLISHED, PAPER_DYNAMIC_MAX)
    )
    found, peer, true = (
        [getattr(x, name).double() for name in ("out", "lse", "dq", "dk", "dv")]
        for x in (bounded, plain, truth)
    )
    check(found, peer, true, floor=torch.finfo(dtype).eps / 2)
    lost = published.lse[0, 0] == -math.inf
    assert lost[:-1].all() and not lost[-1], "l underflows to 0"
    assert not published.dq[0, 0, lost].isfinite().all()
    if dtype == torch.bfloat16:  # the paper's code clamps l: zeros instead
        assert not clamped.out[0, 0, lost].any() and not clamped.dq[0, 0, lost].any()
    assert {t: numerics_bound(t) for t in DYNAMIC_BOUND} == DYNAMIC_BOUND


def numerics_bound(dtype: torch.dtype) -> float:
    """The kernels' own."""
    short = "BF16" if dtype == torch.bfloat16 else "FP16"
    return float(getattr(numerics, f"DYNAMIC_BOUND_{short}").value)


def test_lagging_maximum_needs_the_rounded_sum() -> None:
    o32 = Rounding(shift="lagging", o_lo="float32")
    both = Rounding(shift="lagging", o_lo="float32", normalizer="rounded")
    assert run("one", FLASH4).rms > 5e-4
    assert run("one", o32).rms > 5e-4
    assert run("one", both).rms < 1e-5


def test_saturated_sink_loses_dq_without_the_low_part() -> None:
    flash, ours = run("one", FLASH2), run("one", COMPENSATED)
    assert flash.dead_zone > 0.9 and flash.kappa > 100
    assert flash.dq_error > 0.5 > 10 * ours.dq_error


@pytest.mark.parametrize("name", REGIMES)
def test_compensated_regimes(name: str) -> None:
    """The gate of the kernels, met by what they are specified to do."""
    report = run(name, COMPENSATED)
    if name == "gauss":
        assert report.rms < 0.75 * run(name, FLASH2).rms
    else:
        assert report.rms < 1.5e-4 and abs(report.mean) < 3 * report.standard_error + 1e-7


def test_probe_counts_repeated_maxima() -> None:
    assert run("tie2", FLASH2).repeated_max == 1.0
    assert run("one", FLASH2).repeated_max == 0.0
    near = run("near8w", FLASH2)
    assert near.repeated_max < 0.01 < near.two_round_to_one


def test_probe_in_blocks_equals_probe_at_once() -> None:
    small, whole = (run("near2", FLASH2, budget=b).as_dict() for b in (8 * N * 24, 1 << 28))
    for name, value in whole.items():
        assert small[name] == pytest.approx(value, rel=1e-9, abs=1e-15), name


@pytest.mark.parametrize(("sq", "sk"), [(4, 0), (0, 4)])
def test_probe_of_nothing_says_so(sq: int, sk: int) -> None:
    """Without keys it divided by zero; without queries it reported a perfect row."""
    q, k = torch.zeros(1, sq, 1, 16).bfloat16(), torch.zeros(1, sk, 1, 16).bfloat16()
    with pytest.raises(ValueError, match="nothing in it to probe"):
        probe(q, k, k, q, backend=BackendResult(out=q))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dout": torch.zeros(1, 3, 1, 16)}, "dout has shape"),
        ({"v": torch.zeros(1, 3, 1, 16)}, "as many tokens"),
        ({"layout": "hbsd"}, "bshd, sbhd"),
    ],
)
def test_probe_of_what_does_not_belong_together(change: dict, text: str) -> None:
    given = dict.fromkeys(("q", "k", "v", "dout"), torch.zeros(1, 4, 1, 16))
    with pytest.raises(ValueError, match=text):
        true_gradients(**given | change)


def test_probe_of_a_wrong_delta_reports_exactly_that() -> None:
    q, k, v, dout = (x[None] for x in make_regime("diffuse", heads=2, n=96))
    e: Emulation = emulate(q, k, v, dout, rounding=Rounding(o_lo="float32"),
                           mask=torch.ones(96, 96).tril().bool())  # fmt: skip
    wrong = probe(
        q, k, v, dout, layout="bhsd", causal=True,
        backend=BackendResult(out=e.out, low=e.low + 0.016 * (e.out.float() + e.low), lse=e.lse),
    )  # fmt: skip
    assert wrong.rms == pytest.approx(0.016, rel=0.02)
    assert math.isnan(wrong.dq_error)


def test_probe_handles_gqa_windows_and_layouts() -> None:
    case = Case(layout="sbhd", b=2, sq=48, sk=48, hq=4, hk=2, causal=1, left=9)
    given = make_inputs(case, "cpu")
    truth = run_oracle(case, given, torch.float64)
    report = probe(
        given.q, given.k, given.v, given.dout, layout="sbhd", causal=True, window=(9, 0),
        backend=BackendResult(out=truth.out, lse=truth.lse, dq=truth.dq, dk=truth.dk),
    )  # fmt: skip
    assert max(report.rms, report.dq_error, report.dk_error, report.lse_error) < 1e-12


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize(
    ("causal", "window", "sq", "sk"),
    [(False, None, 37, 21), (True, None, 37, 37), (True, (9, 0), 33, 33), (True, None, 33, 21)],
)
def test_true_gradients_are_those_of_autograd(
    layout: str, causal: bool, window: tuple[int, int] | None, sq: int, sk: int
) -> None:
    """In float64, GQA, rows without keys (the first ones where sq > sk), in blocks of rows."""
    gen = torch.Generator().manual_seed(0)
    b, hq, hk, d, dv = 2, 4, 2, 8, 6
    shapes = ((b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv), (b, hq, sq, dv))
    tensors = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    dout = tensors[3]
    i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    if causal:
        hidden |= j > i
    if window is not None:
        hidden |= j < i - window[0]
    keys, values = (x.repeat_interleave(hq // hk, 1) for x in (k, v))
    seen = ~hidden.all(-1)  # a row that sees no key has no softmax
    scores = (q @ keys.mT * d**-0.5).masked_fill(hidden, -math.inf)[:, :, seen]
    out = torch.softmax(scores, -1) @ values
    expected = torch.autograd.grad((out * dout[:, :, seen]).sum(), (q, k))

    given = [from_bhsd(x.detach(), layout) for x in (q, k, v, dout)]
    for budget in (None, 8 * sk * 5):
        found = true_gradients(*given, layout=layout, causal=causal, window=window, budget=budget)
        for mine, theirs in zip(found, expected, strict=True):
            theirs = from_bhsd(theirs, layout)
            assert mine.dtype == torch.float64 and mine.shape == theirs.shape
            # Sums of some tens of products: a few units of float64's rounding.
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="probe sequences one by one"):
        true_gradients(*given, layout="thd")


@pytest.mark.parametrize("row", [0, 40])
def test_what_is_not_finite_leaves_no_figure_that_looks_like_one(row: int) -> None:
    """Also in the first of several blocks of rows: a later one must not cover it up."""
    case = Case(layout="bshd", b=1, sq=48, sk=48, hq=2, hk=2, causal=1)
    given = make_inputs(case, "cpu")
    truth = run_oracle(case, given, torch.float64)
    result = BackendResult(out=truth.out, lse=truth.lse, dq=truth.dq, dk=truth.dk)
    given.q[0, row, 1, 0] = math.nan
    report = probe(
        given.q, given.k, given.v, given.dout, causal=True, backend=result, budget=8 * 48 * 8
    )
    known = {name for name, x in report.as_dict().items() if math.isfinite(x)}
    assert known == {"rows", "heads"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_ulp_is_half_the_spacing(dtype: torch.dtype) -> None:
    x = (torch.randn(4096) * torch.logspace(-3, 3, 4096)).to(dtype)
    up = torch.nextafter(x.abs(), torch.full_like(x, float("inf")))
    assert torch.equal(half_ulp(x), (up.float() - x.abs().float()) / 2)


@pytest.mark.parametrize(("storage", "bits"), [("bf16", 9), ("int8", 8)])
def test_low_order_part_of_each_storage(storage: str, bits: int) -> None:
    o = torch.randn(10_000)
    hi = o.bfloat16()
    low = low_order_part(o, hi, storage)
    assert float(((o - hi.float() - low) / half_ulp(hi)).abs().max()) <= 2.0**-bits * 1.02
    codes = torch.round((o - hi.float()) / (half_ulp(hi) / 127)).to(torch.int8)
    if storage == "int8":
        assert torch.equal(decode_o_lo(hi, codes), low)

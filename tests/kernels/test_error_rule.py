"""The kernels under the error rule, in the interpreter: every feature, small shapes, NaN-filled
outputs inside guard bands. The GPU runs thousands of these (gpu/test_grid.py).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, make_inputs, random_case
from error_rule import Report, Yardsticks, check_case, compare, judge, run_ours
from suite import FEATURES


@pytest.mark.parametrize("line", FEATURES)
def test_feature(line: str) -> None:
    """Every third also without LSE: they have all forward paths."""
    again = FEATURES.index(line) % 3 == 0
    check_case(Case.parse(line), again=again).raise_if_bad()


def _random_cases(count: int) -> list[Case]:
    rng = random.Random(20)
    cases = []
    while len(cases) < count:
        case = random_case(rng, small=True)
        # The interpreter's time goes with heads x rows x columns: the small half of the draws.
        if case.d <= 64 and case.hq * case.sq * case.sk * case.b < 30_000 and case.v_dim <= 64:
            cases.append(case)
    return cases


@pytest.mark.parametrize("case", _random_cases(12), ids=lambda case: case.id)
def test_random_case(case: Case) -> None:
    check_case(case).raise_if_bad()


@pytest.mark.parametrize("stabilizer", ["dynamic_max", "paper_bf16"])
def test_comparison_stabilizers_are_finite_and_masked(stabilizer: str) -> None:
    """Exempt from the error gates, never from NaN and mask gates; far from garbage all the same."""
    case = Case(sq=50, sk=40, causal=1, values="repeat", stabilizer=stabilizer, seed=4)
    given = make_inputs(case)
    ours = run_ours(case, given)
    for name, x in ours.named().items():
        expected_infinite = 20 if name == "lse" else 0  # 10 rows without keys in each of 2 heads
        assert int((~torch.isfinite(x)).sum()) == expected_infinite, name
    assert bool((ours.out[:, :10] == 0).all()) and bool((ours.dq[:, :10] == 0).all())
    truth = compare(replace(case, stabilizer="none"), given, ours)
    assert truth.ratios["out"][1] < 20, truth.ratios


def test_the_rule_itself_refuses_zeros_and_a_bias() -> None:
    """Zero gradients pass absolute tolerances used elsewhere (1.5e-2 on 0.1 * randn inputs)."""
    case = Case(sq=64, sk=64, gain=0.1)
    given = make_inputs(case)
    ours = run_ours(case, given)
    for change in (
        {"dq": torch.zeros_like(ours.dq)},
        {"out": (ours.out.float() * 1.016).bfloat16()},
        {"dk": (ours.dk.float() * 1.05).bfloat16()},
        {"lse": ours.lse + 1e-4},
        {"dv": ours.dv.roll(1, 1)},
    ):
        report = compare(case, given, replace(ours, **change))
        assert any(p.startswith(next(iter(change))) for p in report.problems), change.keys()
    report = Report(case)
    nan = ours.out.clone()
    nan[0, 3, 1, 5] = torch.nan
    judge(report, "out", nan, Yardsticks(truth=ours.out, pytorch=ours.out))
    assert "1 of" in report.problems[0]


def test_a_yardstick_that_cancels_is_replaced_by_the_size_of_the_terms() -> None:
    """One visible key: PyTorch's dQ is exactly 0; a rounding of dS is no fault, a lost term is."""
    zero = torch.zeros(1, 512, 4, 64, dtype=torch.bfloat16)
    terms = torch.ones(zero.shape)
    by = Yardsticks(truth=zero, pytorch=zero, terms=terms)
    for size, problems in ((2.0**-10, 0), (2.0**-7, 2)):
        report = Report(Case())
        judge(report, "dq", torch.full_like(zero, size), by)
        assert len(report.problems) == problems, report.problems


def test_rows_without_keys_do_not_make_the_rule_stricter() -> None:
    """The same errors, alone or among rows that nothing can be wrong in, are judged the same."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(4, 8, 64, generator=generator)
    theirs, ours = (truth + 2.0**-8 * truth * f for f in (0.5, 0.5))
    for rows in (8, 4096):
        wide = [torch.zeros(4, rows, 64) for _ in range(3)]
        for big, small in zip(wide, (truth, theirs, ours), strict=True):
            big[:, :8] = small
        report = Report(Case())
        judge(report, "dq", wide[2].bfloat16(), Yardsticks(truth=wide[0], pytorch=wide[1]))
        assert not report.problems, (rows, report.problems)

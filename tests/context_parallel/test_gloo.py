"""Context parallelism over gloo ranks: every mode, feature and layout against one rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cp_cases import Case, collect, grid, join, make_inputs, truth, verdict
from ranks import Ranks

pytestmark = pytest.mark.multiprocess

KERNELS = {"backend": "stable_flash", "dtype": "bf16", "s": 32, "b": 1, "h": 2, "kv": 1}
KERNEL_CASES = [
    Case(size=2, mode="p2p", window=(9, 0), sinks=True, **KERNELS),
    Case(size=2, mode="all_gather", **KERNELS),
    Case(size=2, mode="a2a", dropout_p=0.2, **KERNELS),
    Case(size=2, mode="p2p", layout="thd", lengths=(9, 0, 6), tail=4, **KERNELS),
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as four:
        yield four


def judge(ranks: Ranks, cases: list[Case]) -> None:
    """Run all cases, then say everything that is wrong with any of them."""
    answers = ranks.play("many", cases)
    wrong = []
    for number, case in enumerate(cases):
        # Ranks 0 and 1 are a pair of their own, and 2 and 3 another that does the same.
        parts = [answers[rank][number] for rank in range(case.size)]
        wrong += [f"{case}: {text}" for text in verdict(case, collect(case, parts))]
    assert not wrong, "\n".join(wrong)


# Four ranks have every mode; two are in the emulation, in `KERNEL_CASES` and in training.
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_mode_feature_and_layout(ranks, size):
    judge(ranks, grid(size))


def test_kernels(ranks):
    judge(ranks, KERNEL_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_kernels_every_mode_feature_and_layout(ranks, size):
    small = {"backend": "stable_flash", "dtype": "bf16", "b": 1, "lengths": (9, 0, 6), "tail": 4}
    judge(ranks, grid(size, **small))


def test_the_same_bits_every_time(ranks):
    for mode in ("p2p", "all_gather", "a2a", "a2a+p2p"):
        case = Case(size=4, mode=mode, dtype="bf16", sinks=True)
        once, again = (ranks.play("attention", case) for _ in range(2))
        for one, two in zip(once, again, strict=True):
            assert all((one[name] == two[name]).all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("mode", ["p2p", "a2a+p2p"])
def test_core_attention_takes_the_group_of_the_layer_or_of_the_call(ranks, mode):
    case = Case(size=4, mode=mode)
    exact = truth(case, make_inputs(case))["out"]
    answers = ranks.play("core", case)
    calls = {4: 0, 1: -1} | ({2: 1} if mode == "p2p" else {})
    for size, number in calls.items():
        part = dataclasses.replace(case, size=size)
        got = join(part, [answers[rank][number] for rank in range(size)])
        torch.testing.assert_close(got, exact.float(), rtol=1e-5, atol=1e-5)

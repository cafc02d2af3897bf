"""INT8 attention on a GPU: the cases of the suite, and NaN, which maxima drop there."""

from __future__ import annotations

import pytest
import torch
from int8_cases import CASES, problems

from stable_attention.int8.launch import int8_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_kernels_do_what_the_oracle_does(name: str) -> None:
    assert not problems(name)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("paper", [False, True])
def test_sequences_longer_than_a_pipeline(d: int, paper: bool, monkeypatch) -> None:
    long = {"sq": 1000, "sk": 1000, "hq": 4, "hk": 2, "d": d, "causal": True, "paper": paper}
    monkeypatch.setitem(CASES, "long", long)
    assert not problems("long")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_reaches_every_query_of_its_block(place: int) -> None:
    inputs = [torch.randn(1, 200, 2, 64, device="cuda").bfloat16() for _ in range(3)]
    inputs[place][0, 70, 0, 3] = float("nan")
    out = int8_attention(*inputs)[0]
    assert out[64:128, 0].isnan().all() and out[:, 1].isfinite().all()

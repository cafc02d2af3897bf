"""The rule by which our kernels are held against the vendors' (it needs no GPU to be wrong)."""

from __future__ import annotations

import math

import vendors
from attention_cases import Case


def test_the_better_vendor_and_two_per_cent() -> None:
    theirs = {"SDPA-flash": 2.0, "SDPA-cuDNN": 1.0}
    for ours, over in ((0.5, False), (1.02, False), (1.03, True), (math.nan, True)):
        assert vendors.over(ours, theirs) is over
    assert vendors.over(1.5, {"SDPA-flash": 1.0, "SDPA-cuDNN": math.nan})


def test_only_the_same_function_is_compared() -> None:
    square = {"sq": 1024, "sk": 1024, "d": 64, "hq": 8}
    assert vendors.served(Case(**square)) and vendors.served(Case(**square, causal=1))
    assert not vendors.served(Case(**square, sinks="learned"))
    assert not vendors.served(Case(**square | {"sk": 512}, causal=1))
    assert not vendors.served(Case(d=64))

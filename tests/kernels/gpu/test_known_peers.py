"""Problems on which public reports saw NaN or wrong gradients of other kernels: ours are right.

In the sizes of the reports; small ones of the same kind are in tests/kernels/suite.py.
"""

from __future__ import annotations

import pytest
from attention_cases import Case
from error_rule import check_case

pytestmark = pytest.mark.gpu
FAULTS = {
    "pytorch-196678: 704 keys (704 % 128 = 64)": "sq=704 sk=704 causal=1 values=below",
    "pytorch-196678: 192 keys": "sq=192 sk=192 causal=1 values=below",
    "pytorch-196678, control: 640 keys": "sq=640 sk=640 causal=1 values=below",
    "cudnn-frontend-1072: one query, 128 keys": "sq=1 sk=128 values=below",
    "cudnn-frontend-160: two tokens, a channel of K at 70": "sq=2 sk=2 causal=1 values=outlier",
}


@pytest.mark.parametrize("line", FAULTS.values(), ids=FAULTS)
def test_ours_are_right_where_a_peer_is_not(line: str) -> None:
    """``below`` puts every LSE of d = 64 below -88, where the reports begin."""
    check_case(Case.parse(f"{line} d=64 hq=2 hk=2"), "cuda").raise_if_bad()

"""Problems on which other kernels return NaN (pytorch #196678 ...): ours are finite and right.

What the installed peers do on this machine is in docs/results/kernel_faults.json
(benchmarks/kernel_faults.py).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.mark.parametrize("nth", range(5))
def test_ours_are_right_where_a_peer_is_not(nth: int) -> None:
    sys.path.append(BENCHMARKS)
    import kernel_faults

    assert len(kernel_faults.FAULTS) == 5
    found = kernel_faults.measure(kernel_faults.FAULTS[nth])
    mine, plain = found["backends"]["ours"], found["backends"]["SDPA-math"]
    print(found)
    assert "error" not in mine and not mine["not_finite"], found
    for name in ("out", "dk", "dv"):
        # 16-bit results: within twice of PyTorch's own error, or of half an ulp.
        assert mine["errors"][name] <= 2 * plain["errors"].get(name, math.inf) + 2**-8, found

"""Gates on the delta error of the default stabilizer, and vendor kernels beside it.

benchmarks/accuracy.py runs the full table (to 32k, all backends) for docs/numerics.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from attention_cases import DEVICE
from regimes import REGIMES, SINK_REGIMES, make_regime
from suite import backend_result

from stable_attention.probes import probe

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from accuracy import with_float32_output

pytestmark = pytest.mark.gpu


def _ours(tensors, stabilizer="compensated"):
    result = backend_result(tensors, stabilizer)
    return probe(*tensors, backend=result, layout="bhsd", causal=True, skip_rows=64)


@pytest.mark.parametrize("n", [512, 2048, 8192])
@pytest.mark.parametrize("name", REGIMES)
def test_delta_error(name: str, n: int) -> None:
    heads = 48 if n < 8192 else 16
    tensors = [x[None] for x in make_regime(name, heads=heads, n=n, device=DEVICE)]
    ours, plain = _ours(tensors), _ours(tensors, "none")
    if name in SINK_REGIMES:
        assert ours.rms <= 1e-4
        assert abs(ours.mean) <= 1e-5
    if name == "gauss":
        assert ours.rms <= 0.7 * plain.rms
    if name == "one":
        assert ours.dq_error < 0.1 < plain.dq_error


@pytest.mark.parametrize("d", [64, 128, 256])
def test_saturated_sink_is_within_twice_a_float32_output(d: int) -> None:
    """The sum of the rounded P must be truncated as P V is: additions in float32 gave 3 times."""
    tensors = [x[None] for x in make_regime("one", heads=24, n=512, d=d, device=DEVICE)]
    best = probe(
        *tensors, backend=with_float32_output()(*tensors), layout="bhsd", causal=True, skip_rows=64
    )
    assert _ours(tensors).dq_error <= 2.0 * best.dq_error

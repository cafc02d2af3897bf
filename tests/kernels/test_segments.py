"""How long tensor cores may accumulate: emulated, beside `numerics.truncation`."""

from __future__ import annotations

import pytest
import torch
from regimes import make_regime

from stable_attention.hopper.launch import SEGMENT
from stable_attention.numerics import truncation

MAX_MEAN = 1e-5
"""The gate of benchmarks/accuracy.py."""
KEYS = 32_768


def truncated(x: torch.Tensor) -> torch.Tensor:
    """float64 x cut to the 24 digits of float32, towards zero."""
    digits, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(torch.ldexp(digits, torch.tensor(24))), exponent - 24)


def output(p: torch.Tensor, v: torch.Tensor, segment: int) -> torch.Tensor:
    """P V over the sum of P, in the order of the kernel of sm_90: blocks from the last, their later
    half first, 16 keys an addition; segments join rounded to nearest."""
    v = torch.cat([v, v.new_ones(len(v), 1)], 1)
    total = torch.zeros(len(p), v.shape[1], dtype=torch.float64)
    part, keys = torch.zeros_like(total), 0
    for first in (
        b + h + i for b in range(KEYS - 128, -1, -128) for h in (64, 0) for i in (0, 16, 32, 48)
    ):
        if keys == segment:
            total, part, keys = (total + part).float().double(), torch.zeros_like(total), 0
        part = truncated(part + p[:, first : first + 16] @ v[first : first + 16])
        keys += 16
    total = (total + part).float().double()
    return total[:, :-1] / total[:, -1:]


@pytest.mark.parametrize(("regime", "first_seen"), [("diffuse", False), ("near8w", True)])
def test_a_segment_keeps_the_mean_error_of_delta(regime: str, first_seen: bool) -> None:
    """The last rows of 32k keys, whose sinks come first or, what is worst, last in memory."""
    q, k, v, dout = (x[0].double() for x in make_regime(regime, heads=1, n=KEYS, d=64))
    if first_seen:
        k, v = k.roll(-1, 0), v.roll(-1, 0)
    q, dout = q[-8:], dout[-8:]
    s = q @ k.T * 64**-0.5
    p = (s - s.amax(1, keepdim=True)).exp().bfloat16().double()
    exact = p @ v / p.sum(1, keepdim=True)
    rms = (dout * exact).sum(1).square().mean().sqrt()

    def mean(segment: int) -> float:
        return float(((dout * (output(p, v, segment) - exact)).sum(1) / rms).mean().abs())

    assert mean(SEGMENT) <= truncation(SEGMENT) <= MAX_MEAN < mean(0)

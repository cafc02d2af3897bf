"""Nine synthetic input regimes in which attention kernels differ (docs/numerics.md).

All but ``gauss`` give V and dO one sign on half of the features, as arXiv 2510.04212 observes in
the failing run. Sinks are keys that every query prefers by ``gap`` logits over the tail.

Shapes: q, k, v, dout [heads, n, d].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Regime:
    """``sinks`` keys at logit ``gap`` above the tail; ``jitter`` makes them unequal."""

    meaning: str
    sinks: int = 0
    gap: float = 0.0
    jitter: float = 0.0
    value_scale: float = 1.0
    """Factor on the sinks' V ("value drain")."""
    one_sided: bool = True
    key_offset: float = 0.0
    """Size of a key offset shared by all keys of a head."""


REGIMES = {
    "tie2s": Regime("two equal sinks with small values", sinks=2, gap=14, value_scale=0.5),
    "tie2": Regime("two equal sinks", sinks=2, gap=14),
    "tie3": Regime("three equal sinks", sinks=3, gap=14),
    "near2": Regime("two sinks equal to a few hundredths", sinks=2, gap=14, jitter=1),
    "near8w": Regime("eight near-equal sinks over a heavy tail", sinks=8, gap=7, jitter=1),
    "one": Regime("one saturated sink", sinks=1, gap=14),
    "diffuse": Regime("no sink"),
    "kbias": Regime("no sink, one large offset in all keys", key_offset=3),
    "gauss": Regime("Gaussian inputs", one_sided=False),
}
SINK_REGIMES = ("tie2s", "tie2", "tie3", "near2", "near8w", "one")


def make_regime(
    name: str,
    *,
    heads: int,
    n: int,
    d: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v, dO) of a regime in ``dtype``; drawn on the CPU, the same on every device.

    Head h of a seed does not depend on how many heads are drawn.
    """
    regime = REGIMES[name]
    parts = [_one_head(regime, n, d, seed * 100_003 + h) for h in range(heads)]
    q, k, v, dout = (torch.stack(x).to(device).to(dtype) for x in zip(*parts, strict=True))
    return q, k, v, dout


def _one_head(regime: Regime, n: int, d: int, seed: int) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    q, k, v, dout = normal(n, d), normal(n, d), normal(n, d), normal(n, d) * 1e-3
    if regime.one_sided:
        half = d // 2
        v[:, :half] = -(1.5 + 0.5 * normal(n, half)).clamp_min(0.05)
        dout[:, :half] = -(0.5 + 0.5 * normal(n, half)).abs() * 1e-3
    if regime.sinks:
        direction = normal(d)
        direction /= direction.norm()
        size = math.sqrt(regime.gap * math.sqrt(d))
        q, k = (0.6 * (x - (x @ direction)[:, None] * direction) for x in (q, k))
        q += size * direction * (1 + 0.05 * normal(n, 1))
        # Rounded before the jitter is added, so that equal sinks stay exactly equal.
        key = (size * direction).bfloat16().float().repeat(regime.sinks, 1)
        key += regime.jitter * 0.02 * normal(regime.sinks, d)
        places = torch.arange(regime.sinks) * 3
        k[places] = key
        v[places] *= regime.value_scale
    k += regime.key_offset * normal(1, d)
    return q, k, v, dout

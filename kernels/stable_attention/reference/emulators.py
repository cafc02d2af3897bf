"""Attention kernels emulated rounding by rounding, for tests and experiments.

Float32 everywhere except where a named implementation rounds. Whole score matrices: small shapes.

- ``FLASH2``: FlashAttention-2/3 and cuDNN. P to 16 bits for P V, l from float32 P, O stored once.
- ``FLASH4``: the same with a row maximum that lags (FA4 rescales only past a threshold), so that
  the dominant P is not 1 and its rounding no longer cancels in O / l.
- ``PAPER``: the emulation that fails in arXiv 2510.04212: S, the unnormalised O and l in BF16.
- ``PAPER_DYNAMIC_MAX``: the paper's remedy on top, its reference code's clamp included.
- ``DYNAMIC_MAX``: the remedy as ``stabilizer="dynamic_max"`` has it, its shift bounded;
  ``DYNAMIC_MAX_PUBLISHED``: not bounded, so that a row with a large repeated maximum is lost.
- ``COMPENSATED``: what ``stabilizer="compensated"`` is specified to do.
- ``PROJECTED``, ``COMPENSATED_PROJECTED``: what the stabilizers of these names are specified to do.

Shapes: q [b, h, sq, d], k [b, h, sk, d], v [b, h, sk, dv] (query heads everywhere).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

INT8_CODES = 127
DYNAMIC_BOUND = {torch.bfloat16: 60.0, torch.float16: 4.0}
"""In powers of two; the kernels' is `numerics.DYNAMIC_BOUND_BF16` and ``_FP16``."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Where an implementation rounds to ``dtype``."""

    dtype: torch.dtype = torch.bfloat16
    scores: bool = False
    probabilities: bool = True
    accumulator: bool = False
    """Unnormalised O and l."""
    normalizer: str = "float32"
    """O is divided by the sum of the "float32" or of the "rounded" P."""
    lse: str = "float32"
    """LSE from the "float32" or from the "rounded" sum."""
    weights: str = "float32"
    """P of the backward is divided by the "float32" or by the "rounded" sum."""
    o_lo: str | None = None
    """Low-order part of O that delta sees: None, "bf16", "int8" or "float32"."""
    shift: str = "max"
    """"max", "lagging" (up to ``lag`` nats below) or "dynamic" (the paper's rule)."""
    lag: float = 5.5
    beta: float = 2.0
    eps: float = 1e-3
    bounded: bool = False
    """Whether the dynamic shift exceeds the maximum by at most `DYNAMIC_BOUND`."""
    clamp: float = 0.0
    dscores: bool = True
    """dS to ``dtype`` for its two products."""
    projection: str | None = None
    """What takes the row sum of the rounded dS out of dQ, and out of delta for dK: None, "key" (the
    key of the row's largest P) or "mean" (the rounded P times K)."""


FLASH2 = Rounding()
FLASH4 = Rounding(shift="lagging")
PAPER = Rounding(scores=True, accumulator=True)
PAPER_DYNAMIC_MAX = Rounding(scores=True, accumulator=True, shift="dynamic", clamp=1e-10)
DYNAMIC_MAX = Rounding(shift="dynamic", bounded=True)
DYNAMIC_MAX_PUBLISHED = Rounding(shift="dynamic")
COMPENSATED = Rounding(normalizer="rounded", weights="rounded", o_lo="bf16")
PROJECTED = replace(FLASH2, projection="mean")
COMPENSATED_PROJECTED = replace(COMPENSATED, projection="key")


@dataclass(frozen=True)
class Emulation:
    """Results; ``out`` and gradients in the rounding's dtype, ``delta`` and ``lse`` float32."""

    out: torch.Tensor
    low: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    ds: torch.Tensor
    """dS [b, h, sq, sk] before its rounding."""
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def half_ulp(hi: torch.Tensor) -> torch.Tensor:
    """Half the spacing of a 16-bit tensor's format at each value, float32."""
    _, exponent = torch.frexp(hi.float())  # |hi| in [2^(e-1), 2^e)
    if hi.dtype == torch.bfloat16:
        return torch.ldexp(torch.ones_like(hi, dtype=torch.float32), (exponent - 9).clamp_min(-120))
    return torch.ldexp(torch.ones_like(hi, dtype=torch.float32), (exponent - 12).clamp_min(-25))


def low_order_part(o: torch.Tensor, hi: torch.Tensor, storage: str | None) -> torch.Tensor:
    """What ``storage`` keeps of o - hi, as float32."""
    rest = o - hi.float()
    if storage is None:
        return torch.zeros_like(rest)
    if storage == "int8":
        step = half_ulp(hi) / INT8_CODES
        return torch.round(rest / step).clamp(-INT8_CODES, INT8_CODES) * step
    return rest.bfloat16().float() if storage == "bf16" else rest


def _shift(s: torch.Tensor, rounding: Rounding, gen: torch.Generator) -> torch.Tensor:
    m = s.amax(-1, keepdim=True)
    m = m.masked_fill(m == -math.inf, 0.0)
    if rounding.shift == "lagging":
        return m - torch.rand(m.shape, generator=gen).to(m.device) * rounding.lag
    if rounding.shift == "dynamic":
        repeated = (s >= m - rounding.eps).sum(-1, keepdim=True) > 1
        moved = torch.where(m > 0, rounding.beta * m, torch.zeros_like(m))
        if rounding.bounded:
            # As the kernels': float32 has the range of BF16.
            bound = DYNAMIC_BOUND.get(rounding.dtype, DYNAMIC_BOUND[torch.bfloat16])
            moved = moved.clamp(m, m + bound * math.log(2))
        return torch.where(repeated & (m != 0), moved, m)
    return m


def emulate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    rounding: Rounding,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    keep: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dlse: torch.Tensor | None = None,
    wide_gradients: bool = False,
    seed: int = 0,
) -> Emulation:
    """Forward and backward with the roundings of ``rounding``.

    ``mask`` boolean [sq, sk] of allowed pairs; ``sink`` [h] logits; ``keep`` boolean
    [b, h, sq, sk] of weights that dropout keeps; ``dlse`` [b, h, sq]; ``wide_gradients`` leaves
    the gradients in float32 (grouped heads are summed before the rounding); ``seed`` draws the lag.
    """
    gen = torch.Generator().manual_seed(seed)
    down = lambda x: x.to(rounding.dtype).float()  # noqa: E731
    maybe = lambda x, yes: down(x) if yes else x  # noqa: E731
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, dout = q.float(), k.float(), v.float(), dout.float()
    s = maybe(maybe(torch.matmul(q, k.mT), rounding.scores) * scale, rounding.scores)
    slope = torch.ones_like(s)
    if softcap:
        bent = torch.tanh(s / softcap)
        s, slope = softcap * bent, 1 - bent * bent
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    m = _shift(s, rounding, gen)
    if sink is not None:
        m = torch.maximum(m, sink.view(1, -1, 1, 1))
    p = torch.exp(s - m)
    multiplied = maybe(p, rounding.probabilities)
    extra = 0.0 if sink is None else torch.exp(sink.view(1, -1, 1, 1) - m)
    l32 = p.sum(-1, keepdim=True) + extra
    l_rounded = multiplied.sum(-1, keepdim=True) + extra
    l = l_rounded if rounding.normalizer == "rounded" else l32
    l = maybe(l.clamp_min(rounding.clamp), rounding.accumulator)
    if keep is not None:
        multiplied = multiplied * keep
    gain = 1 / (1 - dropout_p)
    o_bar = maybe(torch.matmul(multiplied, v), rounding.accumulator)
    o = o_bar / l.masked_fill(l == 0, 1.0) * gain
    out = o.to(rounding.dtype)
    low = low_order_part(o, out, rounding.o_lo)
    sums = {"float32": l32, "rounded": l_rounded}

    def log_sum_exp(of: str) -> torch.Tensor:
        kept = l if rounding.accumulator else sums[of]
        return (m + torch.log(kept)).masked_fill(kept == 0, -math.inf)[..., 0]

    lse, row_lse = log_sum_exp(rounding.lse), log_sum_exp(rounding.weights)
    delta = (dout * (out.float() + low)).sum(-1)
    less = delta if dlse is None else (delta - dlse).masked_fill(lse == -math.inf, 0.0)
    p_back = torch.exp(s - row_lse.masked_fill(row_lse == -math.inf, 0.0)[..., None])
    used, dp = p_back, torch.matmul(dout, v.mT)
    if keep is not None:
        used, dp = p_back * keep, dp * keep * gain
    exact_ds = p_back * (dp - less[..., None]) * slope
    ds = maybe(exact_ds, rounding.dscores)
    final = torch.float32 if wide_gradients else rounding.dtype
    dq = torch.matmul(ds, k) * scale
    if rounding.projection:
        # With a sink and dLSE the exact sum is dLSE less the sink's own dS, -P_sink D'.
        target = torch.zeros_like(less) if dlse is None else dlse
        if sink is not None:
            target = target + torch.exp(sink.view(1, -1, 1) - row_lse) * less
        excess = torch.where(lse == -math.inf, 0.0, ds.sum(-1) - target)
        if rounding.projection == "key":
            carrier = k.gather(
                -2, p_back.argmax(-1)[..., None].expand(*p_back.shape[:-1], k.shape[-1])
            )
        else:
            weights = maybe(p_back, rounding.probabilities)
            whole = weights.sum(-1, keepdim=True)
            if sink is not None:
                whole = whole + torch.exp(sink.view(1, -1, 1) - row_lse)[..., None]
            carrier = torch.matmul(weights, k) / whole.masked_fill(whole == 0, 1.0)
        dq = dq - excess[..., None] * carrier * scale
        ds = maybe(p_back * (dp - (less + excess)[..., None]) * slope, rounding.dscores)
    dk = torch.matmul(ds.mT, q) * scale
    dv = torch.matmul(maybe(used, rounding.probabilities).mT, dout) * gain
    return Emulation(out, low, lse, delta, exact_ds, dq.to(final), dk.to(final), dv.to(final))

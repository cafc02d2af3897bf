"""Our own backward with operands in FP16, for tensors of either 16-bit type: "own_fp16".

P and dS are rounded where they multiply: to 8 bits in BF16, to 11 in FP16, at one speed. Of heads
that have begun to diverge, dK and dV show that rounding as no other part of a gradient does
(research/projection.py, part "captures"). FP16 has no exponents for what BF16 tensors may hold, so
powers of two, one a key/value head and tensor, bring q, k, v and dO into its range: their copies
are exact but for what is 2^-24 of the largest number of their head. Sums are float32, and the same
powers come out of them before they are rounded to the gradients' type.

The power of q is the inverse of that of k, since kernels are told the scale of logits by the host.
Where q and k of a head have no such pair (logits beyond 2^28, or all below 2^-16), or a tensor is
not finite, is known on the device only: our own backward in the tensors' type is launched too, for
sequences that are empty where FP16 serves, as `vendors` does.

Shape legend: as in `api`; g key/value heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from stable_attention import dispatch
from stable_attention.problem import Extras, Problem
from stable_attention.triton.backward import backward as portable

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

TOP = 15
"""|dP| and |D'| are brought below 2^(TOP - 1) and dS below 2^TOP; FP16 ends at 2^16."""
LEAST, MOST = -8, 14
"""Exponents between which the largest number of a head must come to lie in FP16."""
FAR = 60
"""Largest power; float32 holds the product of two."""
NONE = -4 * FAR
"""The exponent of zero."""


class _Powers(NamedTuple):
    """Exponents, int32 [g]: a tensor is multiplied by 2 to that."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    ds: torch.Tensor
    """Of dP, D' and dS."""
    served: torch.Tensor
    """Bool scalar: FP16 holds every head."""


def _largest(x: torch.Tensor, axis: int, groups: int) -> torch.Tensor:
    """Largest magnitude of each of ``groups`` runs of heads, which lie along ``axis``, float32."""
    others = [i for i in range(x.dim()) if i != axis]
    found = torch.linalg.vector_norm(x, ord=math.inf, dim=others).float()
    return found.view(groups, -1).amax(1)


def _powers(
    problem: Problem, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    rows: torch.Tensor,
) -> _Powers:  # fmt: skip
    """rows: D', [b, h, sq] or [h, tq]."""
    axis, g = problem.layout.index("h"), problem.kv_heads
    found = torch.stack(
        [*(_largest(x, axis, g) for x in (q, k, v, dout)), _largest(rows, rows.dim() - 2, g)]
    )
    exponents = torch.where(found == 0, NONE, torch.frexp(found).exponent)
    of_q, of_k, of_v, of_dout, of_rows = exponents.unbind()
    # A tensor of zeros takes any power.
    of_v = torch.where(of_v == NONE, 0, of_v)
    of_q, of_k = (
        torch.where(x == NONE, torch.where(y == NONE, 0, -y), x)
        for x, y in ((of_q, of_k), (of_k, of_q))
    )
    apart = (of_k - of_q) >> 1
    # |dP| is at most dv times the product of the largest; dropout lifts it.
    room = math.ceil(math.log2(problem.dv / (1 - problem.dropout_p)))
    bound = torch.maximum(of_v + of_dout + room, of_rows)
    ds = TOP - 1 - torch.where(bound < NONE // 2, 0, bound)
    of_dout = torch.where(of_dout == NONE, 0, of_dout + ds + of_v)
    inside = torch.stack([of_q + apart, of_k - apart, of_dout])
    powers = torch.stack([apart, of_v, ds])
    served = found.isfinite().all() & (powers.abs() <= FAR).all()
    served &= ((inside >= LEAST) & (inside <= MOST)).all()
    return _Powers(apart, -apart, -of_v, ds + of_v, ds, served)


def _two_to(power: torch.Tensor) -> torch.Tensor:
    """2 to an int32 power, exactly."""
    return (power.clamp(-126, 127) + 127).bitwise_left_shift(23).view(torch.float32)


def _times(x: torch.Tensor, power: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    """x by 2 to a power a run of its heads, contiguous, rounded once."""
    each = _two_to(power).repeat_interleave(x.shape[axis] // power.numel())
    size = [1] * x.dim()
    size[axis] = -1
    into = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.mul(x, each.view(size), out=into)


def backward(
    problem: Problem,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lse: torch.Tensor,
    delta: torch.Tensor,
    extras: Extras,
) -> Gradients:
    """(dQ, dK, dV) as `triton.backward.backward`, whose arguments these are; delta is corrected in
    place by a projecting stabilizer, as there."""
    axis, half, single = problem.layout.index("h"), torch.float16, torch.float32
    planes = delta.dim() > (2 if problem.varlen else 3)
    rows = delta[0] if planes else delta
    if problem.varlen:  # tokens of no sequence have any D', and no LSE
        rows = torch.where((lse[0] if problem.planes > 1 else lse).isneginf(), 0.0, rows)
    p = _powers(problem, dout, q, k, v, rows)
    copies = [
        _times(x, power, axis, half) for x, power in ((dout, p.dout), (q, p.q), (k, p.k), (v, p.v))
    ]
    scaled = _times(delta, p.ds, delta.dim() - 2, single)
    dq, dk, dv = (torch.zeros(x.shape, dtype=single, device=x.device) for x in (q, k, v))
    # Of the wider head dims the kernels of sm_90 add nothing up.
    own = dispatch.select(problem, q.device).backward if problem.d <= 128 else portable
    own(problem, *copies, lse=lse, delta=scaled, extras=extras, accumulators=(dq, dk, dv))
    powers = (-p.ds - p.k, -p.ds - p.q, -p.dout)
    dq, dk, dv = (_times(x, n, axis, q.dtype) for x, n in zip((dq, dk, dv), powers, strict=True))
    portable(
        problem, dout, q, k, v,
        lse=lse, delta=delta, extras=_empty_if(problem, extras, p.served), gradients=(dq, dk, dv),
    )  # fmt: skip
    if planes:
        corrected = _times(scaled[0], -p.ds, delta.dim() - 3, single)
        delta[0] = torch.where(p.served, corrected, delta[0])
    return dq, dk, dv


def _empty_if(problem: Problem, extras: Extras, served: torch.Tensor) -> Extras:
    """The call's ``extras``, its sequences without rows and keys where it is served."""
    asked = (~served).int()
    if problem.varlen:
        cu_q, cu_k, start_q, start_k, _, _ = extras.pointers()
        assert cu_q is not None and cu_k is not None
        return extras._replace(
            cu_q=cu_q * asked, cu_k=cu_k * asked, start_q=start_q, start_k=start_k
        )
    steps = torch.arange(problem.batch + 1, dtype=torch.int32, device=served.device) * asked
    zeros = torch.zeros_like(steps)
    return extras._replace(
        cu_q=steps * problem.sq, cu_k=steps * problem.sk, start_q=zeros, start_k=zeros
    )


__all__ = ["backward"]

"""Our own backward with operands in FP16, for BF16 tensors: "own_fp16".

P and dS are rounded where they multiply: to 8 bits in BF16, to 11 in FP16, at one speed. Of heads
that have begun to diverge, dK and dV show that rounding as no other part of a gradient does
(research/projection.py, part "captures"). FP16 has no exponents for what BF16 tensors may hold, so
powers of two, one a key/value head and tensor, bring q, k, v and dO into its range: their copies
are exact but for what is 2^-24 of the largest number of their head. Sums are float32 and gradients
BF16, which has room for whatever powers are in them: they come out again without a rounding.

The power of q is the inverse of that of k, since kernels are told the scale of logits by the host.
Where q and k of a head have no such pair (logits beyond 2^28, or all below 2^-16), or a tensor is
not finite, is known on the device only: our own backward in the tensors' type is launched too, for
sequences that are empty where FP16 serves, as `vendors` does.

Shape legend: as in `api`; g key/value heads.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from stable_attention import dispatch
from stable_attention.problem import Extras, Problem
from stable_attention.triton.backward import backward as portable
from stable_attention.triton.launches import Arguments, launch
from stable_attention.triton.results import new_gradients

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

TOP = tl.constexpr(15)
"""|dP| and |D'| are brought below 2^(TOP - 1) and dS below 2^TOP; FP16 ends at 2^16."""
LEAST, MOST = tl.constexpr(-8), tl.constexpr(14)
"""Exponents between which the largest number of a head must come to lie in FP16."""
FAR = tl.constexpr(60)
"""Largest power; float32 holds the product of two."""
NONE = tl.constexpr(-4 * 60)
"""The exponent of zero."""


@triton.jit
def _exponent(x):
    """The least e with x < 2^e, of normal numbers from 0 on."""
    return tl.where(x == 0, NONE, (x.to(tl.int32, bitcast=True) >> 23) - 126)


@triton.jit
def _two_to(power):
    power = tl.minimum(tl.maximum(power, -126), 127)
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=("g", "room", "batch", "sq", "sk", "step"))
def powers_kernel(
    largest_ptr, of_queries_ptr, of_keys_ptr, ends_ptr, g, room, batch, sq, sk, step,
    GROUP: tl.constexpr, BG: tl.constexpr, BGROUP: tl.constexpr,
):  # fmt: skip
    """Powers of two of every head, and where sequences end that our own backward has to serve.

    largest_ptr: of q, dO and D' [h], of k and v [g]. Writes factors of q, dO, dS and dQ [4, h], of
    k, v, dK and dV [4, g].
    """
    h = g * GROUP
    head = tl.arange(0, BG)
    is_head = head < g
    member = tl.arange(0, BGROUP)[None, :]
    query = head[:, None] * GROUP + member
    is_query = is_head[:, None] & (member < GROUP)
    of_q = tl.load(largest_ptr + query, mask=is_query, other=0.0)
    of_dout = tl.load(largest_ptr + h + query, mask=is_query, other=0.0)
    of_rows = tl.load(largest_ptr + 2 * h + query, mask=is_query, other=0.0)
    of_k = tl.load(largest_ptr + 3 * h + head, mask=is_head, other=0.0)
    of_v = tl.load(largest_ptr + 3 * h + g + head, mask=is_head, other=0.0)
    # Not so of NaN.
    finite = (of_q < float("inf")) & (of_dout < float("inf")) & (of_rows < float("inf"))
    served = tl.min(finite.to(tl.int32), 1) > 0
    served = served & (of_k < float("inf")) & (of_v < float("inf"))
    of_q = _exponent(tl.max(of_q, 1))
    of_dout = _exponent(tl.max(of_dout, 1))
    of_rows = _exponent(tl.max(of_rows, 1))
    of_k = _exponent(of_k)
    of_v = _exponent(of_v)
    # A tensor of zeros takes any power.
    of_v = tl.where(of_v == NONE, 0, of_v)
    any_q = of_q == NONE
    any_k = of_k == NONE
    of_q = tl.where(any_q, tl.where(any_k, 0, -of_k), of_q)
    of_k = tl.where(any_k, -of_q, of_k)
    apart = (of_k - of_q) >> 1
    bound = tl.maximum(of_v + of_dout + room, of_rows)
    ds = TOP - 1 - tl.where(bound < NONE // 2, 0, bound)
    inside = tl.where(of_dout == NONE, 0, of_dout + ds + of_v)
    served = served & (of_q + apart >= LEAST) & (of_q + apart <= MOST)
    served = served & (of_k - apart >= LEAST) & (of_k - apart <= MOST)
    served = served & (inside >= LEAST) & (inside <= MOST)
    served = served & (tl.abs(apart) <= FAR) & (tl.abs(of_v) <= FAR) & (tl.abs(ds) <= FAR)
    each = tl.zeros([BG, BGROUP], tl.int32)
    tl.store(of_queries_ptr + query, _two_to(apart[:, None] + each), mask=is_query)
    tl.store(of_queries_ptr + h + query, _two_to((ds + of_v)[:, None] + each), mask=is_query)
    tl.store(of_queries_ptr + 2 * h + query, _two_to(ds[:, None] + each), mask=is_query)
    tl.store(of_queries_ptr + 3 * h + query, _two_to((apart - ds)[:, None] + each), mask=is_query)
    tl.store(of_keys_ptr + head, _two_to(-apart), mask=is_head)
    tl.store(of_keys_ptr + g + head, _two_to(-of_v), mask=is_head)
    tl.store(of_keys_ptr + 2 * g + head, _two_to(-ds - apart), mask=is_head)
    tl.store(of_keys_ptr + 3 * g + head, _two_to(-ds - of_v), mask=is_head)
    asked = 1 - tl.min((served | (head >= g)).to(tl.int32), 0)
    for i in range(0, batch + 1):
        tl.store(ends_ptr + i, i * sq * asked)
        tl.store(ends_ptr + step + i, i * sk * asked)
        tl.store(ends_ptr + 2 * step + i, 0)
    tl.store(ends_ptr + 3 * step, asked)


def _arguments(problem: Problem, *tensors: torch.Tensor) -> Arguments:
    # |dP| is at most dv times the product of the largest; dropout lifts it.
    room = math.ceil(math.log2(problem.dv / (1 - problem.dropout_p)))
    positional = (
        *tensors, problem.kv_heads, room, problem.batch, problem.sq, problem.sk,
        tensors[-1].stride(0),
    )  # fmt: skip
    named: dict[str, object] = {
        "GROUP": problem.group, "BG": triton.next_power_of_2(problem.kv_heads),
        "BGROUP": triton.next_power_of_2(problem.group), "num_warps": 4,
    }  # fmt: skip
    return (1,), positional, named


def _largest(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Largest magnitude of each head, which lie along ``axis``."""
    others = [i for i in range(x.dim()) if i != axis]
    return torch.linalg.vector_norm(x, ord=math.inf, dim=others)


def _powers(
    problem: Problem, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `powers_kernel` writes; rows: D', [b, h, sq] or [h, tq].

    The last is cu_seqlens_q and cu_seqlens_k of what our own backward has to serve, zeros, and 1 if
    that is anything.
    """
    axis = problem.layout.index("h")
    found = [_largest(x, axis) for x in (q, dout)]
    found += [_largest(rows, rows.dim() - 2), _largest(k, axis), _largest(v, axis)]
    new = functools.partial(torch.empty, device=q.device)
    of_queries = new((4, problem.heads), dtype=torch.float32)
    of_keys = new((4, problem.kv_heads), dtype=torch.float32)
    ends = new((4, (problem.batch // 4 + 1) * 4), dtype=torch.int32)
    launch(
        powers_kernel,
        (problem,),
        (torch.cat([x.float() for x in found]), of_queries, of_keys, ends),
        functools.partial(_arguments, problem),
    )
    return of_queries, of_keys, ends


def _times(x: torch.Tensor, factor: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    """x by a power of two a head, contiguous, rounded once."""
    into = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.mul(x, _along(factor, x, axis), out=into)


def _along(factor: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    size = [1] * x.dim()
    size[axis] = -1
    return factor.view(size)


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
    axis, half = problem.layout.index("h"), torch.float16
    planes = delta.dim() > (2 if problem.varlen else 3)
    rows = delta[0] if planes else delta
    if problem.varlen:  # tokens of no sequence have any D', and no LSE
        rows = torch.where((lse[0] if problem.planes > 1 else lse).isneginf(), 0.0, rows)
    of_queries, of_keys, ends = _powers(problem, dout, q, k, v, rows)
    copies = [
        _times(x, factor, axis, half)
        for x, factor in (
            (dout, of_queries[1]), (q, of_queries[0]), (k, of_keys[0]), (v, of_keys[1]),
        )
    ]  # fmt: skip
    scaled = _times(delta, of_queries[2], delta.dim() - 2, torch.float32)
    dq, dk, dv = gradients = new_gradients(problem, q, k, v)[1]
    # For the wider head dims the kernels of sm_90 store dQ in the type of their operands.
    own = dispatch.select(problem, q.device).backward if problem.d <= 128 else portable
    own(problem, *copies, lse=lse, delta=scaled, extras=extras, gradients=gradients)
    for x, factor in (dq, of_queries[3]), (dk, of_keys[2]), (dv, of_keys[3]):
        x.mul_(_along(factor, x, axis))
    portable(
        problem, dout, q, k, v,
        lse=lse, delta=delta, extras=_asked(problem, extras, ends), gradients=gradients,
    )  # fmt: skip
    if planes:
        corrected = scaled[0] / of_queries[2][:, None]
        delta[0] = torch.where(ends[3, 0] == 0, corrected, delta[0])
    return dq, dk, dv


def _asked(problem: Problem, extras: Extras, ends: torch.Tensor) -> Extras:
    """The call's ``extras``, its sequences without rows and keys where FP16 serves it."""
    if problem.varlen:
        cu_q, cu_k, start_q, start_k, _, _ = extras.pointers()
        assert cu_q is not None and cu_k is not None
        flag = ends[3, 0]
        return extras._replace(cu_q=cu_q * flag, cu_k=cu_k * flag, start_q=start_q, start_k=start_k)
    n = problem.batch + 1
    return extras._replace(cu_q=ends[0, :n], cu_k=ends[1, :n], start_q=ends[2], start_k=ends[2])


__all__ = ["backward"]

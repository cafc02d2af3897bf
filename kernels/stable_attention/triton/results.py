"""The tensors that the passes leave.

Shape legend: as in `forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stable_attention.layouts import shape
from stable_attention.problem import Problem
from stable_attention.stabilizers import KNOWN, LOW_DTYPES


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What the forward pass leaves: see `stable_attention.api.stable_attention`."""

    out: torch.Tensor
    lse: torch.Tensor
    """From the sum of the unrounded P; empty where nobody asked for it or needs it."""
    row_lse: torch.Tensor
    """From the sum of the rounded P where O is divided by that, for P of the backward; else empty.
    Of a projecting stabilizer [2, ...], `numerics.log_sum_exp_planes` of the sum that divides O.
    """
    low: torch.Tensor
    max_logits: torch.Tensor


def allocate(
    problem: Problem,
    device: torch.device,
    *,
    out_dtype: torch.dtype,
    with_max_logits: bool,
    with_lse: bool,
) -> ForwardResult:
    """Output tensors; packed ones are prefilled, since tokens may belong to no sequence.

    Partial outputs (float32) are merged by LSE, and their backward uses the LSE of all parts.
    """
    stabilizer = KNOWN[problem.stabilizer]
    full = shape(
        problem.layout,
        batch=problem.batch,
        length=problem.tq if problem.varlen else problem.sq,
        heads=problem.heads,
        d=problem.dv,
    )
    keeps = stabilizer.keeps_o_lo and out_dtype != torch.float32
    low_dtype = LOW_DTYPES[problem.o_lo]
    low_shape = full if keeps else (0,)
    max_logits = torch.empty(0, dtype=torch.float32, device=device)
    if with_max_logits:
        max_logits = torch.full((problem.heads,), -torch.inf, dtype=torch.float32, device=device)
    whole = out_dtype != torch.float32
    rounded = stabilizer.rounded_normalizer and whole
    own_rows = (rounded or stabilizer.planes > 1) and whole
    rows = (problem.heads, problem.tq)
    if not problem.varlen:
        rows = (problem.batch, problem.heads, problem.sq)  # type: ignore[assignment]

    def prefilled(size: tuple[int, ...], value: float, dtype: torch.dtype) -> torch.Tensor:
        if problem.varlen:
            return torch.full(size, value, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype, device=device)

    def lse(wanted: bool, planes: int = 1) -> torch.Tensor:
        size = rows if planes == 1 else (planes, *rows)
        return prefilled(size if wanted else (0,), -torch.inf, torch.float32)

    return ForwardResult(
        prefilled(full, 0, out_dtype),
        lse(with_lse or not rounded),
        lse(own_rows, stabilizer.planes),
        prefilled(low_shape, 0, low_dtype),
        max_logits,
    )


def new_gradients(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, together: bool = False
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(None, contiguous (dQ, dK, dV)); ``together``: (a contiguous buffer, its pieces).

    Packed tensors may hold tokens of no sequence, whose gradient is 0; so is that of keys without
    a query head.
    """
    new = torch.zeros if problem.varlen or problem.heads == 0 else torch.empty
    if not together:
        dq, dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        return None, (dq, dk, dv)
    widths = [x.shape[-1] for x in (q, k, v)]
    whole = new((*q.shape[:-1], sum(widths)), dtype=q.dtype, device=q.device)
    dq, dk, dv = whole.split_with_sizes(widths, -1)
    return whole, (dq, dk, dv)

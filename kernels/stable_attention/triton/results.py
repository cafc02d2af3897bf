"""The tensors that the forward pass leaves.

Shape legend: as in `forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stable_attention.problem import Problem, shape
from stable_attention.stabilizers import KNOWN, LOW_DTYPES


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What the forward pass leaves: see `stable_attention.api.stable_attention`."""

    out: torch.Tensor
    lse: torch.Tensor
    """From the sum of the unrounded P; empty where nobody asked for it or needs it."""
    row_lse: torch.Tensor
    """From the sum of the rounded P where O is divided by that, for P of the backward; else empty.
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
    keeps = stabilizer.keeps_residual and out_dtype != torch.float32
    low_dtype = LOW_DTYPES[problem.residual]
    low_shape = full if keeps else (0,)
    max_shape = (problem.heads,) if with_max_logits else (0,)
    max_logits = torch.full(max_shape, -torch.inf, dtype=torch.float32, device=device)
    own_rows = stabilizer.rounded_normalizer and out_dtype != torch.float32
    rows = (problem.heads, problem.tq)
    if not problem.varlen:
        rows = (problem.batch, problem.heads, problem.sq)  # type: ignore[assignment]

    def prefilled(size: tuple[int, ...], value: float, dtype: torch.dtype) -> torch.Tensor:
        if problem.varlen:
            return torch.full(size, value, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype, device=device)

    def lse(wanted: bool) -> torch.Tensor:
        return prefilled(rows if wanted else (0,), -torch.inf, torch.float32)

    return ForwardResult(
        prefilled(full, 0, out_dtype),
        lse(with_lse or not own_rows),
        lse(own_rows),
        prefilled(low_shape, 0, low_dtype),
        max_logits,
    )

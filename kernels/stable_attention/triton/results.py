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
    low: torch.Tensor
    max_logits: torch.Tensor


def allocate(
    problem: Problem, device: torch.device, *, out_dtype: torch.dtype, with_max_logits: bool
) -> ForwardResult:
    """Output tensors; packed ones are prefilled, since tokens may belong to no sequence."""
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
    if problem.varlen:
        return ForwardResult(
            torch.zeros(full, dtype=out_dtype, device=device),
            torch.full((problem.heads, problem.tq), -torch.inf, dtype=torch.float32, device=device),
            torch.zeros(low_shape, dtype=low_dtype, device=device),
            max_logits,
        )
    return ForwardResult(
        torch.empty(full, dtype=out_dtype, device=device),
        torch.empty((problem.batch, problem.heads, problem.sq), dtype=torch.float32, device=device),
        torch.empty(low_shape, dtype=low_dtype, device=device),
        max_logits,
    )

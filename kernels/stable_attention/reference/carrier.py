"""The carrier O (`stable_attention.triton.carrier`) in plain PyTorch, on any device.

Shape legend: as in `api`; everything here has rows before the last dimension.
"""

from __future__ import annotations

import torch

TOLERANCE = 2.0**-21
HALF_STEP = {torch.float16: 2.0**-25, torch.bfloat16: 0.0}
SMALLEST = 2.0**-126


def carrier(dout: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(carrier like dout, bool per row: it has none that is exact).

    Args:
        dout: bf16 or fp16 [..., dv].
        delta: float32 [...], the wanted rowsum(dout * carrier).
    """
    wide = dout.float()
    if dout.dtype == torch.bfloat16:
        wide = torch.where(wide.abs() < SMALLEST, 0.0, wide)
    columns = wide.abs().argsort(dim=-1, descending=True, stable=True)[..., :3]
    carried = torch.zeros_like(wide)
    rest = delta.float()
    for n in range(columns.shape[-1]):
        at = columns[..., n : n + 1]
        g = wide.gather(-1, at).squeeze(-1)
        zero = g == 0
        x = torch.where(zero, rest * 0, rest / torch.where(zero, 1.0, g)).to(dout.dtype).float()
        if n:
            x = torch.where(x.isfinite(), x, 0.0)
        carried.scatter_(-1, at, x.unsqueeze(-1))
        rest = rest - g * x
    largest = wide.gather(-1, columns[..., :1]).squeeze(-1).abs()
    left = delta.abs() * TOLERANCE + SMALLEST + largest * HALF_STEP[dout.dtype]
    return carried.to(dout.dtype), delta.isfinite() & ~(rest.abs() <= left)

"""What the hardware may not describe goes through pointers: it would write past the end of rows."""

from __future__ import annotations

import pytest
import torch

from stable_attention.configs import Tile
from stable_attention.problem import Problem
from stable_attention.triton.descriptors import descriptors
from stable_attention.triton.memory import DENSE, FLAT, POINTERS

TILE = Tile(64, 64, 4, 2, tma=True)


def mode(d: int, dtype: torch.dtype, *, s: int = 1, pad: int = 0) -> int:
    p = Problem(
        layout="bshd", dtype=torch.bfloat16, batch=1, sq=s, sk=s, heads=1, kv_heads=1, d=d, dv=d,
        tq=s, tk=s, scale=1.0,
    )  # fmt: skip
    x = torch.empty((1, s, 1, d + pad), dtype=dtype, device="meta")[..., :d]
    return descriptors(p, TILE, (x, 64))[0]


@pytest.mark.parametrize("d", [8, 24, 40, 72, 104])
def test_int8_rows_that_end_inside_16_bytes(d: int) -> None:
    """One row has no stride to forbid it; the store wrote up to 8 bytes after the tensor."""
    assert mode(d, torch.int8) == POINTERS.value
    assert mode(d, torch.bfloat16) == DENSE.value


def test_whole_tiles_are_flat() -> None:
    for dtype in (torch.int8, torch.bfloat16):
        assert mode(64, dtype, s=5) == FLAT.value
        assert mode(64, dtype, s=5, pad=16) == FLAT.value
    assert mode(64, torch.bfloat16, s=5, pad=4) == POINTERS.value

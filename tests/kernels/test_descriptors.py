"""What the hardware may not describe goes through pointers: it would write past the end of rows."""

from __future__ import annotations

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from stable_attention.configs import Tile
from stable_attention.layouts import dims, shape
from stable_attention.problem import Problem
from stable_attention.triton.descriptors import descriptors
from stable_attention.triton.memory import DENSE, FLAT, POINTERS

TILE = Tile(64, 64, 4, 2, tma=True)


def problem(layout: str, x: torch.Tensor) -> Problem:
    b, s, h, d = dims(x, layout)
    return Problem(
        layout=layout, dtype=torch.bfloat16, batch=b, sq=s, sk=s, heads=h, kv_heads=h, d=d, dv=d,
        tq=b * s, tk=b * s, scale=1.0,
    )  # fmt: skip


def mode(d: int, dtype: torch.dtype, *, s: int = 1, pad: int = 0) -> int:
    x = torch.empty((1, s, 1, d + pad), dtype=dtype, device="meta")[..., :d]
    return descriptors(problem("bshd", x), TILE, (x, 64))[0]


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


@pytest.mark.parametrize("d", [64, 96, 40])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
def test_a_plan_that_is_kept_holds_for_other_addresses(layout: str, d: int) -> None:
    """Of two tensors of one kind the descriptors differ in their address, and in nothing else."""
    size = shape(layout, batch=2, length=24, heads=3, d=d)
    first, second = (torch.randn(size).bfloat16() for _ in range(2))
    p = problem(layout, first)
    (mode, one), (again, other) = (
        descriptors(p, TILE, (x, 64), (None, 64)) for x in (first, second)
    )
    assert mode == again != POINTERS.value
    assert one[2:] == other[2:] == (None, None)
    for a, b in zip(one[:2], other[:2], strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert isinstance(a, TensorDescriptor) and isinstance(b, TensorDescriptor)
        assert a.base.data_ptr() == first.data_ptr() and b.base.data_ptr() == second.data_ptr()
        fresh = TensorDescriptor(first, a.shape, a.strides, a.block_shape)  # checks them
        assert a.__dict__.keys() == fresh.__dict__.keys()
        for name in fresh.__dict__.keys() - {"base"}:
            assert getattr(a, name) == getattr(b, name) == getattr(fresh, name)


def test_kinds_are_told_apart() -> None:
    """Strides, types, rows of a tile and alignment each change what is planned."""
    x = torch.randn(2, 24, 3, 64).bfloat16()
    p = problem("bshd", x)

    def described(y: torch.Tensor, rows: int = 64) -> object:
        mode, (found, _) = descriptors(p, TILE, (y, rows))
        assert mode != POINTERS.value and isinstance(found, TensorDescriptor)
        return found.shape, found.strides, found.block_shape

    wide = torch.randn(2, 24, 3, 80).bfloat16()[..., :64]
    plain = described(x)
    assert described(x) == plain
    assert described(wide) != plain and described(x, 32) != plain
    off = torch.randn(x.numel() + 1).bfloat16()[1:].view(x.shape)
    assert off.data_ptr() % 16 and descriptors(p, TILE, (off, 64)) == (POINTERS.value, (off, None))
    assert descriptors(p, Tile(64, 64, 4, 2), (x, 64)) == (POINTERS.value, (x, None))

"""The carrier O: any backward that reads it for delta = rowsum(dO o O) gets the delta wanted."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE

from stable_attention.reference import carrier as reference
from stable_attention.triton import carrier as kernel

DTYPES = (torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")


def _both(dout: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(kernel's carrier, bool per row: lacking), after kernel and reference have agreed.

    The kernel says of a whole call what the reference says of a row. It may take other columns; the
    products sum to the same.
    """
    expected, lacking = reference.carrier(dout, delta)
    rows, d = dout.reshape(-1, dout.shape[-1]).to(DEVICE), dout.shape[-1]
    into = torch.full_like(rows, 7.0)
    ends = kernel.carrier(
        rows.view(1, 1, -1, d),
        delta.reshape(1, 1, -1).to(DEVICE),
        layout="bhsd",
        into=into.view(1, 1, -1, d),
        sk=11,
    )
    found = into.cpu().view_as(expected)
    assert ((found != 0).sum(-1) <= 3).all()
    sums = _sum(dout, expected)
    largest = dout.float().abs().amax(-1)
    left = 2 * (2**-21 * sums.abs() + 2**-126 + reference.HALF_STEP[dout.dtype] * largest)
    assert ((_sum(dout, found) - sums).abs() <= left)[sums.isfinite()].all()
    assert torch.equal(_sum(dout, found).isfinite(), sums.isfinite())
    offsets = [[0, rows.shape[0], 0, 0], [0, 11, 0, 0], [0] * 4] if lacking.any() else [[0] * 4] * 3
    assert ends.tolist() == offsets
    return found, lacking


def _sum(dout: torch.Tensor, carrier: torch.Tensor) -> torch.Tensor:
    return (dout.float() * carrier.float()).sum(-1)


def _drawn(dtype: torch.dtype, size: float = 1.0, d: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """(dO [70, d] of a size, the delta of an O of ordinary size)."""
    generator = torch.Generator().manual_seed(d)
    dout = (torch.randn(70, d, generator=generator) * size).to(dtype)
    out = torch.randn(70, d, generator=generator)
    return dout, (dout.float() * out).sum(-1)


@pytest.mark.parametrize("d", [8, 64, 96, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_carrier_gives_delta_to_the_rounding_of_its_sum(dtype: torch.dtype, d: int) -> None:
    dout, delta = _drawn(dtype, d=d)
    found, lacking = _both(dout, delta)
    assert not lacking.any()
    torch.testing.assert_close(_sum(dout, found), delta, rtol=2e-7, atol=2**-24)


@pytest.mark.parametrize("size", [1e-8, 1e-20, 1e-30, 1e20])
def test_the_scale_of_gradients_does_not_matter_in_bfloat16(size: float) -> None:
    dout, delta = _drawn(torch.bfloat16, size)
    found, lacking = _both(dout, delta)
    assert not lacking.any()
    assert found.abs().max() < 1e3  # an O of ordinary size
    torch.testing.assert_close(_sum(dout, found), delta, rtol=2e-7, atol=2**-126)


def test_half_precision_is_as_fine_as_its_steps() -> None:
    dout, delta = _drawn(torch.float16, 1e-3)
    found, lacking = _both(dout, delta * 1e-6)
    assert not lacking.any()
    error = (_sum(dout, found) - delta * 1e-6).abs()
    assert (error <= 2**-25 * dout.float().abs().amax(-1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_carry_nothing_and_need_nothing(dtype: torch.dtype) -> None:
    """Delta is 0 there without a gradient of LSE; with one there is no carrier."""
    dout, delta = _drawn(dtype)
    dout[3], delta[3] = 0, 0
    found, lacking = _both(dout, delta)
    assert not lacking.any()
    assert not found[3].any()
    delta[3] = -1e-3
    assert _both(dout, delta)[1].nonzero().tolist() == [[3]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_few_columns_are_lacking_unless_they_are_exact(dtype: torch.dtype) -> None:
    dout = torch.zeros(5, 64).to(dtype)
    dout[:, 7] = -0.5
    dout[3:, 9] = 2.0**-3
    dout[4, 2] = 2.0**-4
    delta = torch.tensor([1.5, 1.0 + 2**-11 + 2**-14, 0.0, 1.0 + 2**-11 + 2**-20, 1 / 3])
    found, lacking = _both(dout, delta)
    # Two FP16 numbers have the 22 bits that two of BF16 lack.
    assert lacking.tolist() == [False, True, False, dtype == torch.bfloat16, False]
    assert ((found != 0) <= (dout != 0)).all()
    error = (_sum(dout, found) - delta).abs()
    assert (error <= 2.0**-8 * delta.abs()).all()  # not worse than 16 bits of O


def test_what_half_precision_cannot_hold_is_said_and_not_clipped() -> None:
    dout = torch.full((2, 16), 1e-6).to(torch.float16)
    found, lacking = _both(dout, torch.tensor([1.0, 1e-6]))
    assert lacking.tolist() == [True, False]
    assert found[0].isinf().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    """It needs no other kernels: their gradients are not finite either."""
    dout = torch.ones(6, 16).to(dtype)
    dout[2:4], dout[4, 3], dout[5, 3] = 0, INF, NAN
    delta = torch.tensor([INF, NAN, INF, NAN, NAN, NAN])
    found, lacking = _both(dout, delta)
    assert not lacking.any()
    assert not _sum(dout, found).isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_gradient_with_a_finite_delta_is_lacking(dtype: torch.dtype) -> None:
    dout = torch.ones(2, 16).to(dtype)
    dout[1, 3] = INF
    assert reference.carrier(dout, torch.ones(2))[1].tolist() == [False, True]


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
def test_layouts_and_strides(layout: str) -> None:
    shape = {"bshd": (2, 37, 3, 24), "sbhd": (37, 2, 3, 24), "bhsd": (2, 3, 37, 24)}.get(
        layout, (37, 3, 24)
    )
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(*shape[:-1], 40, generator=generator).to(torch.bfloat16)
    dout = wide[..., 8:32]
    order = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2)}.get(layout, (1, 0))
    rows = dout.permute(*order, len(order)).contiguous()
    delta = rows.float().sum(-1)
    into = torch.empty_like(wide.to(DEVICE))[..., 8:32]
    kernel.carrier(dout.to(DEVICE), delta.to(DEVICE), layout=layout, into=into)
    found = into.cpu().permute(*order, len(order))
    torch.testing.assert_close(_sum(rows, found), delta, rtol=2e-7, atol=2**-24)

"""How long tensor cores may accumulate: emulated, beside `numerics.truncation`."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from regimes import make_regime

from stable_attention.hopper import softmax
from stable_attention.hopper.plan import SEGMENT
from stable_attention.hopper.shapes import FORWARD
from stable_attention.numerics import truncation

MAX_MEAN = 1e-5
"""The gate of benchmarks/accuracy.py."""
KEYS = 32_768


def truncated(x: torch.Tensor) -> torch.Tensor:
    """float64 x cut to the 24 digits of float32, towards zero."""
    digits, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(torch.ldexp(digits, torch.tensor(24))), exponent - 24)


def output(p: torch.Tensor, v: torch.Tensor, segment: int, block: int) -> torch.Tensor:
    """P V over the sum of P, in the order of the kernel of sm_90: blocks from the last, their later
    half first, 16 keys an addition; segments join rounded to nearest."""
    v = torch.cat([v, v.new_ones(len(v), 1)], 1)
    total = torch.zeros(len(p), v.shape[1], dtype=torch.float64)
    part, keys = torch.zeros_like(total), 0
    for first in (
        b + h + i
        for b in range(KEYS - block, -1, -block)
        for h in (block // 2, 0)
        for i in range(0, block // 2, 16)
    ):
        if keys == segment:
            total, part, keys = (total + part).float().double(), torch.zeros_like(total), 0
        part = truncated(part + p[:, first : first + 16] @ v[first : first + 16])
        keys += 16
    total = (total + part).float().double()
    return total[:, :-1] / total[:, -1:]


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize(("regime", "first_seen"), [("diffuse", False), ("near8w", True)])
def test_a_segment_keeps_the_mean_error_of_delta(regime: str, first_seen: bool, d: int) -> None:
    """The last rows of 32k keys, whose sinks come first or, what is worst, last in memory."""
    q, k, v, dout = (x[0].double() for x in make_regime(regime, heads=1, n=KEYS, d=d))
    if first_seen:
        k, v = k.roll(-1, 0), v.roll(-1, 0)
    q, dout = q[-8:], dout[-8:]
    s = q @ k.T * d**-0.5
    p = (s - s.amax(1, keepdim=True)).exp().bfloat16().double()
    exact = p @ v / p.sum(1, keepdim=True)
    rms = (dout * exact).sum(1).square().mean().sqrt()

    def mean(segment: int) -> float:
        return float(
            ((dout * (output(p, v, segment, FORWARD[d, d].bn) - exact)).sum(1) / rms).mean().abs()
        )

    assert mean(SEGMENT) <= truncation(SEGMENT) <= MAX_MEAN < mean(0)


class Registers(torch.Tensor):
    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


class Memory:
    """What `softmax.keep` and `add_kept` see of a pointer."""

    def __init__(self, size: int) -> None:
        self.numbers = torch.full((size,), float("nan"))

    def __add__(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.numbers, offsets.long()


def on_tensors(name: str) -> FunctionType:
    """A function of `softmax` whose tensors are torch's."""
    language = SimpleNamespace(
        constexpr=int, SliceLayout=lambda *_: None, arange=lambda a, b, _: torch.arange(a, b),
        reshape=torch.reshape, permute=torch.permute, expand_dims=torch.unsqueeze,
        convert_layout=lambda x, _, assert_trivial=False: x,
        load=lambda place: place[0][place[1]].as_subclass(Registers),
        store=lambda place, x: place[0].index_put_((place[1],), x),
    )  # fmt: skip
    space: dict[str, Any] = {"gl": language, "pinned": lambda x: x}
    space |= {x: lambda *a, x=x: on_tensors(x)(*a) for x in ("_own_numbers", "_own_offsets")}
    return FunctionType(getattr(softmax, name).fn.__code__, space)


@pytest.mark.parametrize("columns", [128, 256])
def test_each_thread_finds_its_total_again(columns: int) -> None:
    shape = 64, columns
    row, column = torch.meshgrid(torch.arange(64), torch.arange(columns), indexing="ij")
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2  # of a product in registers
    memory = Memory(64 * columns)
    on_tensors("keep")(memory, thread.float().as_subclass(Registers))
    # Fours of a thread, those of all threads side by side.
    assert memory.numbers.equal(torch.arange(128.0).repeat_interleave(4).repeat(columns // 8))
    total, part, factor = torch.randn(shape), torch.randn(shape), torch.rand(64)
    on_tensors("keep")(memory, total.as_subclass(Registers))
    found = on_tensors("add_kept")(memory, part.as_subclass(Registers), factor)
    assert found.as_subclass(torch.Tensor).equal(total * factor[:, None] + part)

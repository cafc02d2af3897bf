"""The kernel set of sm_90 where it differs from the portable one, whose tests it passes as well."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attention_cases import DEVICE

from stable_attention import chunks, configs, dispatch, stable_attention
from stable_attention.describe import describe
from stable_attention.hopper import launch as hopper
from stable_attention.problem import Options
from stable_attention.triton import forward as portable_forward
from stable_attention.triton.probabilities import scores_and_mask
from stable_attention.triton.results import ForwardResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or configs.arch_of(torch.device("cuda", 0)) != "sm90",
        reason="needs an sm_90 GPU",
    ),
]


SAME = 1.5
"""Of errors that have the same roundings. The largest P of a block of keys is exactly 1, not
rounded, and the portable kernels have blocks of 64 keys where these have 128."""


def gradients(
    tensors: list[torch.Tensor], *, causal: bool, layout: str = "bhsd"
) -> tuple[torch.Tensor, ...]:
    """dQ, dK, dV for (q, k, v, dO)."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = stable_attention(q, k, v, layout=layout, causal=causal, stabilizer="compensated")
    return torch.autograd.grad(out, (q, k, v), tensors[3])


def random_tensors(
    b: int, h: int, hk: int, s: int, d: int, dv: int | None = None
) -> list[torch.Tensor]:
    sizes = ((h, d), (hk, d), (hk, dv or d), (h, dv or d))
    return [torch.randn(b, heads, s, n, device=DEVICE, dtype=torch.bfloat16) for heads, n in sizes]


def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [row for row in dispatch.KERNEL_SETS if row.name == "triton"]
    monkeypatch.setattr(dispatch, "KERNEL_SETS", sets)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(
    "shape", [(2, 4, 4, 1), (1, 6, 2, 127), (3, 4, 1, 129), (1, 8, 8, 1000), (5, 8, 4, 1100)]
)
def test_errors_are_those_of_the_portable_kernels(
    shape: tuple[int, int, int, int], d: int, dv: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both round P and dS at the same places; the last shape has several items a processor."""
    tensors = random_tensors(*shape, d, dv)
    ours = gradients(tensors, causal=causal)
    portable(monkeypatch)
    theirs = gradients(tensors, causal=causal)
    wide = [x.double() for x in tensors]
    q, k, v = (x.requires_grad_() for x in wide[:3])
    group = shape[1] // shape[2]
    s = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * d**-0.5
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=DEVICE).triu(1)
        s = s.masked_fill(hidden, -torch.inf)
    out = s.softmax(-1) @ v.repeat_interleave(group, 1)
    for a, b, exact in zip(ours, theirs, torch.autograd.grad(out, (q, k, v), wide[3]), strict=True):
        floor = 2.0**-16 * exact.abs().max()
        assert (a - exact).norm() <= SAME * (b - exact).norm() + floor


def exact_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(O, LSE, largest logits) in float64; q [b, h, s, d]."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=DEVICE).triu(1)
        s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[None, :, None])
    out = (s - lse[..., None]).exp() @ v.repeat_interleave(group, 1)
    return out, lse, s.amax((0, 2, 3))


FORWARD_SHAPES = [
    # b, h, hk, sq, sk
    (2, 4, 4, 1, 1), (1, 6, 2, 127, 127), (3, 4, 1, 129, 129), (2, 2, 2, 64, 1000),
    (1, 2, 1, 3000, 3000), (40, 8, 4, 520, 520), (1, 2, 2, 9000, 9000),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "stabilizer", ["none", "compensated", "low_order_o", "consistent_sum", "compensated_projected"]
)
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("shape", "causal"),
    [(x, causal) for x in FORWARD_SHAPES for causal in (True, False) if x[3] == x[4] or not causal],
)
def test_the_forward_pass_has_the_errors_of_the_portable_one(
    shape: tuple[int, ...], causal: bool, d: int, stabilizer: str, dtype: torch.dtype
) -> None:
    """O with its low-order part, both LSE and the largest logits, with sinks; poisoned memory."""
    b, h, hk, sq, sk = shape
    q, k, v = (
        torch.randn(b, n, s, d, device=DEVICE, dtype=dtype)
        for n, s in ((h, sq), (hk, sk), (hk, sk))
    )
    q = 3 * q
    sinks = torch.linspace(-3, 6, h, device=DEVICE)
    problem, extras = describe(
        q, k, v, Options.of(layout="bhsd", causal=causal, stabilizer=stabilizer), sinks=sinks
    )
    wanted = exact_forward(q, k, v, sinks, causal)

    def results(forward: Callable[..., ForwardResult]) -> ForwardResult:
        poison = torch.full((b * h * sq * d * 4,), torch.nan, device=DEVICE)
        del poison  # whose memory the outputs get
        return forward(problem, q, k, v, extras=extras, with_max_logits=True)

    def errors(x: ForwardResult) -> list[torch.Tensor]:
        whole = x.out.double() + (x.low.double() if x.low.numel() else 0.0)
        found = [(x.out, wanted[0]), (whole, wanted[0]), (x.lse, wanted[1])]
        rows = x.row_lse
        if rows.dim() > x.lse.dim():  # two planes, in log2 units
            rows = (rows[0].double() + rows[1].double()) * math.log(2)
        found += [(rows, wanted[1])] * bool(rows.numel()) + [(x.max_logits, wanted[2])]
        return [(a.double() - exact).norm() / exact.norm() for a, exact in found]

    ours = results(hopper.forward)
    for error, theirs in zip(errors(ours), errors(results(portable_forward.forward)), strict=True):
        assert error <= SAME * theirs + 2.0**-22
    for _ in range(3):
        again = results(hopper.forward)
        for a, x in zip(vars_of(ours), vars_of(again), strict=True):
            assert torch.equal(a, x)


def vars_of(x: ForwardResult) -> tuple[torch.Tensor, ...]:
    return x.out, x.lse, x.row_lse, x.low, x.max_logits


@pytest.mark.parametrize(
    ("d", "dv", "causal"),
    [(128, 128, True), (128, 128, False), (64, 64, True), (256, 256, True), (192, 128, True)],
)
def test_batches_of_one_and_of_many_give_the_same_bits(d: int, dv: int, causal: bool) -> None:
    """The order of the additions to dQ does not depend on how much else there is to do."""
    tensors = random_tensors(60, 2, 2, 515, d, dv)
    many = gradients(tensors, causal=causal)
    for i in (0, 31, 59):
        one = gradients([x[i : i + 1] for x in tensors], causal=causal)
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(many, one, strict=True))


def test_two_streams_at_once_neither_block_nor_disturb_each_other() -> None:
    """Each fills the GPU, so programs of both wait for room while others wait for their turn."""
    cases = [random_tensors(8, 16, 16, 2048, 64), random_tensors(4, 16, 16, 2048, 128)]
    alone = [gradients(x, causal=False) for x in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    for _ in range(20):
        for stream, tensors, results in zip(streams, cases, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(gradients(tensors, causal=False))
    torch.cuda.synchronize()
    for expected, results in zip(alone, found, strict=True):
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))


def test_a_captured_graph_replays_to_the_same_bits() -> None:
    tensors = random_tensors(2, 4, 2, 777, 128)
    for _ in range(3):
        expected = gradients(tensors, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(tensors, causal=True)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))


def test_strides_that_no_descriptor_describes_take_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = random_tensors(1, 2, 2, 300, 64)
    odd = torch.randn(1, 2, 300, 68, device=DEVICE, dtype=torch.bfloat16)[..., :64]
    mixed = [odd, *tensors[1:]]
    ours = gradients(mixed, causal=True)
    portable(monkeypatch)
    theirs = gradients(mixed, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("b", "h", "hk", "sq", "sk", "offset"),
    [(2, 4, 2, 320, 448, 0), (1, 2, 2, 448, 320, 7), (3, 2, 1, 130, 200, 1)],
)
def test_dropout_drops_what_the_portable_forward_drops(
    b: int, h: int, hk: int, sq: int, sk: int, offset: int, d: int
) -> None:
    """With equal scores dV of a one-hot dO is 0 exactly where a weight is dropped."""
    q, g = (torch.zeros(b, h, sq, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(b, hk, sk, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    options = Options.of(
        layout="bhsd", dropout_p=0.37, batch_offset=offset, head_offset=offset, stabilizer="none"
    )
    problem, extras = describe(q, k, v, options, dropout_seed=123456789012345678)
    keep = scores_and_mask(problem, q, k, extras)[1].bool()
    lse = portable_forward.forward(problem, q, k, v, extras=extras).lse
    for first in range(0, sq, d):
        n = min(d, sq - first)
        for one in range(h // hk):  # dV adds up the query heads of a group
            g.zero_()
            here = slice(one, None, h // hk)
            g[:, here, first : first + n] = torch.eye(n, d, device=DEVICE, dtype=torch.bfloat16)
            dv = hopper.backward(
                problem, g, q, k, v, lse=lse, delta=torch.zeros_like(lse), extras=extras
            )[2]
            wanted = keep[:, here, first : first + n].transpose(2, 3)
            assert torch.equal(dv[..., :n] != 0, wanted)


@pytest.mark.parametrize("stabilizer", ["compensated", "compensated_projected"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("at", [-700, 0, 700, 1111])
def test_chunks_repeat_bit_for_bit(at: int, d: int, stabilizer: str) -> None:
    """Into poisoned memory; queries stand ``at`` tokens after the keys."""
    q, k, v, g = (x.transpose(1, 2) for x in random_tensors(3, 6, 2, 1111, d))
    where = {"q_position": 700 + at, "k_position": 700, "causal": True, "stabilizer": stabilizer}

    def once() -> list[torch.Tensor]:
        poison = torch.full((1 << 24,), torch.nan, device=DEVICE)
        del poison
        out, lse = chunks.chunk_forward(q, k, v, **where)
        delta, _ = chunks.chunk_delta(g, out.bfloat16(), lse)
        sums = [torch.ones(x.shape, device=DEVICE) for x in (q, k, v)]
        names = dict(zip(("dq", "dk", "dv"), sums, strict=True))
        kept = chunks.projected_rows(q, lse, stabilizer=stabilizer)
        chunks.chunk_backward(g, q, k, v, lse, delta, rows=kept, **names, **where)
        rows = [] if kept is None else [kept.excess, kept.top, kept.key]
        return [out, lse, *sums, *rows]

    first = once()
    assert not any(bool(x.isnan().any()) for x in first)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))

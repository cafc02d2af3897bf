"""The kernel set of sm_90 where it differs from the portable one, whose tests it passes as well."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE

from stable_attention import configs, dispatch, stable_attention
from stable_attention.hopper import launch as hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or configs.arch_of(torch.device("cuda", 0)) != "sm90",
        reason="needs an sm_90 GPU",
    ),
]


def gradients(
    tensors: list[torch.Tensor], *, causal: bool, layout: str = "bhsd"
) -> tuple[torch.Tensor, ...]:
    """dQ, dK, dV for (q, k, v, dO)."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = stable_attention(q, k, v, layout=layout, causal=causal, stabilizer="compensated")
    return torch.autograd.grad(out, (q, k, v), tensors[3])


def random_tensors(b: int, h: int, hk: int, s: int, d: int) -> list[torch.Tensor]:
    return [
        torch.randn(b, heads, s, d, device=DEVICE, dtype=torch.bfloat16) for heads in (h, hk, hk, h)
    ]


def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [row for row in dispatch.KERNEL_SETS if row.name == "triton"]
    monkeypatch.setattr(dispatch, "KERNEL_SETS", sets)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("shape", [(2, 4, 4, 1), (1, 6, 2, 127), (3, 4, 1, 129), (1, 8, 8, 1000)])
def test_errors_are_those_of_the_portable_kernels(
    shape: tuple[int, int, int, int], d: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both round P and dS at the same places, so they differ by the order of float32 sums."""
    tensors = random_tensors(*shape, d)
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
        assert (a - exact).abs().max() <= 1.25 * (b - exact).abs().max() + floor


@pytest.mark.parametrize("causal", [True, False])
def test_batches_of_one_and_of_many_give_the_same_bits(causal: bool) -> None:
    """The order of the additions to dQ does not depend on how much else there is to do."""
    tensors = random_tensors(60, 2, 2, 515, 128)
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
    assert not hopper._describable(odd, "bhsd")
    mixed = [odd, *tensors[1:]]
    ours = gradients(mixed, causal=True)
    portable(monkeypatch)
    theirs = gradients(mixed, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

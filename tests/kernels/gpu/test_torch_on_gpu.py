"""CUDA graphs, torch.compile with Inductor, checkpointing, streams and devices, on real kernels.

The CPU tests run the same operators through opcheck and aot_eager; here they are captured, fused
around, replayed and queued.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, make_inputs
from side_by_side import LAYOUTS, gradients, in_one_buffer, projected

from stable_attention import stable_attention
from stable_attention.chunks import (
    chunk_backward,
    chunk_delta,
    chunk_forward,
    finish_chunks,
    merge_chunks,
)

pytestmark = pytest.mark.gpu

CASES = [
    "b=2 sq=300 sk=300 hq=4 hk=2 d=64 causal=1 sinks=learned",
    "b=1 sq=256 sk=256 hq=2 hk=2 d=128 dropout=0.1",
    "b=1 sq=129 sk=129 hq=2 hk=2 d=256 causal=1 o_lo=int8",
    "layout=thd lens_q=100,0,33 lens_k=100,4,33 hq=2 hk=2 d=64 causal=1",
]


def leaves_of(case: Case, seed: int) -> tuple[list[torch.Tensor], torch.Tensor, dict]:
    """(q, k, v and maybe sinks as leaves), dO, the other arguments."""
    from dataclasses import replace

    case = replace(case, seed=seed)
    given = make_inputs(case, "cuda")
    named = given.arguments(case) | {"o_lo": case.o_lo, "deterministic": True}
    named["dropout_seed"] = torch.tensor(seed, device="cuda") if case.dropout else None
    if case.layout == "thd":
        named["max_seqlen_q"], named["max_seqlen_k"] = (max(n) for n in case.lengths)
    found = [x.detach().clone().requires_grad_() for x in (given.q, given.k, given.v)]
    if isinstance(given.sinks, torch.Tensor):
        found.append(given.sinks.detach().clone().requires_grad_())
    return found, given.dout, named


def step(leaves: list[torch.Tensor], dout: torch.Tensor, named: dict) -> tuple[torch.Tensor, ...]:
    """O, LSE and the gradients of every leaf."""
    sinks = leaves[3] if len(leaves) > 3 else named["sinks"]
    out, lse = stable_attention(*leaves[:3], return_lse=True, **named | {"sinks": sinks})
    weight = torch.nan_to_num(lse, neginf=0.0)
    grads = torch.autograd.grad((out, weight), leaves, (dout, torch.ones_like(weight)))
    return out.detach(), lse.detach(), *grads


@pytest.mark.parametrize("line", CASES)
def test_cuda_graph_replays_what_eager_computes(line: str) -> None:
    """Forward and backward captured once, replayed with other inputs (and another dropout seed)."""
    case = Case.parse(line)
    leaves, dout, named = leaves_of(case, seed=1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(leaves, dout, named)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(leaves, dout, named)
    for seed in (2, 3, 1):
        fresh, fresh_dout, fresh_named = leaves_of(case, seed)
        with torch.no_grad():
            for target, source in zip(leaves, fresh, strict=True):
                target.copy_(source)
            dout.copy_(fresh_dout)
            if case.dropout:
                named["dropout_seed"].copy_(fresh_named["dropout_seed"])
        graph.replay()
        want = step(fresh, fresh_dout, fresh_named)
        for i, (a, b) in enumerate(zip(captured, want, strict=True)):
            assert torch.equal(a, b), f"seed {seed}, tensor {i} of O, LSE, dQ, dK, dV, dSink"


@pytest.mark.parametrize("line", CASES[:3])
def test_compile_fullgraph_gives_the_same_bits(line: str) -> None:
    """Inductor fuses around the operators and must not touch them."""
    case = Case.parse(line)
    leaves, dout, named = leaves_of(case, seed=4)
    sinks = leaves[3] if len(leaves) > 3 else named["sinks"]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return stable_attention(q, k, v, **named | {"sinks": sinks})

    compiled = torch.compile(run, fullgraph=True, dynamic=False)
    for a, b in zip(
        torch.autograd.grad(compiled(*leaves[:3]), leaves, dout),
        torch.autograd.grad(run(*leaves[:3]), leaves, dout),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (96, 96), (40, 40), (192, 128), (8, 8)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_side_by_side_are_the_same_bits(layout: str, widths: tuple[int, int]) -> None:
    """Stored between one another, by descriptor where the head dim fills its tile."""
    q, k, v = projected(layout, d=widths[0], dv=widths[1], device="cuda", heads=3, length=300)
    got = gradients(q, k, v, layout=layout)
    want = gradients(*(x.detach().clone().requires_grad_() for x in (q, k, v)), layout=layout)
    assert in_one_buffer(got[:3])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_compile_fullgraph_with_pointwise_neighbours_and_changing_lengths() -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = stable_attention(x * 2, y, torch.sin(y), causal=True, deterministic=True)
        return out.float().square().sum()

    compiled = torch.compile(run, fullgraph=True)
    for n in (64, 130, 257):
        x, y = (
            torch.randn(1, n, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        got, want = (torch.autograd.grad(f(x, y), (x, y)) for f in (compiled, run))
        for a, b in zip(got, want, strict=True):
            # Inductor keeps sin and products in float32 where eager rounds in between.
            assert float((a.float() - b.float()).norm() / b.float().norm()) < 2e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_bits(reentrant: bool) -> None:
    leaves, dout, named = leaves_of(Case.parse(CASES[1]), seed=5)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return stable_attention(q, k, v, **named)

    def gradients(out: torch.Tensor) -> list[torch.Tensor | None]:
        for x in leaves:
            x.grad = None
        out.backward(dout)
        return [x.grad for x in leaves]

    again = torch.utils.checkpoint.checkpoint(block, *leaves, use_reentrant=reentrant)
    for a, b in zip(gradients(again), gradients(block(*leaves)), strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_a_stream_of_the_callers_own() -> None:
    """Kernels queue on the current stream: inputs written there late are seen, and bits agree."""
    leaves, dout, named = leaves_of(Case.parse(CASES[0]), seed=6)
    want = step(leaves, dout, named)
    late = [torch.zeros_like(x) for x in leaves]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # 25 ms: whoever runs on another stream reads zeros
        for target, source in zip(late, leaves, strict=True):
            target.copy_(source.detach())
        got = step([x.requires_grad_() for x in late], dout, named)
    stream.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_tensors_of_another_than_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    leaves, dout, named = leaves_of(Case.parse(CASES[1]), seed=7)
    want = step(leaves, dout, named)
    assert torch.cuda.current_device() == 0
    far = [x.detach().to("cuda:1").requires_grad_() for x in leaves]
    named["dropout_seed"] = named["dropout_seed"].to("cuda:1")
    for a, b in zip(step(far, dout.to("cuda:1"), named), want, strict=True):
        assert a.device.index == 1 and torch.equal(a.to("cuda:0"), b)
    assert torch.cuda.current_device() == 0


def test_chunks_of_another_than_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    near = [torch.randn(1, 70, 2, 64, device="cuda:0", dtype=torch.bfloat16) for _ in range(4)]

    def all_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> list:
        out, lse = chunk_forward(q, k, v, causal=True)
        merge_chunks(out, lse, *chunk_forward(q, v, k, causal=True))
        low = finish_chunks(out, lse, dtype=q.dtype)
        delta, _ = chunk_delta(do, low[0], lse, low=low[1])
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        dq, dk, dv = sums
        chunk_backward(do, q, k, v, lse, delta, dq=dq, dk=dk, dv=dv, causal=True)
        return [*low, lse, delta, *sums]

    for a, b in zip(all_of(*(x.to("cuda:1") for x in near)), all_of(*near), strict=True):
        assert a.device.index == 1 and torch.equal(a.to("cuda:0"), b)

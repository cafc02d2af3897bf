"""Functions that launch kernels past the dispatcher, and who transforms or traces their calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention_cases import DEVICE
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import stable_attention
from stable_attention.carriers import carrier
from stable_attention.chunks import chunk_forward
from stable_attention.int8.launch import int8_attention
from stable_attention.rotary import rotary

SIZE = (2, 8, 2, 64)
ANGLES = torch.linspace(0.0, 1.0, 8 * 64, device=DEVICE).view(8, 64)


def _cured(x: torch.Tensor) -> torch.Tensor:
    return stable_attention.cured(F.scaled_dot_product_attention, x, x, x, layout="bhsd")


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rotary": lambda x: rotary(x.transpose(0, 1), ANGLES),
    "attend": lambda x: int8_attention(x, x, x),
    "cured": _cured,
    "cure": lambda x: stable_attention.cure(x, x, x, x).out,
    "carrier": lambda x: carrier(x, torch.zeros(2, 2, 8, device=DEVICE)).out,
    "chunk_forward": lambda x: chunk_forward(x, x, x)[0],
}


def _given() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)


def _of_dual_numbers(call: Callable[[torch.Tensor], object], x: torch.Tensor) -> object:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("name", CALLS)
def test_transforms_are_refused_with_a_remedy(name: str) -> None:
    """They ended in "must override the setup_context staticmethod", or in missing storage."""
    x = _given()
    transforms: tuple[Callable[[], object], ...] = (
        lambda: torch.func.vmap(CALLS[name])(x[None]),
        lambda: torch.func.grad(lambda y: CALLS[name](y).sum())(x),
        lambda: torch.func.jvp(CALLS[name], (x,), (x,)),
        lambda: torch.jit.trace(CALLS[name], (x,)),
        lambda: _of_dual_numbers(CALLS[name], x),
    )
    for transform in transforms:
        with pytest.raises(NotImplementedError, match=rf"{name} is called inside torch\.vmap"):
            transform()


DIFFERENTIABLE = ("rotary", "attend", "cured")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_batched_gradients_are_refused_with_a_remedy(name: str) -> None:
    """As `torch.autograd.functional.jacobian` asks for them; they had no data pointer."""
    x = _given().requires_grad_()
    out = CALLS[name](x)
    with pytest.raises(NotImplementedError, match=r"batched gradients \(is_grads_batched"):
        torch.autograd.grad(out, x, torch.ones_like(out)[None], is_grads_batched=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_tensors_that_hooks_or_checkpoints_give_back(name: str) -> None:
    """INT8 and rotary read what a hook had laid out anew as it was before: wrong gradients."""
    x = _given()
    want = _gradient(CALLS[name], x)
    relaid = torch.autograd.graph.saved_tensors_hooks(
        lambda y: y.mT.contiguous().mT if y.dim() > 1 else y, lambda y: y
    )

    def hooked(y: torch.Tensor) -> torch.Tensor:
        with relaid:
            return CALLS[name](y)

    assert torch.equal(_gradient(hooked, x), want)
    for reentrant in (True, False):
        again = functools.partial(checkpoint, CALLS[name], use_reentrant=reentrant)
        assert torch.equal(_gradient(again, x), want)


def _gradient(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = call(x)
    out.backward(torch.linspace(0, 1, out.numel()).view_as(out).to(out))
    assert x.grad is not None
    return x.grad


def test_threads_under_the_interpreter() -> None:
    """Triton's keeps its program's place in one place: "y >= grid_dim[1]", or a wrong tile."""
    x = _given()
    want, found = rotary(x.transpose(0, 1), ANGLES), []

    def repeat() -> None:
        found.extend(torch.equal(rotary(x.transpose(0, 1), ANGLES), want) for _ in range(5))

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_leaves_them_out_of_its_graphs(name: str) -> None:
    """Dynamo looked into launches, and died of an obscure error inside Triton."""
    torch._dynamo.reset()
    differentiable = name in DIFFERENTIABLE

    def step(x: torch.Tensor) -> torch.Tensor:
        return CALLS[name](x * 2) + 1

    found = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        x = _given().requires_grad_(differentiable)
        out = function(x)
        if differentiable:
            out.sum().backward()
        found.append((out, x.grad if differentiable else out))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"{name} runs outside graphs: leave out fullgraph=True"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(_given())

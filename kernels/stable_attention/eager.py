"""Functions that launch kernels on the memory of their tensors, past torch's dispatcher.

Whoever transforms operators (`torch.func`, `torch.vmap`) or traces them sees nothing of these, and
what it puts in the place of tensors has no memory. `stable_attention` itself is an operator (`ops`)
and needs none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")


_REFUSED = (
    "is called inside torch.vmap, a transform of torch.func, torch.export or torch.jit.trace, with "
    "dual numbers, or for batched gradients (is_grads_batched, vectorize), which do not reach its "
    "kernels; "
    "allowed: eager calls, Tensor.backward() or torch.autograd.grad, and torch.compile without "
    "fullgraph. For vmap put the mapped dimension into the batch."
)


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, outside the graphs of torch.compile; refused where tensors have no memory.

    torch.compile breaks its graph for it, or says so with ``fullgraph=True``.

    Raises:
        NotImplementedError: traced by torch.export or torch.jit, and as `check_memory`.
    """
    name = f"{function.__module__}.{function.__name__}"

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            # With fullgraph=True this text is what the user sees.
            torch._dynamo.graph_break(msg=f"{name} runs outside graphs: leave out fullgraph=True")
            return torch.compiler.disable(function)(*arguments, **named)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            raise NotImplementedError(f"{name} {_REFUSED}")
        check_memory(name, *arguments, *named.values())
        return function(*arguments, **named)

    return call


def has_tangent(*values: object) -> bool:
    """Whether forward-mode AD came along with a tensor: below it a tangent is a silent zero."""
    return forward_ad._current_level >= 0 and any(
        isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None
        for x in values
    )


def recorded() -> bool:
    """Whether autograd records calls for a backward pass, and no transform of torch.func does."""
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


def batched(gradient: torch.Tensor) -> bool:
    """Whether it stands for several gradients at once (is_grads_batched, vmap), without memory."""
    return not torch._C._has_storage(gradient)


def check_memory(name: str, *values: object) -> None:
    """NotImplementedError where ``values`` are, or stand for, tensors that kernels cannot read, or
    have a tangent."""
    # What autograd batches, for several gradients at once, has none either.
    bare = any(isinstance(x, torch.Tensor) and batched(x) for x in values)
    if bare or torch._C._are_functorch_transforms_active() or has_tangent(*values):
        raise NotImplementedError(f"{name} {_REFUSED}")


__all__ = ["batched", "check_memory", "eager", "has_tangent", "recorded"]

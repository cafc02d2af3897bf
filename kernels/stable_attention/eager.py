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

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, outside the graphs of torch.compile; refused where tensors have no memory.

    torch.compile breaks its graph for it, or says so with ``fullgraph=True``.

    Raises:
        NotImplementedError: inside torch.vmap, transforms of torch.func, and torch.export.
    """
    name = f"{function.__module__}.{function.__name__}"

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            # With fullgraph=True this text is what the user sees.
            torch._dynamo.graph_break(msg=f"{name} runs outside graphs: leave out fullgraph=True")
            return torch.compiler.disable(function)(*arguments, **named)
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{name} is called inside torch.vmap, a transform of torch.func or torch.export, "
                "whose tensors have no memory for its kernels; allowed: eager calls, with "
                "Tensor.backward() or torch.autograd.grad for gradients, and torch.compile "
                "without fullgraph. For vmap put the mapped dimension into the batch."
            )
        return function(*arguments, **named)

    return call


__all__ = ["eager"]

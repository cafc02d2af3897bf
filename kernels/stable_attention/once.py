"""Functions that are differentiable once: whoever asks for more is told, and gets no zeros."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stable_attention.eager import check_memory


class _Twice(torch.autograd.Function):
    """The first of the arguments as they are; their derivatives by the others are refused."""

    @staticmethod
    def forward(_ctx: Any, count: int, *tensors: torch.Tensor | None) -> Any:
        return tuple(None if x is None else x.data for x in tensors[:count])

    @staticmethod
    def backward(_ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "trying to differentiate twice a function that is differentiable once "
            "(once_differentiable): second derivatives (create_graph=True) need another function"
        )


def refused_twice(
    gradients: tuple[torch.Tensor | None, ...], *sources: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """``gradients``, whose derivatives by what ``sources`` come from are refused."""
    found: tuple[torch.Tensor | None, ...] = _Twice.apply(len(gradients), *gradients, *sources)
    return found


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator, but whatever derivative of a gradient is asked for, it raises.

    torch's cuts gradients off from dO and from what was saved, so that ``autograd.grad`` of a loss
    with gradients in it leaves their part out and says nothing.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *grads: torch.Tensor) -> Any:
        check_memory(f"{backward.__module__}.{backward.__qualname__}", *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        found = found if isinstance(found, tuple) else (found,)
        return refused_twice(found, *grads, *ctx.saved_tensors)

    return call


__all__ = ["once_differentiable", "refused_twice"]

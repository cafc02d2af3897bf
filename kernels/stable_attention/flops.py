"""FLOP formulas of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

They count as torch counts scaled_dot_product_attention: 2 for a multiply and an add, every query
with every key whatever causal masks and windows hide, key/value heads once for each query head
that shares them, two matrix products forwards and five backwards. A packed sequence counts with its
own lengths, which are read from the device; traced ones count with the longest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from stable_attention.layouts import dims
from stable_attention.problem import options_of


def _lengths(cu: torch.Tensor, longest: int) -> list[int]:
    if isinstance(cu, FakeTensor) or cu.is_meta:
        return [longest] * (cu.shape[0] - 1)
    return cu.diff().tolist()


def _pairs(given: dict[str, Any]) -> int:
    """Query heads times pairs of a query and a key of one sequence."""
    layout = options_of(given["spec"]).layout
    batch, sq, heads, _ = dims(given["q"], layout)
    sk = dims(given["k"], layout)[1]
    if given["cu_q"] is None:
        return heads * batch * sq * sk
    sizes = (_lengths(given[f"cu_{x}"], given[f"s{x}"]) for x in "qk")
    return heads * sum(a * b for a, b in zip(*sizes, strict=True))


def _given(operator: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [x.name for x in operator._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def register(forward: torch._ops.OpOverload, backward: torch._ops.OpOverload) -> None:
    """Register the formulas of the two operators."""

    @register_flop_formula(forward.overloadpacket, get_raw=True)
    def _(*args: Any, out_val: object = None, **kwargs: Any) -> int:
        given = _given(forward, args, kwargs)
        return 2 * _pairs(given) * (given["q"].shape[-1] + given["v"].shape[-1])

    @register_flop_formula(backward.overloadpacket, get_raw=True)
    def _(*args: Any, out_val: object = None, **kwargs: Any) -> int:
        given = _given(backward, args, kwargs)
        return 2 * _pairs(given) * (3 * given["q"].shape[-1] + 2 * given["v"].shape[-1])

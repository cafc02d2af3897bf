"""Activations of the MLP; under ``training.compile_fusions`` compiled where core fuses none.

PyTorch's squared ReLU takes two passes forward and more backward, its GELU one each, slower than
memory would let it. Compiled, each is one kernel a direction that reads and writes in the type of
its input and computes in float32, like PyTorch's. Experts are left alone: they see another number
of tokens at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from megatron_patch.config.root import RunConfig

Activation = Callable[[torch.Tensor], torch.Tensor]


def activation_function(run: RunConfig) -> Activation:
    """What the MLPs of ``run`` apply; of a gated one, to the half that gates."""
    plain: dict[str, Activation] = {
        "gelu": F.gelu,
        "swiglu": F.silu,
        "relu": F.relu,
        "squared_relu": squared_relu,
    }
    name = run.model.activation
    if run.training.compile_fusions and not core_fuses(run) and run.model.moe is None:
        return {"gelu": fused_gelu, "squared_relu": fused_squared_relu}.get(name, plain[name])
    return plain[name]


def core_fuses(run: RunConfig) -> bool:
    """Whether Megatron-Core can fuse the activation: SwiGLU, and GELU with a bias."""
    model = run.model
    return model.activation == "swiglu" or (model.activation == "gelu" and model.add_bias_linear)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 (So et al. 2021), eager: core's own is wrapped in torch.compile."""
    return torch.pow(F.relu(x), 2)


def fused_gelu(x: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.gelu`, one kernel a direction."""
    return _Fused.apply(_compiled_gelu, _compiled_gelu_gradient, x)


def fused_squared_relu(x: torch.Tensor) -> torch.Tensor:
    """`squared_relu`, one kernel a direction."""
    return _Fused.apply(_compiled_squared_relu, _compiled_squared_relu_gradient, x)


class _Fused(torch.autograd.Function):
    """``forward(x)``; its gradient from dout and x. Saves x."""

    @staticmethod
    def forward(ctx: Any, forward: Activation, gradient: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        ctx.save_for_backward(x)
        return forward(x)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return None, None, ctx.gradient(dout, x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def _gelu_gradient(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(dout, x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.square(F.relu(x).float()).to(x.dtype)


def _squared_relu_gradient(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (dout.float() * (2 * F.relu(x).float())).to(x.dtype)


_compiled_gelu = torch.compile(_gelu, dynamic=False)
_compiled_gelu_gradient = torch.compile(_gelu_gradient, dynamic=False)
_compiled_squared_relu = torch.compile(_squared_relu, dynamic=False)
_compiled_squared_relu_gradient = torch.compile(_squared_relu_gradient, dynamic=False)

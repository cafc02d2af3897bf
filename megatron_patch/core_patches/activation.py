"""Activations of the MLP; under ``training.compile_fusions`` squared ReLU is compiled.

PyTorch's takes two passes forward and more backward; compiled it is one kernel a direction that
reads and writes in the type of its input and computes in float32. Experts are left alone: they see
another number of tokens at every step. SwiGLU, and GELU with a bias, are core's to fuse. GELU
without one stays PyTorch's kernel: what the compiler makes of it was slower on an H200, in both
directions (no result kept).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron_patch.schema.run import RunConfig

Activation = Callable[[torch.Tensor], torch.Tensor]


def activation_function(run: RunConfig) -> Activation:
    """What the MLPs of ``run`` apply; of a gated one, to the half that gates."""
    plain: dict[str, Activation] = {
        "gelu": F.gelu,
        "gelu_tanh": gelu_tanh,
        "swiglu": F.silu,
        "relu": F.relu,
        "squared_relu": squared_relu,
    }
    name = run.model.activation
    if name == "gelu_tanh" and run.training.compiles_fusions and core_fuses(run):
        return F.gelu  # by which core knows what to fuse; its fused kernel is the tanh form
    if name == "squared_relu" and run.training.compiles_fusions and run.model.moe is None:
        return fused_squared_relu
    return plain[name]


def core_fuses(run: RunConfig) -> bool:
    """Whether Megatron-Core can fuse the activation: SwiGLU, and GELU with a bias.

    Its GELU is the tanh form: ``gelu`` becomes that only where fusions are asked for by name. What
    experts do with biases it cannot fuse, and says so in the first step.
    """
    model = run.model
    if model.moe is not None and model.add_bias_linear:
        return False
    tanh = model.activation == "gelu_tanh"
    tanh = tanh or (model.activation == "gelu" and bool(run.training.compile_fusions))
    return model.activation == "swiglu" or (tanh and model.add_bias_linear)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU with tanh in the place of erf, as GPT-2 was trained."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 (So et al. 2021), eager: core's own is wrapped in torch.compile."""
    return torch.pow(F.relu(x), 2)


def fused_squared_relu(x: torch.Tensor) -> torch.Tensor:
    """`squared_relu`, one kernel a direction."""
    return _SquaredReLU.apply(x)


class _SquaredReLU(torch.autograd.Function):
    """Saves x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _compiled_squared_relu(x)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return _compiled_squared_relu_gradient(dout, x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.square(F.relu(x).float()).to(x.dtype)


def _squared_relu_gradient(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (dout.float() * (2 * F.relu(x).float())).to(x.dtype)


_compiled_squared_relu = torch.compile(_squared_relu, dynamic=False)
_compiled_squared_relu_gradient = torch.compile(_squared_relu_gradient, dynamic=False)

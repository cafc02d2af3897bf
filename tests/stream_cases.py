"""A norm along the residual stream beside norm and stream apart: all results and gradients."""

import torch
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused

from megatron_patch.core_patches.residual import StreamNorm


def alone(function, x, dy):
    """[output, gradients of x and, of a module, of its parameters]."""
    x = x.clone().requires_grad_()
    out = function(x)
    parameters = function.parameters() if isinstance(function, torch.nn.Module) else ()
    return [out, *torch.autograd.grad(out, [x, *parameters], dy.to(out.dtype))]


def handed_on(norm, x, dy, dstream):
    """[output, stream, gradients of x and of the norm's parameters]."""
    x = x.clone().requires_grad_()
    both = norm(x) if isinstance(norm, StreamNorm) else (norm(x), x * 1)
    return [*both, *torch.autograd.grad(both, [x, *norm.parameters()], (dy, dstream))]


def added(norm, x, branch, shift, dy, dstream):
    """The same after x + branch + shift (or None), which a plain norm leaves to core."""
    inputs = [t.clone().requires_grad_() for t in (x, branch, shift) if t is not None]
    branch_and_shift = inputs[1], None if shift is None else inputs[2]
    if isinstance(norm, StreamNorm):
        both = norm(norm.add(inputs[0], *branch_and_shift))
    else:
        stream = bias_dropout_add_unfused(True)(branch_and_shift, inputs[0], 0.0)
        both = norm(stream), stream
    return [*both, *torch.autograd.grad(both, [*inputs, *norm.parameters()], (dy, dstream))]


def double(*tensors):
    """In float64, None where there is none."""
    return [None if t is None else t.double() for t in tensors]

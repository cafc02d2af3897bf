"""The experts of a local MoE layer, multiplied together.

Core's local layers run one MLP after the other: about fifteen kernels an expert forward and twice
that backward, from Python and autograd. Here every projection of all experts of a rank is one node
of autograd, and the activation between them one call. Parameters, their names and checkpoints are
those of `SequentialMLP`, and so is every matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.autograd.function import once_differentiable

from megatron_patch.core_patches.weight_gradient import accumulate


class GroupedMLP(SequentialMLP):
    """Experts without biases, in 16 or 32 bits."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Tokens [n, hidden], sorted by expert, with the weight [n] of each -> [n, hidden]."""
        if self.num_local_experts == 1:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        together = _Together(self.local_experts, counts)
        return MLP.forward(together, permuted_local_hidden_states, permuted_probs)  # type: ignore[arg-type]


class _Together:
    """Stands for the MLP of all experts in `MLP.forward`: its projections, else the first's own."""

    def __init__(self, experts: torch.nn.ModuleList, counts: list[int]) -> None:
        self._first = experts[0]
        self.linear_fc1 = _Projection([expert.linear_fc1 for expert in experts], counts)
        self.linear_fc2 = _Projection([expert.linear_fc2 for expert in experts], counts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


class _Projection(torch.nn.Module):
    """One projection of all experts: core asks for a module. It owns no parameters."""

    def __init__(self, layers: list[Any], counts: list[int]) -> None:
        super().__init__()
        self.layers, self.counts = layers, counts

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        for layer in self.layers:
            # Core's data parallelism waits there for weights that ranks still gather.
            for hook in layer._forward_pre_hooks.values():
                hook(layer, None)
        fused = self.layers[0].config.gradient_accumulation_fusion
        return _Products.apply(x, self.counts, fused, *[x.weight for x in self.layers]), None


class _Products(torch.autograd.Function):
    """y[i] = x[i] weights[i]^T, where x [n, in] and y [n, out] are ``counts[i]`` rows an expert."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, counts: list[int], fused: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts, ctx.fused = counts, fused
        y = x.new_empty(len(x), len(weights[0]))
        for rows, weight, out in zip(x.split(counts), weights, y.split(counts), strict=True):
            torch.mm(rows, weight.t(), out=out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        parts = gradient.contiguous().split(ctx.counts)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            for rows, weight, out in zip(parts, weights, dx.split(ctx.counts), strict=True):
                torch.mm(rows, weight, out=out)
        wanted = ctx.needs_input_grad[3:]
        grads = [
            _weight_gradient(rows, dy, weight, ctx.fused) if needed else None
            for rows, dy, weight, needed in zip(
                x.split(ctx.counts), parts, weights, wanted, strict=True
            )
        ]
        return dx, None, None, *grads


def _weight_gradient(
    x: torch.Tensor, gradient: torch.Tensor, weight: Any, fused: bool
) -> torch.Tensor | None:
    """dW, or added to the parameter's buffer as core's linears do it: then nothing reads it."""
    if not fused:
        return gradient.t() @ x
    if len(x):
        accumulate(x, gradient, weight.main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    fill = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return fill(weight)

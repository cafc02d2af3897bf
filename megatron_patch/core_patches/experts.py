"""The experts of a local MoE layer, multiplied together.

Core's local layers run one MLP after the other: about fifteen kernels an expert forward and twice
that backward, from Python and autograd. Here every projection of all experts of a rank is one node
of autograd, and the activation between them one call. Parameters, their names and checkpoints are
those of `SequentialMLP`, and so is every matrix product. Of BF16 experts on a GPU one launch makes
all products with a projection's weights: a launch for each is more than the host keeps up with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate as running_sums
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_patch.core_patches.weight_gradient import accumulate
from stable_attention.once import once_differentiable


class Experts(SequentialMLP):
    """Core's, whose first weights on a CPU do not depend on the ranks they are spread over.

    There a rank draws every matrix whole, so that weights do not depend on tensor parallelism; of
    experts core draws this rank's only: those of all ranks would be the same.
    """

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **options: Any) -> None:
        rank = options["pg_collection"].ep.rank()
        _pass_over(config, rank * num_local_experts)
        super().__init__(num_local_experts, config, *args, **options)
        _pass_over(config, config.num_moe_experts - (rank + 1) * num_local_experts)


def _pass_over(config: Any, experts: int) -> None:
    """Draw what the weights of other ranks' experts are, and drop it."""
    if not (config.use_cpu_initialization and config.perform_initialization):
        return
    width, hidden = config.moe_ffn_hidden_size, config.hidden_size
    for _ in range(experts):
        config.init_method(torch.empty((1 + config.gated_linear_unit) * width, hidden))
        config.output_layer_init_method(torch.empty(hidden, width))


class GroupedMLP(Experts):
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
        ends = _ends(counts, permuted_local_hidden_states)
        together = _Together(self.local_experts, counts, ends)
        return MLP.forward(together, permuted_local_hidden_states, permuted_probs)  # type: ignore[arg-type]


def _ends(counts: list[int], x: torch.Tensor) -> torch.Tensor | None:
    """Where each expert's rows end, on x's GPU, if one launch can multiply them."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or not len(x):
        return None
    ends = torch.tensor(list(running_sums(counts)), dtype=torch.int32, pin_memory=True)
    return ends.to(x.device, non_blocking=True)


class _Together:
    """Stands for the MLP of all experts in `MLP.forward`: its projections, else the first's own."""

    def __init__(
        self, experts: torch.nn.ModuleList, counts: list[int], ends: torch.Tensor | None
    ) -> None:
        self._first = experts[0]
        self.linear_fc1 = _Projection([expert.linear_fc1 for expert in experts], counts, ends)
        self.linear_fc2 = _Projection([expert.linear_fc2 for expert in experts], counts, ends)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


class _Projection(torch.nn.Module):
    """One projection of all experts: core asks for a module. It owns no parameters."""

    def __init__(self, layers: list[Any], counts: list[int], ends: torch.Tensor | None) -> None:
        super().__init__()
        self.layers, self.counts, self.ends = layers, counts, ends

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        for layer in self.layers:
            # Core's data parallelism waits there for weights that ranks still gather.
            for hook in layer._forward_pre_hooks.values():
                hook(layer, None)
        fused = self.layers[0].config.gradient_accumulation_fusion
        weights = [layer.weight for layer in self.layers]
        return _Products.apply(x, self.counts, self.ends, fused, *weights), None


class _Products(torch.autograd.Function):
    """y[i] = x[i] weights[i]^T, where x [n, in] and y [n, out] are ``counts[i]`` rows an expert.

    ``ends``, int32 on x's device, are the sums of counts: of products that one launch makes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        counts: list[int],
        ends: torch.Tensor | None,
        fused: bool,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts, ctx.ends, ctx.fused = counts, ends, fused
        return _products(x, counts, ends, weights, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _products(gradient, ctx.counts, ctx.ends, weights, transposed=False)
        wanted = ctx.needs_input_grad[4:]
        grads = [
            _weight_gradient(rows, dy, weight, ctx.fused) if needed else None
            for rows, dy, weight, needed in zip(
                x.split(ctx.counts), gradient.split(ctx.counts), weights, wanted, strict=True
            )
        ]
        return dx, None, None, None, *grads


def _products(
    x: torch.Tensor,
    counts: list[int],
    ends: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    *,
    transposed: bool,
) -> torch.Tensor:
    """x[i] weights[i], or x[i] weights[i]^T, of the rows of every expert."""
    # PyTorch's grouped product takes rows of whole 16 bytes.
    if ends is not None and all(size % 8 == 0 for size in weights[0].shape):
        together = torch.stack(list(weights))
        return torch.nn.functional.grouped_mm(x, together.mT if transposed else together, offs=ends)
    matrices = [weight.t() for weight in weights] if transposed else weights
    y = x.new_empty(len(x), matrices[0].shape[1])
    for rows, matrix, out in zip(x.split(counts), matrices, y.split(counts), strict=True):
        torch.mm(rows, matrix, out=out)
    return y


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

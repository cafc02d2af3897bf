"""LayerNorm and RMSNorm that work with sequence parallelism without Transformer Engine or Apex.

Megatron-Core's own `WrappedTorchNorm` refuses sequence parallelism, and Apex has no RMSNorm for it.
Under sequence parallelism each rank normalizes its part of the sequence, so the gradients of weight
and bias are partial sums; core's ``finalize_model_grads`` adds them up over tensor-parallel ranks
for parameters that carry ``sequence_parallel = True``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm of the last dimension; float32 inside, output in the weight's type."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, **_placement(config))
        _mark(self, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., hidden_size]; a float32 residual stream meets BF16 weights here."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        out = F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)
        return out.to(self.weight.dtype)


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm of the last dimension; float32 inside, output in the weight's type."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, **_placement(config))
        _mark(self, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., hidden_size]; a float32 residual stream meets BF16 weights here."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        weight, bias = self.weight.float(), self.bias.float()
        out = F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)
        return out.to(self.weight.dtype)


def norm_class(normalization: str) -> type[torch.nn.Module]:
    """The class for ``model.normalization``."""
    return {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[normalization]


def _mark(norm: torch.nn.Module, config: Any) -> None:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _placement(config: Any) -> dict[str, Any]:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return {"dtype": config.params_dtype, "device": device}

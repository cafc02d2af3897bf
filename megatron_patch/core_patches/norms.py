"""LayerNorm and RMSNorm that work with sequence parallelism without Transformer Engine or Apex.

Megatron-Core's own `WrappedTorchNorm` refuses sequence parallelism, and Apex has no RMSNorm for it.
Under sequence parallelism each rank normalizes its part of the sequence, so the gradients of weight
and bias are partial sums; core's ``finalize_model_grads`` adds them up over tensor-parallel ranks
for parameters that carry ``sequence_parallel = True``.

Under ``training.compile_fusions`` norms are compiled: one kernel reads the residual stream and
writes the output in the weight's type. PyTorch's own makes a float32 output first where the stream
is float32, and its kernel for LayerNorm's weight gradient is slow. The norms along the residual
stream do more then: `residual`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_patch.core_patches.cross_entropy import is_compiled


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm of the last dimension; float32 inside, output in the weight's type."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, **_placement(config))
        _mark(self, config)
        self.function = _compiled_rms_norm if is_compiled(config) else _rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight, self.eps)


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm of the last dimension; float32 inside, output in the weight's type."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, **_placement(config))
        _mark(self, config)
        self.function = _compiled_layer_norm if is_compiled(config) else _layer_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight, self.bias, self.eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(weight.dtype)


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    if x.dtype == weight.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(weight.dtype)


_compiled_rms_norm = torch.compile(_rms_norm, dynamic=False)
_compiled_layer_norm = torch.compile(_layer_norm, dynamic=False)


def norm_class(normalization: str) -> type[torch.nn.Module]:
    """The class for ``model.normalization``."""
    return {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[normalization]


def _mark(norm: torch.nn.Module, config: Any) -> None:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _placement(config: Any) -> dict[str, Any]:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return {"dtype": config.params_dtype, "device": device}

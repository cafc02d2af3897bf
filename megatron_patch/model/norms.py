"""LayerNorm and RMSNorm that work with sequence parallelism without Transformer Engine or Apex.

Megatron-Core's own `WrappedTorchNorm` refuses sequence parallelism, and Apex has no RMSNorm for it.
Under sequence parallelism each rank normalizes its part of the sequence, so the gradients of weight
and bias are partial sums; core's ``finalize_model_grads`` adds them up over tensor-parallel ranks
for parameters that carry ``sequence_parallel = True``.

Under ``training.compile_fusions`` norms are compiled: one kernel reads the residual stream and
writes the output in the weight's type. PyTorch's own makes a float32 output first where the stream
is float32, and its kernel for LayerNorm's weight gradient is slow. The norms at the head of a layer
then also hand the stream on (`_WithResidual`): in the backward pass its gradient arrives together
with that of the output, and one kernel reads both, where autograd would add them in another pass.

Legend: rows all dimensions but the last, h hidden_size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_patch.model.transformer_config import is_compiled


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm of the last dimension; float32 inside, output in the weight's type."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, **_placement(config))
        _mark(self, config)
        self.function = _compiled_rms_norm if is_compiled(config) else _rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., hidden_size]; a float32 residual stream meets BF16 weights here."""
        return self.function(x, self.weight, self.eps)


class ResidualRMSNorm(RMSNorm):
    """An `RMSNorm` that gives (output, x), as core's layers take it; compiled."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Normalize x [..., hidden_size] and hand it on."""
        return _WithResidual.apply(_RMS, x, self.weight, None, self.eps)


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm of the last dimension; float32 inside, output in the weight's type."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, **_placement(config))
        _mark(self, config)
        self.function = _compiled_layer_norm if is_compiled(config) else _layer_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., hidden_size]; a float32 residual stream meets BF16 weights here."""
        return self.function(x, self.weight, self.bias, self.eps)


class ResidualLayerNorm(LayerNorm):
    """A `LayerNorm` that gives (output, x), as core's layers take it; compiled."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Normalize x [..., hidden_size] and hand it on."""
        return _WithResidual.apply(_LAYER, x, self.weight, self.bias, self.eps)


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


def _layer_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    """Output [rows, h], mean and 1 / standard deviation [rows, 1] in float32."""
    rows, w, b = _float(x).flatten(0, -2), _float(weight), _float(bias)
    out, mean, rstd = torch.native_layer_norm(rows, list(w.shape), w, b, eps)
    return out.to(weight.dtype), mean, rstd


def _layer_backward(
    dout: torch.Tensor,
    dstream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of x [rows, h], weight and bias; ``dstream`` is added to the first."""
    g, rows, w = _float(dout).flatten(0, -2), _float(x).flatten(0, -2), _float(weight)
    # Of the bias only that there is one matters.
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        g, rows, list(w.shape), mean, rstd, w, w, [True, True, True]
    )
    stream = _float(dstream).flatten(0, -2)
    return (dx + stream).to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype)


def _rms_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: None, eps: float
) -> tuple[torch.Tensor, ...]:
    """Output [rows, h] and 1 / root mean square [rows, 1] in float32."""
    rows = _float(x).flatten(0, -2)
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (rows * rstd * _float(weight)).to(weight.dtype), rstd


def _rms_backward(
    dout: torch.Tensor,
    dstream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of x [rows, h] and weight; ``dstream`` is added to the first."""
    g, normal = _float(dout).flatten(0, -2), _float(x).flatten(0, -2) * rstd
    gw = g * _float(weight)
    along = (gw * normal).mean(-1, keepdim=True)
    dx = (gw - normal * along) * rstd + _float(dstream).flatten(0, -2)
    return dx.to(x.dtype), (g * normal).sum(0).to(weight.dtype)


def _float(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


_compiled_rms_norm = torch.compile(_rms_norm, dynamic=False)
_compiled_layer_norm = torch.compile(_layer_norm, dynamic=False)
_compiled_layer_forward = torch.compile(_layer_forward, dynamic=False)
_compiled_layer_backward = torch.compile(_layer_backward, dynamic=False)
_compiled_rms_forward = torch.compile(_rms_forward, dynamic=False)
_compiled_rms_backward = torch.compile(_rms_backward, dynamic=False)
_LAYER, _RMS = "layer", "rms"


class _WithResidual(torch.autograd.Function):
    """(norm(x), x). Backward, one kernel makes the gradient of x from those of both."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forward = _compiled_layer_forward if kind == _LAYER else _compiled_rms_forward
        out, *statistics = forward(x, weight, bias, eps)  # type: ignore[arg-type]
        ctx.kind = kind
        ctx.save_for_backward(x, weight, *statistics)
        return out.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dstream: torch.Tensor) -> tuple[Any, ...]:
        x, weight, *statistics = ctx.saved_tensors
        backward = _compiled_layer_backward if ctx.kind == _LAYER else _compiled_rms_backward
        dx, dweight, *dbias = backward(dout, dstream, x, weight, *statistics)
        return None, dx.view_as(x), dweight, dbias[0] if dbias else None, None


def norm_class(normalization: str, *, with_residual: bool = False) -> type[torch.nn.Module]:
    """The class for ``model.normalization``; ``with_residual``: it hands its input on as well."""
    plain = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    handing_on = {"RMSNorm": ResidualRMSNorm, "LayerNorm": ResidualLayerNorm}
    return (handing_on if with_residual else plain)[normalization]


def _mark(norm: torch.nn.Module, config: Any) -> None:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _placement(config: Any) -> dict[str, Any]:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return {"dtype": config.params_dtype, "device": device}

"""The residual stream under ``training.compile_fusions``: added to and normalized in one kernel.

A layer of Megatron-Core adds the output of attention (or of the MLP) to the stream in one kernel,
and the next norm reads the sum in another. Here the norm that comes next does both (`join`): it is
called with the branch's output, leaves the sum, and keeps its own output until core's layer asks
for it. In the backward pass one kernel reads the gradients of the norm's output and of the stream
and writes those of stream and branch, where autograd would normalize, add and round in three.

A norm whose stream comes from elsewhere (the embedding, another pipeline stage, a layer with
dropout) hands it on, so that its backward pass adds the stream's gradient all the same.

The sum is rounded to the stream's type. Where that is 16-bit, the statistics and the output are
those of the sum before it was rounded, and the backward pass reads the rounded one.

Legend: rows all dimensions but the last, h hidden_size. x is the stream, ``branch`` what is added
to it, ``shift`` the bias of the branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_patch.core_patches.norms import LayerNorm, RMSNorm

_LAYER, _RMS = "layer", "rms"


class StreamNorm(torch.nn.Module):
    """Mixed into a norm at the head of a layer, which takes (output, stream) from it; compiled."""

    kind: str
    hands_on = True
    """False behind the last layer, where the output is all there is to give."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, branch: Tensor | None = None, shift: Tensor | None = None) -> Any:
        """Normalize the stream x [..., h], or x + branch [..., h] + shift [h].

        Returns (output in the weight's type, the stream that was normalized, in the type of x); of
        the last norm, unless something is added, the output alone.
        """
        kept, self._kept = self._kept, None
        if branch is not None or kept is None or kept[1] is not x:
            kept = _StreamNorm.apply(
                self.kind, x, branch, shift, self.weight, getattr(self, "bias", None), self.eps
            )
        return kept if self.hands_on or branch is not None else kept[0]

    def add(self, x: Tensor, branch: Tensor, shift: Tensor | None) -> Tensor:
        """The stream x + branch + shift; its norm is kept for the next call, which is with it.

        The call goes through the module's hooks, by which core waits for weights on their way.
        """
        both = self(x, branch, shift)
        self._kept = both
        return both[1]


class StreamRMSNorm(StreamNorm, RMSNorm):
    """`RMSNorm` at the head of a layer."""

    kind = _RMS


class StreamLayerNorm(StreamNorm, LayerNorm):
    """`LayerNorm` at the head of a layer."""

    kind = _LAYER


class LastRMSNorm(StreamRMSNorm):
    """`RMSNorm` behind the last layer."""

    hands_on = False


class LastLayerNorm(StreamLayerNorm):
    """`LayerNorm` behind the last layer."""

    hands_on = False


def stream_norm_class(normalization: str, *, last: bool = False) -> type[StreamNorm]:
    """The class for ``model.normalization`` at the head of a layer, or behind the ``last`` one."""
    if last:
        return {"RMSNorm": LastRMSNorm, "LayerNorm": LastLayerNorm}[normalization]
    return {"RMSNorm": StreamRMSNorm, "LayerNorm": StreamLayerNorm}[normalization]


def join(decoder: Any) -> int:
    """Let every addition to the stream be made by the norm that follows it; how many now are.

    Not for a decoder that recomputes whole layers: what a norm keeps would be of another pass.

    ``decoder``: Megatron-Core's `TransformerBlock`, just built.
    """
    layers, joined = list(decoder.layers), 0  # none at all on a stage that only embeds
    heads = [layer.input_layernorm for layer in layers[1:]] + [decoder.final_layernorm]
    for layer, head in zip(layers, heads, strict=False):
        places = [("mlp_bda", head)]
        if isinstance(layer.pre_cross_attn_layernorm, IdentityOp):
            places.append(("self_attn_bda", layer.pre_mlp_layernorm))
        for name, norm in places:
            if isinstance(norm, StreamNorm):
                setattr(layer, name, _Adder(getattr(layer, name), norm))
                joined += 1
    return joined


class _Adder:
    """Stands for core's ``get_bias_dropout_add``, and asks that where something drops out."""

    def __init__(self, plain: Callable[..., Any], norm: StreamNorm) -> None:
        self._plain, self._norm = plain, norm

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(branch_and_shift: Any, x: Tensor, dropout: float) -> Tensor:
            if training and dropout > 0:
                return self._plain(training, fused)(branch_and_shift, x, dropout)
            return self._norm.add(x, *branch_and_shift)

        return add


class _StreamNorm(torch.autograd.Function):
    """(norm(x + branch + shift), x + branch + shift), or with x alone."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        x: Tensor,
        branch: Tensor | None,
        shift: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        forward = _compiled_layer_forward if kind == _LAYER else _compiled_rms_forward
        stream, out, *statistics = forward(x, branch, shift, weight, bias, eps)  # type: ignore[arg-type]
        if branch is None:
            stream = x
        ctx.kind = kind
        ctx.branch = None if branch is None else branch.dtype
        ctx.shift = None if shift is None else shift.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(stream, weight, *statistics)
        return out.view_as(x), x.view_as(x) if branch is None else stream

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dstream: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        stream, weight, *statistics = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(stream, dtype=weight.dtype)
        backward = _compiled_layer_backward if ctx.kind == _LAYER else _compiled_rms_backward
        dx, dbranch, dshift, dweight, dbias = backward(
            dout, dstream, stream, weight, *statistics, branch=ctx.branch, shift=ctx.shift
        )
        return None, dx, dbranch, dshift, dweight, dbias, None


def _joined(x: Tensor, branch: Tensor | None, shift: Tensor | None) -> Tensor:
    """The stream after an addition, as core adds: all in the stream's type."""
    if branch is None:
        return x
    added = branch.to(x.dtype)
    return x + (added if shift is None else added + shift.to(x.dtype))


def _parted(
    dx: Tensor,
    dstream: Tensor | None,
    stream: Tensor,
    branch: torch.dtype | None,
    shift: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of stream, branch and shift from dx [rows, h] of the norm and from the stream's."""
    if dstream is not None:
        dx = dx + _float(dstream).flatten(0, -2)
    dshift = None if shift is None else dx.sum(0).to(shift)
    of_stream = dx.to(stream.dtype).view_as(stream)
    if branch is None:
        return of_stream, None, dshift
    same = branch == stream.dtype
    return of_stream, of_stream if same else dx.to(branch).view_as(stream), dshift


def _layer_forward(
    x: Tensor, branch: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """Stream, output [rows, h], mean and 1 / standard deviation [rows, 1] in float32."""
    stream = _joined(x, branch, shift)
    rows, w, b = _float(stream).flatten(0, -2), _float(weight), _float(bias)
    out, mean, rstd = torch.native_layer_norm(rows, list(w.shape), w, b, eps)
    return stream, out.to(weight.dtype), mean, rstd


def _layer_backward(
    dout: Tensor,
    dstream: Tensor | None,
    stream: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    branch: torch.dtype | None,
    shift: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of stream, branch, shift, weight and bias."""
    g, rows, w = _float(dout).flatten(0, -2), _float(stream).flatten(0, -2), _float(weight)
    # Of the bias only that there is one matters.
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        g, rows, list(w.shape), mean, rstd, w, w, [True, True, True]
    )
    parts = _parted(dx, dstream, stream, branch, shift)
    return *parts, dw.to(weight.dtype), db.to(weight.dtype)


def _rms_forward(
    x: Tensor, branch: Tensor | None, shift: Tensor | None, weight: Tensor, bias: None, eps: float
) -> tuple[Tensor, ...]:
    """Stream, output [rows, h] and 1 / root mean square [rows, 1] in float32."""
    stream = _joined(x, branch, shift)
    rows = _float(stream).flatten(0, -2)
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return stream, (rows * rstd * _float(weight)).to(weight.dtype), rstd


def _rms_backward(
    dout: Tensor,
    dstream: Tensor | None,
    stream: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    branch: torch.dtype | None,
    shift: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of stream, branch, shift and weight."""
    g, normal = _float(dout).flatten(0, -2), _float(stream).flatten(0, -2) * rstd
    gw = g * _float(weight)
    along = (gw * normal).mean(-1, keepdim=True)
    parts = _parted((gw - normal * along) * rstd, dstream, stream, branch, shift)
    return *parts, (g * normal).sum(0).to(weight.dtype), None


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


_compiled_layer_forward = torch.compile(_layer_forward, dynamic=False)
_compiled_layer_backward = torch.compile(_layer_backward, dynamic=False)
_compiled_rms_forward = torch.compile(_rms_forward, dynamic=False)
_compiled_rms_backward = torch.compile(_rms_backward, dynamic=False)

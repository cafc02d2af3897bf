"""Cross entropy of 16-bit logits that reads them once in each pass.

Shape legend: s sequence, b micro-batch, v part of the vocabulary on this tensor-parallel rank.

Megatron-Core's compiled loss keeps the softmax in float32 and makes its gradient in a second
float32 matrix. Here nothing of the size of the logits exists but the logits and their gradient (4
bytes a logit instead of 10), and 6 bytes a logit move instead of about 24. All sums are float32;
exponents are taken relative to the largest logit of the whole vocabulary, as in core's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce


def is_compiled(config: Any) -> bool:
    """Whether ``training.compile_fusions`` is on: core's configuration has no field for it."""
    return bool(config.cross_entropy_loss_fusion)


def cross_entropy(logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    """Token losses under ``training.compile_fusions``.

    Args:
        logits: [s, b, v] of any floating-point type; ranks of ``group`` hold consecutive parts.
        labels: [s, b] ids in the whole vocabulary. An id outside it has no logit to raise.
        group: the tensor-parallel group.

    Returns [s, b] float32 losses in nats, the same on all ranks of ``group``. Non-finite logits
    make the losses of their tokens non-finite.
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels, group)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
        first = logits.shape[-1] * group.rank()
        top, sums = _compiled_sums(logits, labels, first)
        if group.size() > 1:
            own, top = top, top.clone()
            all_reduce(top, op=ReduceOp.MAX, group=group)
            sums[0] *= _scale(own, top)
            all_reduce(sums, op=ReduceOp.SUM, group=group)
        total, predicted = sums
        ctx.save_for_backward(logits, labels, top, total)
        ctx.first = first
        return total.log() - (predicted - top)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, labels, top, total = ctx.saved_tensors
        gradient = _compiled_gradient(logits, labels, top, total, grads[0], ctx.first)
        return gradient, None, None


def _scale(own: Tensor, top: Tensor) -> Tensor:
    """exp(own - top); 0 where a rank has only logits of -inf, also if all ranks have."""
    return torch.where(own == -torch.inf, 0.0, (own - top).exp())


def _sums(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(largest logit [s, b], [sum of exp(logit - largest), logit of the label or 0] [2, s, b])."""
    x = logits.float()
    top = x.amax(-1)
    shift = torch.where(top == -torch.inf, 0.0, top)
    total = (x - shift.unsqueeze(-1)).exp().sum(-1)
    index = labels - first
    inside = (index >= 0) & (index < x.shape[-1])
    chosen = logits.gather(-1, torch.where(inside, index, 0).unsqueeze(-1)).squeeze(-1)
    return top, torch.stack([total, torch.where(inside, chosen.float(), 0.0)])


def _gradient(
    logits: Tensor, labels: Tensor, top: Tensor, total: Tensor, grad: Tensor, first: int
) -> Tensor:
    """(softmax - one-hot) * grad, [s, b, v] in the type of ``logits``."""
    softmax = (logits.float() - top.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    hit = ids == (labels - first).unsqueeze(-1)
    return (torch.where(hit, softmax - 1.0, softmax) * grad.unsqueeze(-1)).to(logits.dtype)


# Shapes are those of the micro-batch, and `first` of the rank: code that knows them is the faster.
_compiled_sums = torch.compile(_sums, dynamic=False)
_compiled_gradient = torch.compile(_gradient, dynamic=False)

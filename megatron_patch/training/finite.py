"""Stop without the update when the loss or a gradient is not finite, and say where it came from.

Once a step, after the gradients have been reduced and before they are clipped, the ranks agree
on what they know of it (`agreement`): loss, gradient norm, whether either is not finite, stops that
were requested. That is the step's only wait for the device, and because all ranks read the same
result they stop together: no rank updates its weights, no rank waits for one that left.

Where the update has a gate on the device (`gate`) it is launched before the host reads what was
agreed on, and leaves everything as it was where it must not be taken. Where it has none, or where
a rule on the host may drop it (`may_drop`), the host reads first.

Finding the culprit costs nothing until it is needed, except one sum over each gradient buffer
before the reduction: afterwards a NaN has reached every data-parallel rank, and only those flags
tell whose it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patch.core_patches.optimizer import ClippedByUpdate
from megatron_patch.parallel.buffers import unwrap
from megatron_patch.parallel.first_rank import of_all
from megatron_patch.parallel.setup import Layout
from megatron_patch.training.agreement import Agreed, Agreement
from megatron_patch.training.gate import Gate
from megatron_patch.training.signals import NO_STOP, STOP_TIME, StopFlags

NAMED = 8  # parameters listed in the message
_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.")


class NonFiniteError(RuntimeError):
    """Loss or gradients are not finite; raised on all ranks, which have not updated anything."""

    exit_code = 3

    def __init__(self, message: str, *, step: int) -> None:
        self.step = step
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one rank saw."""

    where: str
    loss_finite: bool
    gradient_before_reduction: bool | None
    parameters: list[tuple[str, int, int]]  # name, non-finite values, values


def global_name(module: torch.nn.Module, name: str) -> str:
    """Name of a GPTModel's parameter with layers counted over the whole model, not the chunk."""
    match = _LAYER.match(name)
    layer = module.get_submodule(f"{match[1]}{match[2]}") if match else None
    number = getattr(layer, "layer_number", None)
    if match is None or number is None:
        return name
    return f"{match[1]}{number - 1}.{name[match.end() :]}"


class StepGuard:
    """Watches every optimizer step of one run.

    ``watch(optimizer)`` puts the agreement between the gradient norm and the update;
    ``before_reduction(chunks)`` is called when local gradients are complete. After ``step()`` of
    the optimizer and ``synchronize()``, ``stop_code`` holds the agreed reason to stop, if any, and
    ``agreed`` everything else the ranks told each other.

    Args:
        check: False only counts non-finite steps (``training.check_finite: false``).
        local_flags: whether gradients are still local in ``before_reduction`` (not with
            ``overlap_grad_reduce``, which reduces during the backward pass).
    """

    def __init__(
        self, layout: Layout, stop: StopFlags, *, check: bool, local_flags: bool = True
    ) -> None:
        self.layout, self.stop, self.check = layout, stop, check
        self.local_flags = local_flags and check
        self.step = 0
        self.stop_code = NO_STOP
        self.nonfinite = 0
        self.agreed: Agreed | None = None
        """What is known of the last step; None before the first."""
        self.judge: Callable[[float, float], None] | None = None
        """Called with a finite step's loss and gradient norm; may raise on all ranks."""
        self.may_drop = False
        """Whether ``judge`` decides about the update and has to be asked before it."""
        self._unread = False
        self._meanwhile: Callable[[], None] | None = None
        self._agreement = Agreement(layout)
        self._loss: torch.Tensor | None = None
        self._local: torch.Tensor | None = None
        self._chunks: list[torch.nn.Module] = []

    def begin(
        self, step: int, chunks: list[Any], *, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Start watching the update of ``step`` (1-based).

        ``meanwhile`` is called when the host is about to wait for the device.
        """
        self.step, self._chunks, self._meanwhile = step, chunks, meanwhile
        self._loss, self._local, self._unread = None, None, False
        self._agreement.begin()

    def loss(self, report: torch.Tensor | None) -> None:
        """This rank's [sum of token losses, tokens] of the step; None on ranks without a loss."""
        self._loss = None if report is None else report[0]
        self._agreement.report(report)

    @torch.no_grad()
    def before_reduction(self, chunks: list[torch.nn.Module]) -> None:
        """Note, on the device, whether this rank's own gradients are finite."""
        if not self.local_flags:
            return
        sums = [
            buffer.grad_data.sum()
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)  # type: ignore[misc]
        ]
        if sums:
            self._local = torch.stack([s.isfinite() for s in sums]).all().logical_not()

    def agree_on_signal(self) -> int:
        """The stop code if a signal came before the first step, on any rank. Collective.

        A time limit does not count here: a run that always stopped before its first step would
        never get on.
        """
        code = self.stop.code()
        flag = torch.tensor(0 if code == STOP_TIME else code, device=self.layout.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return int(flag)

    def watch(self, optimizer: Any, gate: Gate | None = None) -> None:
        """Let the ranks agree whenever ``optimizer.step()`` has computed the gradient norm.

        ``gate``: of its update, if it has one.
        """
        compute = optimizer.get_grad_norm

        def agreed() -> Any:
            norm = compute()
            self._agreement.send(norm, self.stop.code())
            self._unread = True
            if gate is None:
                return self.synchronize()
            closed = None
            if self.may_drop:
                self.synchronize()
            elif self.check:
                closed = self._agreement.bad()
            gate.set(self._agreement.grad_norm, closed)
            return ClippedByUpdate()

        optimizer.get_grad_norm = agreed

    def synchronize(self) -> float:
        """Read what was agreed on in this step, once; the gradient norm.

        Raises:
            NonFiniteError: on all ranks; the update was not taken.
            Exception: what ``judge`` raises.
        """
        if self._unread:
            self._unread = False
            if self._meanwhile is not None:
                self._meanwhile()
            agreed = self.agreed = self._agreement.receive()
            self.stop_code = agreed.stop_code
            if agreed.loss_bad or agreed.norm_bad:
                self.nonfinite += 1
                if self.check:
                    raise NonFiniteError(self._explain(), step=self.step)
            elif self.judge is not None:
                self.judge(agreed.loss, agreed.grad_norm)
        assert self.agreed is not None, "the optimizer has stepped"
        return self.agreed.grad_norm

    def _explain(self) -> str:
        """Collective: every rank scans its gradients, all build the same message."""
        mine = _Finding(
            where=self.layout.describe(),
            loss_finite=self._loss is None or bool(self._loss.isfinite()),
            gradient_before_reduction=None if self._local is None else bool(self._local),
            parameters=_non_finite_parameters(self._chunks),
        )
        return _message(self.step, of_all(mine))


@torch.no_grad()
def _non_finite_parameters(chunks: list[torch.nn.Module]) -> list[tuple[str, int, int]]:
    """(name, non-finite values, values) of gradients, nearest to the loss first."""
    found = []
    for chunk in chunks:
        inner = unwrap(chunk)
        for name, parameter in inner.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                continue
            bad = gradient.numel() - int(gradient.isfinite().sum())
            if bad:
                found.append((global_name(inner, name), bad, gradient.numel()))
    return found[::-1]


def _message(step: int, found: list[_Finding]) -> str:
    loss = [f.where for f in found if not f.loss_finite]
    local = [f.where for f in found if f.gradient_before_reduction]
    known = any(f.gradient_before_reduction is not None for f in found)
    what = "loss" if loss else "gradients"
    lines = [
        f"step {step}: {what} not finite; stopped before the update, weights and optimizer state "
        f"are those of step {step - 1}"
    ]
    if loss:
        lines.append(f"  loss not finite on {_some(loss)}")
    if local:
        lines.append(f"  gradients not finite before their reduction on {_some(local)}")
    elif not known:
        text = "  the rank cannot be told: parallel.overlap_grad_reduce had reduced the gradients"
        lines.append(text)
    named: dict[str, str] = {}
    for finding in found[::-1]:  # later pipeline stages first: nearer to the loss
        for name, bad, total in finding.parameters:
            text = f"    {name}: {bad} of {total} values, seen on {finding.where}"
            named.setdefault(name, text)
    if named:
        lines.append("  parameters with a non-finite gradient, nearest to the loss first:")
        lines += list(named.values())[:NAMED]
        if len(named) > NAMED:
            lines.append(f"    ... and {len(named) - NAMED} more")
    else:
        lines.append("  every gradient is finite, their norm overflows FP32: the run diverged")
    lines.append(
        "  no checkpoint was written; resume from the last one with a lower optimizer.lr or "
        "clip_grad or another attention.stabilizer, or look at the data of this step"
    )
    return "\n".join(lines)


def _some(places: list[str]) -> str:
    shown = "; ".join(places[:NAMED])
    rest = len(places) - NAMED
    return f"{shown}; and {rest} more ranks" if rest > 0 else shown

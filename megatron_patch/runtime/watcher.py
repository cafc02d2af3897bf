"""What the training loop and its watchers agree on: hooks, the result of a step, actions.

The trainer holds one ordered list of `Watcher`s and calls every hook on all of them in that order.
Hooks that say "Collective" communicate, so the list has the same order on every rank. Attention
telemetry, the spike rule and the straggler comparison are watchers; they do not know the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one step, still on the device where they were computed there."""

    report: torch.Tensor | None
    """[sum of token losses, tokens] of this rank's micro-batches; None off the last stage."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of the update."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run after this step: it is saved, then ``error`` is raised on all ranks."""

    reason: str
    error: Exception | None = None
    """None: the run ends gracefully, and the same command continues it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the checkpoint to return to from the danger that the record of ``step`` shows."""

    step: int


Action = Stop | Pin


class UpdateDropped(Exception):
    """This step's update is not taken; raised on all ranks out of the optimizer's step."""

    def __init__(self, grad_norm: float) -> None:
        super().__init__("spike: the update is dropped")
        self.grad_norm = grad_norm


class RewindWanted(Exception):
    """The run is to go back; raised on all ranks, before the update.

    Args:
        reason: one line.
        newest: newest step that the run may go back to.
    """

    def __init__(self, reason: str, *, newest: int) -> None:
        super().__init__(reason)
        self.newest = newest


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run goes on: after a start, a resume or a rewind."""

    step: int
    """Steps done."""
    switched_at: int
    """Step after which the guard exchanged the attention numerics, by the checkpoint; 0: never."""
    extra: dict[str, Any]
    """What `Watcher.state` returned at that checkpoint, all watchers together; empty at a start."""
    has_saved: bool
    """Whether the run has checkpoints of its own; known on the first rank only."""
    rewound: bool = False
    """Whether this process went back, instead of starting."""


class Watcher:
    """Hooks of the training loop. A watcher overrides those it needs."""

    def load_state(self, at: ResumePoint) -> None:
        """Go on from ``at``. Collective."""

    def before_step(self, step: int) -> None:
        """``step`` (1-based) begins. Local."""

    def before_forward(self) -> None:
        """The forward and backward passes of the step are about to start. Local."""

    def before_reduction(self) -> None:
        """This rank's gradients are complete; their reduction is about to start. Local."""

    def grads_reduced(self) -> None:
        """Gradients are reduced over all ranks, and not clipped yet. Local."""

    def after_step(self, step: int, result: StepResult) -> list[Action]:
        """The update of ``step`` is launched; what the trainer is to do. Collective."""
        return []

    def scalars(self) -> dict[str, float]:
        """Numbers for the record of a step, by full name."""
        return {}

    def status(self) -> list[str]:
        """Words for the console line of a step."""
        return []

    def before_save(self) -> None:
        """Make `state` that of the last step. Collective."""

    def state(self) -> dict[str, Any]:
        """Plain data for the checkpoint, under keys of this watcher's own."""
        return {}

    def before_rewind(self, back_to: int) -> list[Action]:
        """The run goes back to the checkpoint of ``back_to``; nothing is loaded yet. Collective."""
        return []

    def plan_rewind(self, back_to: int) -> None:
        """Newer checkpoints are set aside: write the plan, which a crash must not forget. Local."""

    def finish(self, step: int) -> list[Action]:
        """No step follows ``step``: take in what is under way. Collective."""
        return []

    def close(self) -> None:
        """The attempt is over, in order or by an error: release hooks and files. Local."""

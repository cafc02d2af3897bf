"""Mean loss over the validation batches, the same ones at every evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from megatron_patch.data.loader import Loaders, Split
from megatron_patch.monitor.metrics import StepMetrics
from megatron_patch.runtime.heartbeat import phase
from megatron_patch.training import auxiliary
from megatron_patch.training.session import Session
from megatron_patch.training.step import fetch, global_loss, run_schedule

if TYPE_CHECKING:
    from megatron_patch.checkpoint.train_state import TrainState
    from megatron_patch.monitor.hub import Monitor
    from megatron_patch.training.recorder import Recorder


@contextlib.contextmanager
def parameters_in_place(session: Session) -> Iterator[None]:
    """Weights complete on every rank inside the block, also under ``overlap_param_gather``.

    There the gather of updated weights is spread over the next forward pass by module hooks; for
    evaluation and checkpoints it is finished first.
    """
    chunks = session.chunks if session.hooks_enabled else ()
    session.hooks_enabled = False
    for chunk in chunks:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.enable_forward_pre_hook()
        session.hooks_enabled = bool(chunks)


def evaluate(session: Session, loaders: Loaders, split: Split = "valid") -> float:
    """Mean token loss (nats) of ``eval_steps`` global batches of a split.

    Draws no random numbers (dropout is off) and touches no training state. Collective.
    """
    total: torch.Tensor | None = None
    batches, in_training = None, session.micro_batches
    session.micro_batches = loaders.micro_batches
    with parameters_in_place(session), torch.no_grad():
        for chunk in session.chunks:
            chunk.eval()
        try:
            batches = loaders.iterate(split) if session.reads_data else None
            for _ in range(session.run.training.eval_steps):
                report = run_schedule(session, fetch(session, batches), forward_only=True)
                if report is not None:
                    total = report if total is None else total + report
        finally:
            session.micro_batches = in_training
            for chunk in session.chunks:
                chunk.train()
            if batches is not None:
                batches.close()
    auxiliary.clear(session)
    return global_loss(session, total)[0]


class Evaluation:
    """The evaluations of a run and their lines. Every method is collective."""

    def __init__(
        self, session: Session, loaders: Loaders, recorder: Recorder, *, monitor: Monitor
    ) -> None:
        self._session, self._loaders = session, loaders
        self._recorder, self._monitor = recorder, monitor

    def loss(self, split: Split) -> float:
        """`evaluate`, as a phase of its own."""
        with phase("evaluation"), self._recorder.away():
            return evaluate(self._session, self._loaders, split)

    def test(self, step: int) -> None:
        """The test split after the last step, where the run asks for it."""
        if self._session.run.training.eval_test:
            self._monitor.say(f"test split: loss {self.loss('test'):.6g} after step {step:,}")

    def at_end(self, state: TrainState) -> None:
        """What the last step reports, in a run whose ``train_steps`` were done when it started:
        somebody lowered them, or it ended between its last save and its end."""
        if self._loaders.has("valid"):
            metrics = StepMetrics(
                step=state.step,
                consumed_tokens=state.consumed_tokens,
                skipped=self._session.skipped,
                nonfinite=self._session.guard.nonfinite,
                eval_loss=self.loss("valid"),
            )
            self._monitor.log(metrics)
        self.test(state.step)

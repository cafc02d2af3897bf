"""Mean loss over the validation batches, the same ones at every evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_patch.data.loader import Loaders, Split
from megatron_patch.training import auxiliary
from megatron_patch.training.session import Session
from megatron_patch.training.step import fetch, global_loss, run_schedule


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

"""One training step: forward and backward through Megatron's schedules, then the update.

The loss function returns (sum of token losses, number of tokens, report) and the models are built
with ``calculate_per_token_loss``: gradients are divided once, by the tokens of the global batch,
which is why loss and gradient norm do not depend on the layout.

Legend: b micro-batch, s sequence (of this context-parallel rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from megatron_patch.core_patches.qk_clip import clip_qk
from megatron_patch.data.reader import Batch
from megatron_patch.parallel.setup import Layout
from megatron_patch.runtime.heartbeat import phase
from megatron_patch.runtime.watcher import StepResult, UpdateDropped
from megatron_patch.training import auxiliary
from megatron_patch.training.session import Session

REPORT = "loss"  # key of the per-micro-batch report: [sum of token losses, tokens]


def token_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
    """Megatron's three-part loss of a micro-batch, from mask and token losses [b, s] (nats)."""
    mask = loss_mask.view(-1).float()
    total = (losses.view(-1).float() * mask).sum()
    tokens = mask.sum()
    report = torch.stack([total.detach(), tokens.detach()])
    return total, tokens.to(torch.int32), {REPORT: report}


def place(batch: Batch, layout: Layout) -> Batch:
    """A micro-batch on this rank's device."""
    return {name: x.to(layout.device, non_blocking=True) for name, x in batch.items()}


LENGTHS = 128
"""The longest document is rounded up to a multiple of this: few sizes of rotary tables."""


def packed_documents(batch: Batch, here: Batch) -> Any:
    """Core's PackedSeqParams of a micro-batch of packed documents (`data.loader.pack`), else None.

    Lengths come from ``batch`` on the host: nothing waits for the device that has them as well.
    """
    if "cu_seqlens" not in batch:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    cu, padded = here["cu_seqlens"], here.get("cu_seqlens_padded")
    longest = int(batch["cu_seqlens"].diff().max())
    longest += -longest % LENGTHS
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _of_one_length(batches: list[Batch | None]) -> tuple[list[Batch | None], int]:
    """Micro-batches of packed documents as long as the longest, and its tokens [1, t].

    Context-parallel ranks pad documents, so that packs differ in length; the stages of a pipeline
    exchange tensors of one shape.
    """
    sizes = [batch["tokens"].shape[1] for batch in batches if batch is not None]
    length = max(sizes)
    if min(sizes) == length:
        return batches, length
    longer: list[Batch | None] = []
    for batch in batches:
        assert batch is not None, "every stage reads packed documents"
        missing = length - batch["tokens"].shape[1]
        longer.append(
            {
                name: x if name.startswith("cu_") else torch.nn.functional.pad(x, (0, missing))
                for name, x in batch.items()
            }
        )
    return longer, length


def forward_step(layout: Layout, *, training: bool = True) -> Any:
    """The function Megatron's schedules call for every micro-batch and chunk."""

    def forward(iterator: Iterator[Batch | None], model: Any) -> tuple[Any, Any]:
        # What follows until the next micro-batch is the backward pass, or waiting for one.
        with phase("forward", then="backward") if training else nullcontext():
            batch = next(iterator)
            if batch is None:  # a middle pipeline stage: its input comes from the stage before
                return model(None, None, None), lambda output: token_loss(output, output)
            here = place(batch, layout)
            packed = packed_documents(batch, here)
            extra = {} if packed is None else {"packed_seq_params": packed}
            output = model(
                here["tokens"],
                here["position_ids"],
                None,  # causal by construction: no mask tensor
                labels=here["labels"],
                loss_mask=here["loss_mask"],
                **extra,
            )
            return output, lambda losses: token_loss(here["loss_mask"], losses)

    return forward


def fetch(session: Session, iterator: Iterator[Batch] | None) -> list[Batch | None]:
    """The micro-batches of one step on this rank; None for stages that read no data."""
    if iterator is None:
        return [None] * session.micro_batches
    return [next(iterator) for _ in range(session.micro_batches)]


def run_schedule(
    session: Session, batches: list[Batch | None], *, forward_only: bool
) -> torch.Tensor | None:
    """Forward (and backward) of one global batch; [sum of losses, tokens] of this rank, or None."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    length, size = session.run.model.seq_length, session.run.training.micro_batch_size
    if session.run.data.document_attention:
        batches, local = _of_one_length(batches)
        length, size = local * session.layout.cp_size, 1
    # Every virtual chunk reads the same micro-batches, so each gets its own iterator over them.
    iterators = [iter(batches) for _ in session.chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step(session.layout, training=not forward_only),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=session.chunks if len(session.chunks) > 1 else session.chunks[0],
        num_microbatches=session.micro_batches,
        seq_length=length,
        micro_batch_size=size,
        forward_only=forward_only,
    )
    if not reports:
        return None
    return torch.stack([report[REPORT] for report in reports]).sum(dim=0)


def train_step(
    session: Session,
    batches: list[Batch | None],
    step: int,
    *,
    meanwhile: Callable[[], None] | None = None,
) -> StepResult:
    """One optimizer step on the given micro-batches.

    ``step`` counts from 1; ``meanwhile`` is called when the host is about to wait for the device.

    Raises:
        NonFiniteError, RewindWanted, RewindsUsedUp: on all ranks, with no weight changed.
    """
    auxiliary.clear(session)
    for chunk in session.chunks:
        chunk.zero_grad_buffer()
    session.optimizer.zero_grad()
    session.guard.begin(step, session.chunks, meanwhile=meanwhile)
    for watcher in session.watchers:
        watcher.before_forward()
    # A later pipeline stage waits for its input before `forward_step`.
    with phase("forward"), auxiliary.weighed(session, batches):
        # Collective: pipeline sends and receives, and the reduction of the gradients at its end.
        report = run_schedule(session, batches, forward_only=False)
    with phase("reduction"):
        for watcher in session.watchers:
            watcher.grads_reduced()
        session.guard.loss(report)
    session.schedule.step(increment=1)
    lr = learning_rate(session)
    with phase("optimizer"):
        try:
            # Collective: gradient norm, then the agreement of all ranks, then the update.
            updated, _, _ = session.optimizer.step()
            grad_norm = session.guard.synchronize()
        except UpdateDropped as dropped:  # on all ranks
            updated, grad_norm = False, dropped.grad_norm
    session.skipped += not updated
    if session.run.optimizer.qk_clip is not None:
        with phase("optimizer"):  # Collective; waits for the device
            clip_qk(session.chunks, log_max_only=not updated)
    return StepResult(report, grad_norm, lr)


def learning_rate(session: Session) -> float:
    """The rate the schedule has set; all our groups share one."""
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

    rate = get_canonical_lr_for_logging(session.optimizer.param_groups)
    return float("nan") if rate is None else float(rate)


def global_loss(session: Session, report: torch.Tensor | None) -> tuple[float, float]:
    """(mean token loss, tokens) over all ranks. Collective; brings the values to the host."""
    total = torch.zeros(2, dtype=torch.float64, device=session.layout.device)
    if report is not None and session.layout.reports_loss:
        total += report.double()
    torch.distributed.all_reduce(total)
    loss, tokens = total.tolist()
    return loss / max(tokens, 1.0), tokens

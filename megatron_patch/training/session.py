"""What a step needs, built once: model, wrappers, optimizer, schedule and guard."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_patch.data.loader import Loaders
from megatron_patch.monitor.hub import Monitor
from megatron_patch.parallel.setup import Layout
from megatron_patch.runtime.heartbeat import phase
from megatron_patch.runtime.watcher import Watcher
from megatron_patch.schema.run import RunConfig
from megatron_patch.training.finite import StepGuard
from megatron_patch.training.gate import gate_of
from megatron_patch.training.signals import StopFlags


@dataclass(slots=True)
class Session:
    """Everything a step needs."""

    run: RunConfig
    layout: Layout
    chunks: list[Any]
    """Wrapped model chunks of this rank: one, or one a virtual pipeline stage."""
    config: Any
    """Megatron-Core's TransformerConfig, which all chunks share."""
    optimizer: Any
    schedule: Any
    guard: StepGuard
    micro_batches: int
    """Of the step, or evaluation, that is going on, on this rank."""
    reads_data: bool
    """Whether this pipeline stage reads batches."""
    skipped: int = 0
    """Updates not taken since the run started."""
    hooks_enabled: bool = True
    """Whether hooks gather updated weights during the forward pass (``overlap_param_gather``)."""
    watchers: list[Watcher] = field(default_factory=list)
    """In the order in which every hook is called: the same on every rank."""

    @property
    def sequences(self) -> int:
        """Of the global batch of that step."""
        return self.micro_batches * self.run.training.micro_batch_size * self.layout.dp_size


def build_session(
    run: RunConfig, layout: Layout, loaders: Loaders, *, stop: StopFlags, monitor: Monitor
) -> tuple[Session, int]:
    """Build the parts of a session. Collective.

    Returns the session and the number of rows of the embedding.
    """
    from megatron.core.distributed import finalize_model_grads

    from megatron_patch.data.loader import needs_data
    from megatron_patch.data.tokenizers import build as build_tokenizer
    from megatron_patch.model.build import build_model
    from megatron_patch.training import optimizer as optimizers
    from megatron_patch.training.schedule import build_schedule

    vocab_size = build_tokenizer(run.data.tokenizer).vocab_size
    built = build_model(run, vocab_size=vocab_size)
    chunks = optimizers.wrap_chunks(run, built.chunks)
    optimizer, line = optimizers.build_optimizer(run, chunks)
    monitor.say(line)
    local = not run.parallel.overlap_grad_reduce
    guard = StepGuard(layout, stop, check=run.training.check_finite, local_flags=local)
    guard.watch(optimizer, gate_of(optimizer))

    def finalize(model: list[Any], num_tokens: Any = None, **options: Any) -> None:
        for watcher in session.watchers:
            watcher.before_reduction()
        with phase("reduction"):
            guard.before_reduction(model)
            finalize_model_grads(model, num_tokens, **options)

    session = Session(
        run=run,
        layout=layout,
        chunks=chunks,
        config=optimizers.connect(run, chunks, optimizer, finalize=finalize),
        optimizer=optimizer,
        schedule=build_schedule(run, optimizer),
        guard=guard,
        micro_batches=loaders.micro_batches,
        reads_data=needs_data(
            layout.pp_rank, layout.pp_size, documents=run.data.document_attention
        ),
        hooks_enabled=run.parallel.overlap_param_gather,
    )
    monitor.say(parameter_line(built.chunks, layout, built.vocab_size))
    return session, built.vocab_size


def parameter_line(chunks: list[Any], layout: Layout, padded_vocab: int) -> str:
    """Parameters of the whole model, counted over one replica. Collective."""
    from megatron.core.parallel_state import get_expert_data_parallel_world_size

    from megatron_patch.stability.gradients import counts_here

    count = torch.zeros(1, dtype=torch.float64, device=layout.device)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if counts_here(parameter):
                expert = not getattr(parameter, "allreduce", True)
                replicas = layout.dp_size * layout.cp_size
                if expert:  # over tensor parallelism as well, where that splits experts less
                    replicas = get_expert_data_parallel_world_size()
                count += parameter.numel() / replicas
    torch.distributed.all_reduce(count)
    return f"model: {round(count.item()):,} parameters, vocabulary padded to {padded_vocab:,}"

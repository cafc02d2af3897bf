"""What happens before the first step: process set-up, announcements, the parts of a session."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any

import torch

from megatron_patch.core_patches import quiet
from megatron_patch.parallel import setup
from megatron_patch.runtime import environment
from megatron_patch.runtime.heartbeat import PULSE
from megatron_patch.runtime.io_errors import may_pass
from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.training import determinism
from megatron_patch.training.finite import StepGuard, unwrap
from megatron_patch.training.gate import gate_of
from megatron_patch.training.recorder import tokens_per_step
from megatron_patch.training.rundir import (
    RunDirectory,
    check_data,
    leave_token,
    lies_outside,
    open_run,
    run_directory,
    sees_token,
)
from megatron_patch.training.signals import StopFlags

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from megatron_patch.checkpoint.megatron import Checkpointer
    from megatron_patch.data.loader import Loaders
    from megatron_patch.faults.watch import FaultWatch
    from megatron_patch.monitor.hub import Monitor
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.schema.run import Loaded, RunConfig
    from megatron_patch.stability.telemetry import Stability
    from megatron_patch.training.step import Session


def prepare_process(run: RunConfig) -> None:
    """Everything that must precede Megatron's import or CUDA's start.

    Raises:
        ConfigError: the ranks started, the GPUs or the environment do not fit the configuration.
    """
    setup.check_world_size(run, setup.launched_world_size())
    determinism.enforce(run)
    quiet.install()
    environment.hide_old_nvrx()
    if run.training.device == "cpu":
        from megatron_patch.core_patches import cpu_mode

        cpu_mode.install()
    elif not torch.cuda.is_available():
        raise ConfigError(
            [
                Problem(
                    "training.device",
                    "cuda, but PyTorch sees no GPU here; set training.device: cpu to train on the "
                    "CPU, or run 'megatron-patch doctor'",
                )
            ]
        )


def take_directory(loaded: Loaded, layout: Layout) -> RunDirectory | None:
    """The run directory on the first rank, None on the others; refused on all of them alike.

    Raises:
        ConfigError: the directory belongs to another run or cannot be used.
    """
    directory: RunDirectory | None = None
    run = loaded.config
    verdict: list[Any] = [[], False, {}]
    if layout.print_rank:
        axes = ("tp", "pp", "cp", "dp", "ep")
        sizes = {axis: getattr(layout, f"{axis}_size") for axis in axes}
        report = {"world_size": layout.world_size, **sizes, **environment.report()}
        directory, problems = open_run(loaded, report)
        tokens: dict[str, Path] = {}
        if directory is not None:
            if not directory.finished:
                problems = directory.take_store(run)
            if not problems:
                tokens, problems = _leave_tokens(run, directory)
        verdict = [problems, directory is not None and directory.finished, tokens]
    torch.distributed.broadcast_object_list(verdict, src=0)
    problems, finished, tokens = verdict
    for key, token in tokens.items():
        path = run_directory(run) if key == "run_dir" else run.checkpoint_directory
        problems += _one_directory(key, path, token, layout)
    if problems:
        if directory is not None:
            directory.close()
        raise ConfigError(problems)
    if directory is None and finished:
        return RunDirectory(run_directory(run), notes=[], finished=True, _lock=None)
    return directory


def _leave_tokens(run: RunConfig, directory: RunDirectory) -> tuple[dict[str, Path], list[Problem]]:
    """Files that the other nodes look for, by the key that names the directory; and what failed."""
    places = {"run_dir": directory.path}
    checkpoints = run.checkpoint_directory
    if not directory.finished and checkpoints.is_dir() and lies_outside(run):
        places["checkpoint.directory"] = checkpoints
    tokens: dict[str, Path] = {}
    for key, path in places.items():
        try:
            tokens[key] = leave_token(path)
        except OSError as error:
            for left in tokens.values():
                left.unlink(missing_ok=True)
            problem = Problem(key, f"{path}: {error.strerror}", may_pass=may_pass(error))
            return {}, [problem]
    return tokens, []


def _one_directory(key: str, path: Path, token: Path, layout: Layout) -> list[Problem]:
    """What speaks against every node having the first rank's directory. Collective.

    A node without the shared mount would start from scratch, or write checkpoints and logs where no
    other node finds them.
    """
    blind: list[Any] = [None] * layout.world_size
    seen = layout.local_rank != 0 or sees_token(path, token.name)
    torch.distributed.all_gather_object(
        blind, None if seen else f"{socket.gethostname()} (rank {layout.rank}): {path.absolute()}"
    )
    if layout.print_rank:
        token.unlink(missing_ok=True)
    missing = [who for who in blind if who is not None]
    if not missing:
        return []
    return [
        Problem(
            key,
            f"is not one directory on all nodes: what rank 0 wrote into {token.parent} on its node "
            f"is not seen by {', '.join(missing)}; mount the shared file system on every node, "
            "rank 0's included, and start in the same working directory or give an absolute path",
        )
    ]


def announce(monitor: Monitor, run: RunConfig, layout: Layout) -> None:
    """Start-up lines: versions, device, layout, batch."""
    found = environment.report() if layout.print_rank else {}
    names = ("megatron-patch-stable", "python", "torch", "triton", "megatron-core")
    versions = ", ".join(f"{n} {found.get(n)}" for n in names)
    commit = environment.short_commit(str(found.get("commit")))
    monitor.say(f"run {run.name}: {versions}, commit {commit}")
    optional = [
        f"{n} {found.get(n) or 'not installed'}" for n in ("transformer-engine", "apex", "cuda")
    ]
    monitor.say(f"optional: {', '.join(optional)}")
    if run.training.device == "cpu":
        threads = torch.get_num_threads()
        monitor.say(f"device: CPU mode, gloo and PyTorch's CPU kernels, {threads} thread(s) a rank")
    else:
        monitor.say(
            f"device: {found.get('gpu')}, CUDA {found.get('cuda')}, driver {found.get('driver')}, "
            f"NCCL {found.get('nccl')}"
        )
    axes = " x ".join(
        f"{axis.upper()}{getattr(layout, axis + '_size')}" for axis in ("tp", "cp", "pp", "dp")
    )
    extras = [f"EP{layout.ep_size}"] if layout.ep_size > 1 else []
    extras += ["sequence parallel"] if run.parallel.sequence_parallel else []
    if kinds := run.parallel.cp_comm_types:
        sizes = run.parallel.hierarchical_context_parallel_sizes
        extras.append("context parallel by " + " and ".join(kinds) + (f" {sizes}" if sizes else ""))
    if run.parallel.virtual_pipeline_model_parallel_size:
        extras.append(f"{run.parallel.virtual_pipeline_model_parallel_size} virtual stages")
    monitor.say(f"layout: {layout.world_size} rank(s), {', '.join([axes, *extras])}")
    t = run.training
    accumulate = t.global_batch_size // (t.micro_batch_size * layout.dp_size)
    monitor.say(
        f"batch: {t.global_batch_size} sequences of {run.model.seq_length} = "
        f"{tokens_per_step(run):,} tokens a step; micro-batch {t.micro_batch_size}, "
        f"{accumulate} accumulated; {t.precision}, {t.train_steps:,} steps"
    )
    monitor.say(_repeatability(run))
    for path in environment.other_copies():
        monitor.say(f"warning: another package named megatron_patch is on sys.path: {path}")


def _repeatability(run: RunConfig) -> str:
    if run.training.deterministic:
        return "deterministic: yes; a resume on the same layout and software repeats every bit"
    if run.training.device == "cpu":
        return "deterministic: not enforced (training.deterministic: false)"
    return (
        "deterministic: no; a resume agrees to rounding, not bitwise "
        "(training.deterministic: true does)"
    )


def build_session(
    run: RunConfig, layout: Layout, loaders: Loaders, *, stop: StopFlags, monitor: Monitor
) -> tuple[Session, int]:
    """Model, wrappers, optimizer, schedule and guard; and the padded vocabulary.

    Returns:
        The session and the number of rows of the embedding.
    """
    from megatron.core.distributed import finalize_model_grads

    from megatron_patch.data.loader import needs_data
    from megatron_patch.data.tokenizers import build as build_tokenizer
    from megatron_patch.model.build import build_model, padded_vocab_size
    from megatron_patch.training import optimizer as optimizers
    from megatron_patch.training.schedule import build_schedule
    from megatron_patch.training.step import Session

    vocab_size = build_tokenizer(run.data.tokenizer).vocab_size
    built = build_model(run, vocab_size=vocab_size)
    chunks = optimizers.wrap_chunks(run, built.chunks)
    optimizer, line = optimizers.build_optimizer(run, chunks)
    monitor.say(line)
    guard = StepGuard(
        layout,
        stop,
        check=run.training.check_finite,
        local_flags=not run.parallel.overlap_grad_reduce,
    )
    guard.watch(optimizer, gate_of(optimizer))

    def finalize(model: list[Any], num_tokens: Any = None, **options: Any) -> None:
        if session.faults is not None:
            session.faults.stragglers.passes_end()
        PULSE.enter("reduction")
        guard.before_reduction(model)
        finalize_model_grads(model, num_tokens, **options)

    config = optimizers.connect(run, chunks, optimizer, finalize=finalize)
    session = Session(
        run=run,
        layout=layout,
        chunks=chunks,
        config=config,
        optimizer=optimizer,
        schedule=build_schedule(run, optimizer),
        guard=guard,
        micro_batches=loaders.micro_batches,
        reads_data=needs_data(layout.pp_rank, layout.pp_size),
        hooks_enabled=run.parallel.overlap_param_gather,
    )
    monitor.say(parameter_line(built.chunks, layout, padded_vocab_size(run, vocab_size)))
    return session, padded_vocab_size(run, vocab_size)


def watch_stability(
    session: Session, monitor: Monitor, at_danger: Callable[[int], None]
) -> Stability:
    """Telemetry, early warning, guard and captures of this attempt; see there for ``at_danger``."""
    from megatron_patch.stability.telemetry import Stability

    return Stability(
        session.run,
        session.layout,
        session.chunks,
        [unwrap(chunk) for chunk in session.chunks],
        monitor=monitor,
        run_dir=run_directory(session.run),
        at_danger=at_danger,
    )


def watch_faults(session: Session, loaders: Loaders, monitor: Monitor) -> FaultWatch:
    """Spikes, stragglers and left-out batches of this attempt. Collective."""
    from megatron_patch.faults.watch import FaultWatch

    return FaultWatch(session, loaders, monitor, run_directory(session.run))


def refuse_repeated_crash(run: RunConfig, layout: Layout) -> None:
    """Stop when the ledger says that one step crashes every attempt. Collective.

    Raises:
        SameStepError: with the report; only where the launcher set a limit.
    """
    from megatron_patch.faults import ledger

    if ledger.LIMIT not in os.environ:
        return
    report: list[Any] = [None]
    if layout.print_rank:
        report = [ledger.check(run_directory(run))]
    torch.distributed.broadcast_object_list(report, src=0)
    if report[0] is not None:
        raise ledger.SameStepError(report[0])


def parameter_line(chunks: list[Any], layout: Layout, padded_vocab: int) -> str:
    """Parameters of the whole model, counted over one replica. Collective."""
    count = torch.zeros(1, dtype=torch.float64, device=layout.device)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if getattr(parameter, "shared", False):
                continue  # a pipeline stage's copy of the tied embedding
            # Replicated over tensor parallelism: counted once. Experts: over expert parallelism.
            split = getattr(parameter, "tensor_model_parallel", False)
            expert = not getattr(parameter, "allreduce", True)
            if layout.tp_rank == 0 or split or expert:
                share = _copies(layout, expert=expert)
                count += parameter.numel() / share
    torch.distributed.all_reduce(count)
    return f"model: {round(count.item()):,} parameters, vocabulary padded to {padded_vocab:,}"


def _copies(layout: Layout, *, expert: bool) -> float:
    """How many ranks hold the same (shard of a) parameter."""
    replicas = layout.dp_size * layout.cp_size
    return replicas / layout.ep_size if expert else replicas


def silence_other_ranks(layout: Layout) -> None:
    """Log records below errors come from the first rank only."""
    if not layout.print_rank:
        logging.getLogger("megatron_patch").setLevel(logging.ERROR)


def check_host_memory(checkpointer: Checkpointer, monitor: Monitor) -> None:
    """Say what a save takes of each node's memory; refuse what cannot be. Collective.

    Raises:
        ConfigError: the first save would end the run.
    """
    from megatron_patch.checkpoint import host_memory

    line, problems = host_memory.check(
        checkpointer.parts, checkpointer.run.checkpoint.optimizer_sharding, checkpointer.ranks
    )
    monitor.say(line)
    if problems:
        raise ConfigError(problems)


def keep_optimizer_kernel(session: Session) -> None:
    """A checkpoint carries its writer's optimizer flags: put this run's back."""
    if session.run.training.device == "cuda":
        from megatron_patch.core_patches.optimizer import use_fused_kernel

        use_fused_kernel(session.optimizer)


def check_data_identity(run: RunConfig, layout: Layout, loaders: Loaders, *, step: int) -> None:
    """Refuse to go on with other data, or another order, than the steps before had. Collective.

    Raises:
        ConfigError: the fingerprint in the run directory differs.
    """
    problems: list[Any] = [[]]
    if layout.print_rank:
        problems = [check_data(run, loaders.fingerprint, step=step)]
    torch.distributed.broadcast_object_list(problems, src=0)
    if problems[0]:
        raise ConfigError(problems[0])

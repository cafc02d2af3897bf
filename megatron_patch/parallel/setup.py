"""Process group, Megatron's parallel groups and every random stream of a rank.

layout = initialize(run)      # under torchrun, or alone: a world of one on a free port
...
destroy()
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch

from megatron_patch.runtime.environment import TORCHRUN_VARIABLES
from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.schema.run import RunConfig

PIPELINE_SEED_STRIDE = 100  # as Megatron-LM: stages draw different initial weights
AXES = ("tp", "pp", "cp", "dp", "ep")


_own_port: str | None = None
"""``MASTER_PORT`` that `_launch_environment` has chosen in this process."""


class LayoutError(ConfigError):
    """The parallel configuration does not fit the ranks that were started."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where this rank stands. ``<axis>_rank`` counts from 0 to ``<axis>_size`` - 1."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int

    @property
    def print_rank(self) -> bool:
        """Whether this rank writes to console, logs and the run directory."""
        return self.rank == 0

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts in global sums: last stage, one of the TP replicas."""
        return self.pp_rank == self.pp_size - 1 and self.tp_rank == 0

    def describe(self) -> str:
        """``rank 3 (tp 1, pp 0, cp 0, dp 1, ep 0)``."""
        where = ", ".join(f"{a} {getattr(self, a + '_rank')}" for a in AXES)
        return f"rank {self.rank} ({where})"

    def sizes(self, form: str) -> dict[str, int]:
        """World size, and that of every axis under ``form`` with its name."""
        sizes = {form.format(axis): getattr(self, f"{axis}_size") for axis in AXES}
        return {"world_size": self.world_size, **sizes}


def world_size_problems(run: RunConfig, world_size: int) -> Iterator[Problem]:
    """What does not fit ``world_size`` ranks: divisibility of ranks, experts and batch."""
    p, t = run.parallel, run.training
    replica = p.tensor_model_parallel_size * p.pipeline_model_parallel_size
    replica *= p.context_parallel_size
    if world_size % replica:
        yield Problem(
            "parallel",
            f"tensor x pipeline x context parallel = {replica} ranks hold one replica, which does "
            f"not divide the {world_size} ranks started; start a multiple of {replica} ranks",
        )
        return
    dp = world_size // replica
    per_step = t.micro_batch_size * dp
    sizes = (t.batch_size_rampup or [])[:2]  # the first, and what is added to it
    needed = per_step
    if p.virtual_pipeline_model_parallel_size is not None:
        needed *= p.pipeline_model_parallel_size  # see below
    if any(size % needed for size in sizes):
        yield Problem(
            "training.batch_size_rampup",
            f"{t.batch_size_rampup}: the first two must be multiples of {needed}: micro_batch_size "
            f"{t.micro_batch_size} x data-parallel size {dp} (x pipeline stages with virtual ones)",
        )
    if t.global_batch_size % per_step:
        yield Problem(
            "training.global_batch_size",
            f"{t.global_batch_size} is not a multiple of micro_batch_size x data-parallel size = "
            f"{t.micro_batch_size} x {dp} = {per_step}",
        )
    elif p.virtual_pipeline_model_parallel_size is not None:
        micro = t.global_batch_size // per_step
        if micro % p.pipeline_model_parallel_size:
            yield Problem(
                "training.global_batch_size",
                f"the interleaved schedule needs a multiple of "
                f"{p.pipeline_model_parallel_size} micro-batches a step (pipeline stages), and "
                f"{t.global_batch_size} / ({t.micro_batch_size} x {dp}) = {micro}",
            )
    expert_tp = p.expert_tensor_parallel_size or p.tensor_model_parallel_size
    expert_block = expert_tp * p.expert_model_parallel_size * p.pipeline_model_parallel_size
    if world_size % expert_block:
        yield Problem(
            "parallel.expert_model_parallel_size",
            f"expert tensor x expert x pipeline parallel = {expert_block} does not divide the "
            f"{world_size} ranks started",
        )


def check_world_size(run: RunConfig, world_size: int) -> None:
    """Refuse a world the configuration cannot be laid out over.

    Raises LayoutError: with every problem found.
    """
    problems = list(world_size_problems(run, world_size))
    if problems:
        raise LayoutError(problems)


def launched_world_size() -> int:
    """Ranks torchrun started, or 1 without it.

    Raises LayoutError: its variable is no number of ranks.
    """
    return _number("WORLD_SIZE", 1, 1 << 31) if os.environ.get("WORLD_SIZE") else 1


def _number(name: str, least: int, end: int) -> int:
    """One of torchrun's variables, in ``least`` .. ``end`` - 1."""
    text = os.environ[name]
    digits = text.isascii() and text.isdecimal() and len(text) <= 10
    if not digits or not least <= int(text) < end:
        problem = f"{name} is {text[:40]!r} in the environment, a number from {least} to {end - 1} "
        problem += "is needed: start ranks with torchrun"
        raise LayoutError([Problem("parallel", problem)])
    return int(text)


def _launch_environment() -> tuple[int, int, int, torch.distributed.Store | None]:
    """(rank, world size, local rank, store); fills in a world of one where torchrun did not.

    Its store listens from here on: a port that was only looked for could be another process's by
    the time it is used.

    Raises LayoutError: the environment holds some of torchrun's variables but not all, or none of
    their values.
    """
    store: torch.distributed.Store | None = None
    global _own_port
    have = [v for v in TORCHRUN_VARIABLES if os.environ.get(v)]
    own = _own_port is not None and os.environ.get("MASTER_PORT") == _own_port
    if own or not {"RANK", "WORLD_SIZE"} & set(have):
        store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        _own_port = str(store.port)
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=_own_port)
    elif missing := [v for v in TORCHRUN_VARIABLES if v not in have]:
        problem = f"{', '.join(have)} set but {', '.join(missing)} not: start ranks with torchrun"
        raise LayoutError([Problem("parallel", problem)])
    _number("MASTER_PORT", 1, 1 << 16)
    size = launched_world_size()
    return _number("RANK", 0, size), size, _number("LOCAL_RANK", 0, size), store


def _communication_environment(run: RunConfig) -> None:
    """Variables NCCL and CUDA read when they start; a value already set by the user wins."""
    # NVLink multicast needs a fabric manager in good health and gains nothing at these sizes.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if run.parallel.tensor_model_parallel_size > 1 or run.parallel.context_parallel_size > 1:
        # One hardware queue starts kernels in the order they were launched: communication of
        # tensor and context parallelism ahead of the work it hides behind.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def initialize(run: RunConfig) -> Layout:
    """Start torch.distributed and Megatron's groups, seed every stream, return the coordinates.

    Under CPU mode (``core_patches.cpu_mode.install`` must have run) the backend is gloo.

    Raises LayoutError: the configuration does not fit the ranks started, or the environment is
    incomplete, or there is no GPU for this rank.
    """
    rank, world_size, local_rank, store = _launch_environment()
    check_world_size(run, world_size)
    _communication_environment(run)
    cpu = run.training.device == "cpu"
    if cpu:
        device = torch.device("cpu")
    else:
        count = torch.cuda.device_count()
        if local_rank >= count:
            text = (
                f"cuda: local rank {local_rank} has no GPU, {count} visible; start at most "
                f"{count} ranks a node, or set training.device: cpu"
            )
            raise LayoutError([Problem("training.device", text)])
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=run.parallel.distributed_timeout_minutes)
    torch.distributed.init_process_group(
        "gloo" if cpu else "cpu:gloo,cuda:nccl",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if cpu else device,
        store=store,
    )
    _megatron_groups(run)
    layout = _layout(rank, world_size, local_rank, device=device)
    seed_streams(run.training.seed, layout.pp_rank)
    return layout


def _megatron_groups(run: RunConfig) -> None:
    from megatron.core import parallel_state

    p = run.parallel
    # A transfer of context parallelism hides behind attention kernels that fill the GPU: its blocks
    # must be placed before those still waiting. Priority is a property of NCCL's groups alone.
    hurried = ["cp", "hcp"] if run.training.device == "cuda" and p.context_parallel_size > 1 else []
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tensor_model_parallel_size,
        pipeline_model_parallel_size=p.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline_model_parallel_size,
        context_parallel_size=p.context_parallel_size,
        hierarchical_context_parallel_sizes=p.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=p.expert_model_parallel_size,
        expert_tensor_parallel_size=p.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(p.distributed_timeout_minutes)),
        create_gloo_process_groups=True,
        high_priority_stream_groups=hurried,
    )


def seed_streams(seed: int, pp_rank: int) -> None:
    """Python, NumPy, torch and Megatron's tracked streams, as Megatron-LM seeds them."""
    from megatron.core import tensor_parallel

    seed += PIPELINE_SEED_STRIDE * pp_rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _layout(rank: int, world_size: int, local_rank: int, *, device: torch.device) -> Layout:
    from megatron.core import parallel_state as ps

    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "dp": "data",
             "ep": "expert_model"}  # fmt: skip
    places = {
        f"{axis}_{short}": getattr(ps, f"get_{name}_parallel_{what}")()
        for axis, name in names.items()
        for short, what in (("rank", "rank"), ("size", "world_size"))
    }
    return Layout(rank, world_size, local_rank, device, **places)


def destroy() -> None:
    """Leave every group; safe when none was started."""
    if not torch.distributed.is_initialized():
        return
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()

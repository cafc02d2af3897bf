"""Rank processes that start once, form their groups, and then play many cases.

    with Ranks(4) as ranks:
        answers = ranks.play("attention", case)       # what every rank returned, or what it raised

Functions a rank can play are in `PLAYS`. With ``device="cuda"`` the backend is NCCL.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import forked

ANSWER_SECONDS = 300


class World:
    """The groups of one rank: of neighbours 2, 4, 8 ... at a time, and their two levels 2 x n/2."""

    def __init__(self, rank: int, size: int, device: str, timeout: float) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.device = rank, size, device
        # A group of its own: a short timeout must not end the start on a busy machine.
        limit = datetime.timedelta(seconds=timeout)
        self.groups: dict[int, Any] = {}
        self.hosts: dict[int, Any] = {}
        self.levels: dict[int, tuple[Any, Any]] = {}
        for n in sorted({size, *(n for n in (2, 4, 8) if n < size and size % n == 0)}):
            firsts = range(0, size, n)
            blocks = [dist.new_group(list(range(i, i + n)), timeout=limit) for i in firsts]
            self.groups[n] = self.hosts[n] = blocks[rank // n]
            if device != "cpu":  # objects travel between hosts
                hosts = [dist.new_group(list(range(i, i + n)), backend="gloo") for i in firsts]
                self.hosts[n] = hosts[rank // n]
            if n % 4 == 0:
                across = [
                    dist.new_group(list(range(i, i + n, 2))) for f in firsts for i in (f, f + 1)
                ]
                self.levels[n] = self.groups[2], across[2 * (rank // n) + rank % 2]


def _attention(world: World, case: Any) -> Any:
    from cp_cases import run_rank

    return run_rank(case, world.groups[case.size], world.levels.get(case.size), world.device)


def _many(world: World, cases: list[Any]) -> Any:
    return [_attention(world, case) for case in cases]


def _judged(world: World, cases: list[Any]) -> list[str]:
    """What is wrong with the cases that this rank judges: ranks take turns, each for its group.

    Where a case needs fewer ranks than there are, the groups share the cases out.
    """
    import torch.distributed as dist
    from cp_cases import collect, complaints, make_inputs, truth, uncut

    wrong = []
    for number, case in enumerate(cases):
        turn, block = divmod(number, world.size // case.size)
        if block != world.rank // case.size:
            continue
        mine = _attention(world, case)
        judge = block * case.size + turn % case.size
        parts: list[Any] | None = [None] * case.size if world.rank == judge else None
        dist.gather_object(mine, parts, dst=judge, group=world.hosts[case.size])
        if parts is not None:
            given = make_inputs(case, world.device)
            exact = {name: x.cpu() for name, x in truth(case, given).items()}
            whole = {name: x.cpu() for name, x in uncut(case, given).items()}
            said = complaints(case, collect(case, parts), exact, whole)
            wrong += [f"{case}: {text}" for text in said]
    return wrong


def _die(world: World, case: Any, victim: int, how: str) -> Any:
    """Run a case while one rank is dead or stopped; what the others get to read."""
    import time

    import torch.distributed as dist

    from megatron_patch.context_parallel.failure import RankLostError

    dist.barrier()
    _attention(world, case)  # everyone is connected
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    begin = time.monotonic()
    try:
        _attention(world, case)
    except RankLostError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("nothing was raised")


def _watch(world: World, victim: int, silence: float) -> list[str]:
    """What the survivors' threads say after one rank has been killed."""
    import time

    import torch.distributed as dist

    from megatron_patch.context_parallel import watch

    watch.PULSE_SECONDS, watch.SILENCE_SECONDS = silence / 10, silence
    heard: list[str] = []
    group = world.groups[world.size]
    own = watch.watch(group, watch.Traffic(), timeout=600.0)
    assert own is not None
    own._log = heard.append
    dist.barrier()
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 60
    while time.monotonic() < end and not any(f"lost rank {victim} " in text for text in heard):
        time.sleep(0.05)
    return heard


def _call(world: World, case: Any) -> Any:
    """(function that runs forward and backward, its inputs) of this rank, for CUDA."""
    import torch
    from cp_cases import cut, make_inputs

    from megatron_patch.context_parallel.api import context_parallel_attention

    given = make_inputs(case, world.device)
    leaves = [
        cut(case, x, world.rank).clone().requires_grad_() for x in (given.q, given.k, given.v)
    ]
    dout = cut(case, given.dout, world.rank)
    options = case.attention()
    if case.thd:
        real, padded = case.documents(world.device)
        options |= {"cu_seqlens": real, "cu_seqlens_padded": padded}
    if case.dropout_p:
        options["dropout_seed"] = torch.tensor(77, device=world.device)

    def run() -> list[Any]:
        out = context_parallel_attention(
            *leaves,
            group=world.groups[case.size],
            mode=case.mode,
            hierarchical=world.levels.get(case.size),
            sinks=given.sinks,
            return_max_logits=True,
            **options,
        )
        return [out[0], *torch.autograd.grad(out[0], leaves, dout)]

    return run, leaves


def _no_sync(world: World, case: Any) -> Any:
    import torch

    run, _ = _call(world, case)
    run()  # connects, compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _graph(world: World, case: Any) -> bool:
    import torch

    run, leaves = _call(world, case)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = run()
    with torch.no_grad():
        for x in leaves:
            x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    return all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


def _core(world: World, case: Any) -> Any:
    from core_on_ranks import core_attention

    return core_attention(world, case)


PLAYS = {
    "attention": _attention,
    "many": _many,
    "judged": _judged,
    "die": _die,
    "core": _core,
    "watch": _watch,
    "no_sync": _no_sync,
    "graph": _graph,
}


def _serve(
    connection: Any, path: list[str], rank: int, size: int, store: str, device: str, timeout: float
) -> None:
    sys.path[:] = path
    if device == "cpu":
        import interpreter_shim

        os.environ["TRITON_INTERPRET"] = "1"
        interpreter_shim.install_on_import()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=max(timeout, 120)),
    )
    world = World(rank, size, device, timeout)
    forked.answer_calls(connection, lambda name, given: PLAYS[name](world, *given))
    # Leaving a group in good order means waiting for the others, who leave when they are told to.
    os._exit(0)


class Ranks(forked.Served):
    """``size`` ranks of one process group."""

    def __init__(self, size: int, *, device: str = "cpu", timeout: float = 120) -> None:
        # A file and not a port: another test may take the port between choosing and using it.
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        each = [(rank, size, store, device, timeout) for rank in range(size)]
        super().__init__(_serve, each, cpu=device == "cpu")

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._folder.cleanup()

    def play(self, name: str, *arguments: Any, lost: int | None = None) -> list[Any]:
        """Every rank's answer; ``lost`` is one that will not give any."""
        for pipe in self.pipes:
            pipe.send((name, arguments))
        there = [rank for rank in range(len(self.pipes)) if rank != lost]
        found = self.answers(f"{name} {arguments}", there, ANSWER_SECONDS)
        if lost is not None:
            found.insert(lost, None)
        return found

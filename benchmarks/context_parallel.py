# ruff: noqa: E402  (the packages lie beside this folder)
"""Time context-parallel attention, every mode beside its peers.

    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --minutes 25
    torchrun --nproc-per-node 4 benchmarks/context_parallel.py --smoke --out /tmp/smoke

One sequence of 8k to 512k tokens, head dim 128, 32 query and 8 key/value heads, BF16, over 1, 2, 4
and 8 of the ranks started (the others wait). Results go to the part ``speed`` of
docs/assets/context_parallel.json after every cell: the same command continues a run that was
stopped or killed, and the cell that killed it is recorded as such and left out. With ``--out``
elsewhere, a result in docs/assets of the same sources, GPU and versions is continued there. `cells`
says what is measured and in which order; what does not fit into the minutes that are left makes
room for what does.

TFLOP/s count 2 h s^2 d operations forward (causal) and 2.5 times as many backward, divided by time
and ranks. Beside them stands the same kernel on one GPU with the same work: one sequence of s /
sqrt(ranks) tokens, once while the other GPUs are idle ("kernel"), and once while all of them do the
same ("kernel, every GPU": no transfer, the slowest counts). Times are the slowest rank's median of
CUDA-event intervals. ``no_transfer_ms`` is the time with transfers left out; what is computed on
then is whatever memory held, which may take less power. Outputs and gradients of short sequences
are compared with attention over the whole sequence before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kernels"), str(HERE.parent)]  # not installed? fine
import context_parallel_peers as peers
import machine
from machine import context_flops, same_work

from megatron_patch.context_parallel.api import context_parallel_attention
from megatron_patch.context_parallel.layout import positions, shard
from stable_attention.dispatch import SELECTED

PASSES = 8  # of forward and backward, the one without transfers included
SLOW = 350e12  # operations a second of a slow system, with compilation left out
BLOCK = 64  # random inputs are drawn in blocks of this many tokens, whoever holds them
COMPARED_TOKENS = 8192  # longest sequence whose outputs are compared
COLLECTIVE_MINUTES = 3.0
OURS = ("p2p", "all_gather", "a2a", "a2a+p2p")
PORTABLE = "p2p, portable kernels"
KERNEL, BUSY = "kernel", "kernel, every GPU"
GATHER = "all-gather + SDPA"
ENGINE = "Transformer Engine, p2p"
# Whether key/value heads stay grouped or are repeated first, and SDPA's backend.
RINGS = {"torch, flash": (False, "flash"), "torch, cuDNN": (True, "cudnn")}


@dataclass(frozen=True)
class Problem:
    """What is attended: heads, widths and type of the inputs."""

    heads: int = 32
    kv_heads: int = 8
    d: int = 128
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Cell:
    """One thing to measure."""

    system: str
    ranks: int
    tokens: int
    causal: bool = True

    @property
    def key(self) -> str:
        return f"{self.system}, {self.ranks} ranks, {self.tokens} tokens, causal"


def cells(args: argparse.Namespace, world: int) -> Iterator[Cell]:
    """Everything to measure, without repeats: the middle length, p2p at all others, then the rest.

    Middle lengths come first, and all ranks before fewer.
    """
    lengths = sorted(args.lengths, key=lambda s: abs(math.log2(s / 131072)))
    plan = itertools.chain(
        _of_lengths(lengths[:1], args, world),
        (c for c in _of_lengths(lengths, args, world) if c.system in (KERNEL, OURS[0])),
        _of_lengths(lengths, args, world),
    )
    return iter(dict.fromkeys(plan))


def _of_lengths(lengths: Sequence[int], args: argparse.Namespace, world: int) -> Iterator[Cell]:
    for tokens in lengths:
        for ranks in sorted((n for n in args.ranks if n <= world), reverse=True):
            systems = [KERNEL] if ranks == 1 else _systems(ranks, args.problem)
            share = same_work(tokens, ranks, BLOCK)
            yield Cell(KERNEL, 1, share)
            if ranks > 1 and not smoke(args.problem):
                yield Cell(BUSY, ranks, share)
            yield from (Cell(name, ranks, tokens) for name in systems)


def _systems(ranks: int, problem: Problem) -> list[str]:
    names = ["p2p", PORTABLE, GATHER, "a2a", *RINGS, "all_gather", "a2a+p2p", ENGINE]
    left_out = {"a2a+p2p"} if ranks < 4 else set()
    if smoke(problem):
        left_out.add(PORTABLE)
    if importlib.util.find_spec("transformer_engine") is None or smoke(problem):
        left_out.add(ENGINE)
    if problem.heads % ranks:
        left_out.add("a2a")
    return [name for name in names if name not in left_out]


def smoke(problem: Problem) -> bool:
    """Whether this is the test on CPUs."""
    return problem.dtype is not torch.bfloat16


def seconds_needed(cell: Cell, problem: Problem) -> float:
    """What a cell takes at least, so that none is begun that cannot end in time."""
    if smoke(problem):
        return 0.0
    work = context_flops(asdict(problem), cell.tokens)
    work /= 1 if cell.system == BUSY else cell.ranks
    return 8.0 + PASSES * work / SLOW


class Bench:
    """Groups, inputs and clocks of one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.problem, self.cuda = args, args.problem, not args.smoke
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else "cpu"
        wait = timedelta(minutes=COLLECTIVE_MINUTES)
        # Ranks without work wait on gloo: waiting in NCCL would occupy their GPU.
        self.everyone = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        self.groups: dict[int, Any] = {}
        self.hosts: dict[int, Any] = {}
        self.levels: dict[int, tuple[Any, Any]] = {}
        for n in sorted({1, *(n for n in args.ranks if n <= self.world)}):
            self.groups[n] = self._group(range(n), wait)
            self.hosts[n] = dist.new_group(range(n), backend="gloo", timeout=wait)
            if n >= 4:
                self.levels[n] = self._two_levels(n, wait)

    def _group(self, ranks: Sequence[int], wait: timedelta) -> Any:
        """As the trainer's: transfers come before the kernels they hide behind."""
        options = None
        if self.cuda:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = wait
        return dist.new_group(list(ranks), timeout=wait, pg_options=options)

    def _two_levels(self, n: int, wait: timedelta) -> tuple[Any, Any]:
        """(pairs of neighbors for a2a, every second rank for the ring), as Megatron-Core's."""
        pairs = [self._group([i, i + 1], wait) for i in range(0, n, 2)]
        rings = [self._group(range(i, n, 2), wait) for i in (0, 1)]
        return pairs[min(self.rank, n - 1) // 2], rings[self.rank % 2]

    def inputs(self, tokens: int, ranks: int, rank: int) -> list[torch.Tensor]:
        """q, k, v (leaves) and dO of a rank's zigzag shard, [s / ranks, 1, heads, d]."""
        p = self.problem
        widths = [p.heads, p.kv_heads, p.kv_heads, p.heads]
        blocks = []
        # A block's numbers depend on its place in the sequence alone.
        for first in positions(tokens, rank=rank, size=ranks)[::BLOCK].tolist():
            generator = torch.Generator(self.device).manual_seed(first)
            shape = (BLOCK, 1, sum(widths), p.d)
            block = torch.randn(shape, generator=generator, device=self.device)
            blocks.append(block.to(p.dtype))
        parts = torch.cat(blocks).split(widths, dim=2)
        return [x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in parts]

    @contextlib.contextmanager
    def system(self, cell: Cell, *, transfers: bool = True) -> Iterator[peers.Attention]:
        """The cell's attention over [s / ranks, 1, heads, d]."""
        group = self.groups[cell.ranks]
        if cell.system in (KERNEL, BUSY) and self.cuda:
            from stable_attention import stable_attention

            def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                q, k, v = (x.transpose(0, 1) for x in (q, k, v))
                out = stable_attention(q, k, v, causal=True)
                assert isinstance(out, torch.Tensor)
                return out.transpose(0, 1)

            yield kernel
        elif cell.system in (*OURS, PORTABLE, KERNEL):
            options: dict[str, Any] = {"mode": cell.system if cell.system in OURS else OURS[0]}
            if cell.system == "a2a+p2p":
                options["hierarchical"] = self.levels[cell.ranks]
            options |= {
                "group": group,
                "causal": True,
                "backend": "stable_flash" if self.cuda else "reference",
                "transfers": transfers,
            }
            only = {SELECTED: "triton"} if cell.system == PORTABLE else {}
            with mock.patch.dict(os.environ, only):
                yield lambda q, k, v: context_parallel_attention(q, k, v, **options)
        elif cell.system == GATHER:
            block: Any = peers.Repeated(peers.CpuKernel)
            if self.cuda:
                block = peers.cudnn_kernel(self.device, self.problem.d)
            yield peers.heads_first(lambda q, k, v: peers.AllGather.apply(q, k, v, group, block))
        elif cell.system == ENGINE:
            yield peers.transformer_engine(group, **asdict(self.problem))
        else:
            grouped, backend = RINGS[cell.system]
            ring = peers.torch_ring(group, cell.tokens, grouped=grouped, backend=backend)
            with ring as attend:
                yield peers.heads_first(attend)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Times, memory and errors of a cell, as this rank sees them."""
        busy = cell.system == BUSY
        place = (1, 0) if busy else (cell.ranks, self.rank)
        q, k, v, dout = self.inputs(cell.tokens, *place)
        found: dict[str, Any] = {}
        with self.system(cell) as attend:
            step = peers.Step(attend, (q, k, v), dout)
            if cell.tokens <= COMPARED_TOKENS and not busy:
                found |= self.errors(cell, step)
            if self.cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
            found["total_ms"] = self.interval(cell.ranks, step.both)
            if self.cuda:
                found["peak_mib"] = round((torch.cuda.max_memory_allocated() - base) / 2**20, 1)
            found["forward_ms"] = self.interval(cell.ranks, step.forward)
        if cell.system in (*OURS, PORTABLE):
            with self.system(cell, transfers=False) as attend:
                step = peers.Step(attend, (q, k, v), dout)
                found["no_transfer_ms"] = self.interval(cell.ranks, step.both)
        return found

    def errors(self, cell: Cell, step: peers.Step) -> dict[str, float]:
        """Relative RMS distance of output and gradients to attention over the whole sequence."""
        q, k, v, dout = self.inputs(cell.tokens, 1, 0)

        def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (peers.repeat_heads(x, q) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        expected = peers.Step(peers.heads_first(whole), (q, k, v), dout).results()
        mine = [shard(x, rank=self.rank, size=cell.ranks, dim=0).float() for x in expected]
        return {
            f"error_{name}": float((a.float() - b).norm() / b.norm())
            for name, a, b in zip(("out", "dq", "dk", "dv"), step.results(), mine, strict=True)
        }

    def interval(self, ranks: int, run: Callable[[], object]) -> float:
        """Median time of ``run`` in ms; all ranks repeat as often as the slowest can afford."""
        run()
        times = [self.once(run)]
        first = torch.tensor(times[0])
        dist.all_reduce(first, op=dist.ReduceOp.MAX, group=self.hosts[ranks])
        repeats = min(20, int(self.args.budget_ms / float(first)))
        times += [self.once(run) for _ in range(repeats)]
        return round(statistics.median(times), 4)

    def once(self, run: Callable[[], object]) -> float:
        """One pass in ms."""
        elapsed = machine.interval(run, cuda=self.cuda)
        if self.cuda:
            torch.cuda.synchronize()
        return elapsed()


class Record:
    """The result: written by the first rank after every cell, read back by the next run."""

    def __init__(self, folder: Path | None, args: argparse.Namespace) -> None:
        self.folder, self.part = folder or machine.RESULTS, "smoke" if args.smoke else "speed"
        self.content: dict[str, Any] = machine.describe() | {
            "sources": machine.context_digest(),
            "problem": asdict(args.problem) | {"dtype": str(args.problem.dtype)},
            "block": BLOCK,
            "complete": False,
            "cells": {},
        }
        folders, keys = (self.folder, machine.RESULTS), ("sources", "problem")
        old = machine.earlier("context_parallel", self.part, self.content, folders, keys=keys)
        self.content["cells"] = old["cells"] if old else {}
        for cell in self.content["cells"].values():
            if cell.pop("running", False):
                cell["error"] = "the run ended while it measured this"

    def done(self, cell: Cell) -> bool:
        return cell.key in self.content["cells"]

    def put(self, cell: Cell, figures: dict[str, Any]) -> None:
        self.content["cells"][cell.key] = {**asdict(cell), **figures}
        self.write()

    def write(self) -> None:
        name, part = "context_parallel", self.part
        machine.write_result(name, self.content, self.folder, part=part, head={})


def slowest(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest figure of all ranks, rounded errors included; or the first error."""
    for part in parts:
        if "error" in part:
            return {"error": part["error"]}
    return {name: max(part[name] for part in parts) for name in parts[0]}


def run(bench: Bench, record: Record | None) -> None:
    """Measure what is not measured yet, until the time is over. The first rank decides."""
    args = bench.args
    end = args.began + args.minutes * 60
    complete = True
    for cell in cells(args, bench.world):
        go: list[Any] = [None]
        if record is not None:
            go = ["skip" if record.done(cell) else "go"]
            left = end - time.monotonic()
            if go == ["go"] and left < seconds_needed(cell, args.problem):
                complete = False
                go = ["stop" if left < 0 else "skip"]
        dist.broadcast_object_list(go, src=0, group=bench.everyone)
        if go == ["stop"]:
            break
        if go == ["skip"]:
            continue
        if record is not None:
            print(f"{time.monotonic() - args.began:.0f} s: {cell.key} ...", flush=True)
            record.put(cell, {"running": True})
        mine: dict[str, Any] | None = None
        if bench.rank < cell.ranks:
            try:
                mine = bench.measure(cell)
            except Exception as error:
                mine = {"error": machine.fault(error)}
        parts: list[Any] = [None] * bench.world
        dist.all_gather_object(parts, mine, group=bench.everyone)
        if record is not None:
            figures = slowest([part for part in parts if part is not None])
            record.put(cell, figures)
            print(f"{time.monotonic() - args.began:.0f} s: {cell.key} {figures}", flush=True)
    if record is not None:
        record.content["complete"] = complete
        record.write()


def start(args: argparse.Namespace) -> None:
    """Process group and device of a rank torchrun started."""
    # As parallel/setup.py: no multicast, and kernels start in the order they were launched.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    wait = timedelta(minutes=COLLECTIVE_MINUTES)
    if args.smoke:
        dist.init_process_group("gloo", timeout=wait)
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # No device_id: with one, a rank outside of a new group takes part in an ncclCommSplit, even if
    # the group is gloo's and its members take no part in it; then it waits forever.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=wait)


def arguments() -> argparse.Namespace:
    parser = machine.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**i for i in range(13, 20)])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--minutes", type=float, default=25.0, help="stop after this long")
    parser.add_argument("--budget-ms", type=float, default=1000.0, help="per figure of a cell")
    parser.add_argument("--smoke", action="store_true", help="tiny, on CPUs: proves the script")
    args = parser.parse_args()
    args.began = time.monotonic()
    args.problem = Problem()
    if args.smoke:
        args.problem = Problem(heads=8, kv_heads=2, d=16, dtype=torch.float32)
        args.lengths, args.budget_ms = [512], 1.0
        args.ranks = [1, 2, 4]
        if args.out == machine.RESULTS:
            parser.error("--smoke: name a folder with --out; its figures mean nothing")
    for tokens in args.lengths:
        if tokens % (2 * BLOCK * max(args.ranks)):
            parser.error(f"--lengths {tokens}: multiples of {2 * BLOCK * max(args.ranks)}, please")
    return args


def main() -> int:
    args = arguments()
    start(args)
    record = Record(args.out, args) if dist.get_rank() == 0 else None
    run(Bench(args), record)
    dist.destroy_process_group()
    return int(record is not None and args.smoke and not proven(record.content))


def proven(result: dict[str, Any]) -> bool:
    """Whether every system a CPU can run computed attention over the whole sequence."""
    good = True
    for key, cell in result["cells"].items():
        if cell["system"] in RINGS:  # PyTorch's prototype has no kernel for CPUs
            continue
        errors = [cell.get(f"error_{x}", math.inf) for x in ("out", "dq", "dk", "dv")]
        if not max(errors) < 1e-5:
            print(f"wrong: {key}: {cell}")
            good = False
    return good and bool(result["cells"])


if __name__ == "__main__":
    sys.exit(main())

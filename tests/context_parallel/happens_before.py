"""A model checker for what gloo cannot show: streams, memory reuse, and the order of NCCL's calls.

    with recorded(patch) as devices:
        emulate(...)                    # the real engine, movement, heads and communicator
    assert not races(devices)           # by vector clocks, for every byte
    assert not stuck(devices)           # transfers replayed as NCCL runs them

What is modeled, as torch 2.11 and 2.13 do it: a group has one stream per rank; a transfer started
there waits for what the rank's compute stream has queued so far; ``work.wait()`` orders the compute
stream after it and drops the references the work held; the caching allocator gives freed memory to
the compute stream at once; transfers of a group run one after another; a batch of sends and
receives ends when all of its partners have met theirs, in the order in which they were named.
Every tensor operation between is seen by a dispatch mode and belongs to the compute stream.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import emulate
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_patch.context_parallel import communicator

COMPUTE = "compute"
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """Bytes [first, last) of a storage, touched at ``time`` of a stream."""

    stream: str
    time: int
    first: int
    last: int
    write: bool
    what: str


@dataclass
class Batch:
    """One call of NCCL on one rank: ops are (``send``/``recv``/``all``, global peer, bytes)."""

    rank: int
    group: str
    ops: list[tuple[str, int, int]]
    what: str
    clock: Clock
    left: list[tuple[str, int, int]] = field(default_factory=list)
    started: bool = False


@dataclass
class Kernel:
    """A chunk primitive on the compute stream, for overlap."""

    name: str
    clock: Clock


class Device:
    """One rank's GPU: clocks of its streams, accesses to its memory, its program."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.accesses: dict[int, list[Access]] = defaultdict(list)
        self.storages: dict[int, StorageWeakRef] = {}
        self.program: list[tuple[str, Batch | None]] = []  # "op", "batch", "wait"
        self.kernels: list[Kernel] = []
        self.problems: list[str] = []

    def tick(self, stream: str) -> Clock:
        self.clocks[stream][stream] = self.clocks[stream].get(stream, 0) + 1
        return self.clocks[stream]

    def order(self, stream: str, after: Clock) -> None:
        """What ``stream`` does from now on comes after ``after``."""
        mine = self.clocks[stream]
        for name, time in after.items():
            mine[name] = max(mine.get(name, 0), time)

    def touch(self, stream: str, x: torch.Tensor, *, write: bool, what: str) -> None:
        """An access now; a problem unless it is ordered after all that conflict with it."""
        if not x.numel():
            return
        ref = StorageWeakRef(x.untyped_storage())
        self.storages.setdefault(ref.cdata, ref)
        first = x.storage_offset() * x.element_size()
        extent = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
        clock = self.clocks[stream]
        now = Access(stream, clock[stream], first, first + extent * x.element_size(), write, what)
        for old in self.accesses[ref.cdata]:
            apart = old.last <= now.first or now.last <= old.first
            if old.stream == stream or apart or not (old.write or write):
                continue
            if clock.get(old.stream, 0) < old.time:
                self.problems.append(f"rank {self.rank}: {what} races with {old.what}")
        self.accesses[ref.cdata].append(now)

    def sweep(self) -> None:
        """Memory freed since the last call goes back to the compute stream: is that safe?"""
        clock = self.clocks[COMPUTE]
        for key in [k for k, ref in self.storages.items() if ref.expired()]:
            for old in self.accesses.pop(key, []):
                if old.stream != COMPUTE and clock.get(old.stream, 0) < old.time:
                    text = f"rank {self.rank}: memory freed while under way: {old.what}"
                    self.problems.append(text)
            del self.storages[key]

    def compute(self, reads: list[torch.Tensor], writes: list[torch.Tensor], what: str) -> None:
        self.tick(COMPUTE)
        if not self.program or self.program[-1][0] != "op":
            self.program.append(("op", None))
        for x in reads:
            self.touch(COMPUTE, x, write=False, what=what)
        for x in writes:
            self.touch(COMPUTE, x, write=True, what=what)


FRESH = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Recorder(TorchDispatchMode):
    """Every operation of a rank, as an access of its compute stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.device.sweep()
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        reads, writes = [], []
        for number, spec in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(spec.name)
            into = writes if spec.alias_info is not None and spec.alias_info.is_write else reads
            into += [x for x in _flat(value) if isinstance(x, torch.Tensor)]
        known = {StorageWeakRef(x.untyped_storage()).cdata for x in [*reads, *writes]}
        made = [
            x
            for x in _flat(out)
            if isinstance(x, torch.Tensor)
            and StorageWeakRef(x.untyped_storage()).cdata not in known
        ]
        name = func._schema.name.removeprefix("aten::")
        if name not in FRESH and (made or writes):  # else a view, or memory nobody has touched
            self.device.compute(reads, [*writes, *made], name)
        return out


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


class Group:
    """Stands for a process group of one rank."""

    def __init__(self, device: Device, exchange: Any, name: Any, ranks: list[int]) -> None:
        self.device, self.exchange, self.name, self.ranks = device, exchange, name, ranks
        self.rank = ranks.index(device.rank)

    def begin(self, what: str, ops: list[tuple[str, int, torch.Tensor]]) -> Work:
        """Queue a call; ops name members of this group."""
        device, stream = self.device, f"nccl {self.name}"
        device.sweep()
        device.order(stream, device.clocks[COMPUTE])
        clock = device.tick(stream)
        for kind, peer, x in ops:
            assert x.is_contiguous(), f"{what}: not contiguous"
            assert x.numel(), f"{what}: no elements"
            text = f"{what} ({kind} {peer})"
            device.touch(stream, x, write=kind != "send", what=text)
        sizes = [(kind, self.ranks[peer], x.nbytes) for kind, peer, x in ops]
        batch = Batch(device.rank, str(self.name), sizes, what, dict(clock), list(sizes))
        device.program.append(("batch", batch))
        return Work(device, batch, [x for _, _, x in ops])

    def move(self, ops: list[tuple[str, int, torch.Tensor]]) -> None:
        """Hand the data over, outside of what is recorded."""
        with _disable_current_modes():
            for kind, peer, x in ops:
                if kind == "send":
                    self.exchange.put((self.name, self.rank, peer), x)
            for kind, peer, x in ops:
                if kind == "recv":
                    x.copy_(self.exchange.get((self.name, peer, self.rank)))


class Work:
    """As `ProcessGroupNCCL` returns it."""

    def __init__(self, device: Device, batch: Batch, stash: list[torch.Tensor]) -> None:
        self.device, self.batch, self.stash = device, batch, stash

    def wait(self) -> None:
        self.device.order(COMPUTE, self.batch.clock)
        self.device.program.append(("wait", self.batch))
        self.stash = []


def _fake_dist() -> SimpleNamespace:
    """The part of ``torch.distributed`` that `communicator` uses."""

    def batch(ops: list[tuple[str, torch.Tensor, Group, int]]) -> list[Work]:
        group = ops[0][2]
        named = [(kind, peer, x) for kind, x, _, peer in ops]
        work = group.begin(f"batch of {len(ops)}", named)
        group.move(named)
        return [work]

    def all_gather(out: torch.Tensor, x: torch.Tensor, *, group: Group, async_op: bool) -> Work:
        assert async_op
        work = group.begin("all_gather", [("all", group.rank, out)])
        group.device.touch(f"nccl {group.name}", x, write=False, what="all_gather (its input)")
        work.stash.append(x)
        parts = out.view(len(group.ranks), -1)
        others = [r for r in range(len(group.ranks)) if r != group.rank]
        with _disable_current_modes():
            parts[group.rank].copy_(x)
        group.move([("send", r, x) for r in others] + [("recv", r, parts[r]) for r in others])
        return work

    def all_reduce(x: torch.Tensor, *, op: Any, group: Group, async_op: bool) -> Work:
        work = group.begin("all_reduce", [("all", group.rank, x)])
        with _disable_current_modes():
            others = [r for r in range(len(group.ranks)) if r != group.rank]
            parts = [torch.empty_like(x) for _ in others]
            swap = [("send", r, x) for r in others]
            group.move(swap + [("recv", r, p) for r, p in zip(others, parts, strict=True)])
            for part in parts:
                torch.maximum(x, part, out=x)
        return work

    return SimpleNamespace(
        P2POp=lambda kind, x, *, group, group_peer: (kind, x, group, group_peer),
        isend="send",
        irecv="recv",
        batch_isend_irecv=batch,
        all_gather_into_tensor=all_gather,
        all_reduce=all_reduce,
        get_rank=lambda group: group.rank,
        get_world_size=lambda group: len(group.ranks),
        ReduceOp=SimpleNamespace(MAX="max", SUM="sum"),
        DistError=RuntimeError,
    )


@contextlib.contextmanager
def recorded(patch: Any) -> Iterator[list[Device]]:
    """Inside, `emulate.emulate` runs `GroupCommunicator` over modeled NCCL; filled with devices."""
    devices: list[Device] = []
    real_ranks = emulate.run_ranks

    def run_ranks(run: Any, size: int, exchange: Any) -> list[Any]:
        devices[:] = [Device(rank) for rank in range(size)]

        def one(rank: int) -> Any:
            with Recorder(devices[rank]):
                return run(rank)

        return real_ranks(one, size, exchange)

    def levels_of(exchange: Any, rank: int, size: int, mode: str, across: int) -> Any:
        def level(name: Any, ranks: list[int]) -> Any:
            return communicator.GroupCommunicator(Group(devices[rank], exchange, name, ranks))

        everyone = level("cp", list(range(size)))
        if mode == "a2a":
            return everyone, (everyone, emulate.Single())
        if mode != "a2a+p2p":
            return everyone, (emulate.Single(), everyone)
        outer, inner = divmod(rank, across)
        pair = [outer * across + i for i in range(across)]
        ring = list(range(inner, size, across))
        return everyone, (level(("a2a", outer), pair), level(("p2p", inner), ring))

    with patch.context() as local:
        local.setattr(communicator, "dist", _fake_dist())
        local.setattr(emulate, "run_ranks", run_ranks)
        local.setattr(emulate, "levels_of", levels_of)
        yield devices


class Watched:
    """Chunk primitives that say on which device's compute stream they ran, and when."""

    def __init__(self, primitives: Any, devices: list[Device]) -> None:
        self._primitives, self._devices = primitives, devices

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._primitives, name)

        def call(*args: Any, **options: Any) -> Any:
            out = real(*args, **options)
            if name in ("chunk_forward", "chunk_backward"):
                mode = torch.utils._python_dispatch._get_current_dispatch_mode()
                clock = dict(mode.device.clocks[COMPUTE])
                mode.device.kernels.append(Kernel(name, clock))
            return out

        return call


def races(devices: list[Device]) -> list[str]:
    """Accesses that nothing orders, and memory given away too early."""
    return list(dict.fromkeys(text for device in devices for text in device.problems))


def hidden(device: Device, batch: Batch, name: str) -> bool:
    """Whether a kernel of this name may run while the batch does."""
    stream = f"nccl {batch.group}"
    return any(
        k.clock.get(stream, 0) < batch.clock[stream]
        and batch.clock.get(COMPUTE, 0) < k.clock[COMPUTE]
        for k in device.kernels
        if k.name == name
    )


def batches(device: Device) -> list[Batch]:
    return [b for kind, b in device.program if kind == "batch" and b is not None]


class Mismatch(RuntimeError):
    """Two ranks mean different transfers."""


def stuck(devices: list[Device], *, one_queue: bool) -> list[str]:
    """Where every rank waits for ever, or what does not match; empty if all programs end.

    Args:
        one_queue: the GPU starts work strictly in the order of its launch, as under
            ``CUDA_DEVICE_MAX_CONNECTIONS=1``; else every stream for itself.
    """
    positions = [0] * len(devices)
    running: list[Batch] = []
    ended: set[int] = set()
    for device in devices:
        for batch in batches(device):
            batch.left, batch.started = list(batch.ops), False
    while True:
        moved = False
        for at, device in enumerate(devices):
            while positions[at] < len(device.program):
                kind, batch = device.program[positions[at]]
                if kind == "wait" and id(batch) not in ended:
                    break
                if kind == "batch":
                    assert batch is not None
                    before = [b for k, b in device.program[: positions[at]] if k == "batch" and b]
                    waits = any(id(b) not in ended for b in before if b.group == batch.group)
                    if one_queue and waits:
                        break
                    running.append(batch)
                positions[at] += 1
                moved = True
        # Without one queue a batch may be launched early, but runs after those before it.
        heads: dict[tuple[int, str], Batch] = {}
        for batch in running:
            if id(batch) not in ended:
                heads.setdefault((batch.rank, batch.group), batch)
        try:
            moved |= _meet(heads, len(devices))
        except Mismatch as error:
            return [str(error)]
        for batch in heads.values():
            if not batch.left:
                ended.add(id(batch))
                moved = True
        if all(positions[i] == len(d.program) for i, d in enumerate(devices)) and len(ended) == len(
            running
        ):
            return []
        if not moved:
            return [f"rank {b.rank} in {b.what} of {b.group}: {b.left}" for b in heads.values()]


def _meet(heads: dict[tuple[int, str], Batch], size: int) -> bool:
    """Let what both ends have reached happen."""
    moved = False
    for (rank, group), batch in heads.items():
        if batch.left and batch.left[0][0] == "all":
            # A collective: every member must be in the same one.
            members = [heads.get((r, group)) for r in range(size)]
            if all(m is not None and m.ops[0][0] == "all" for m in members):
                sizes = {m.ops[0][2] for m in members if m is not None}
                if len(sizes) > 1:
                    raise Mismatch(f"{batch.what}: sizes differ: {sizes}")
                for m in members:
                    if m is not None and m.left:
                        m.left = []
                        moved = True
            continue
        for op in [x for x in batch.left if x[0] == "send"]:
            other = heads.get((op[1], group))
            if other is None:
                continue
            wanted = [x for x in other.left if x[0] == "recv" and x[1] == rank]
            if not wanted:
                continue
            if wanted[0][2] != op[2]:
                raise Mismatch(f"rank {rank}: {op} meets {wanted[0]} of rank {op[1]}")
            other.left.remove(wanted[0])
            batch.left.remove(op)
            moved = True
    return moved

"""What the four modes need of a process group: batched sends and receives, and an all-gather.

NCCL runs every transfer on a stream of the group's own, which waits for what the compute stream has
queued when the transfer is started and for nothing after it; `Ticket.wait` makes the compute stream
wait for the transfer. The host never waits, so transfers overlap with kernels and the whole can be
captured into a CUDA graph (after one call outside: NCCL connects on first use). Buffers stay
referenced by the ticket until the compute stream has waited: the caching allocator would hand them
to a kernel of the compute stream, which is not ordered after the transfer before.

What that stream's kernels may take from a running attention kernel depends on its priority, which
belongs to the group: create it with ``is_high_priority_stream`` (docs/context_parallelism.md).

Over gloo the same calls are made, and `Ticket.wait` blocks the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_patch.context_parallel.failure import explain
from megatron_patch.context_parallel.watch import Traffic, watch

Transfer = tuple[int, torch.Tensor]
"""(rank in the group, tensor); the tensor is contiguous."""


class Ticket(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Make what follows see the transfer's result; may be called once."""


class Communicator(Protocol):
    """A group of ranks as the modes see it."""

    rank: int
    size: int

    def exchange(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], what: str
    ) -> Ticket | None:
        """Start all of these together; None where there is nothing to do."""

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, what: str) -> Ticket:
        """Start gathering contiguous ``x`` of every rank into ``out`` [size, *x.shape]."""

    def maximum(self, x: torch.Tensor) -> None:
        """Elementwise maximum over the ranks, in place."""


@dataclass(slots=True)
class _State:
    """What outlives a call: one a process group."""

    sent: int = 0
    ready: bool = False
    traffic: Traffic = field(default_factory=Traffic)


_STATES: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()


def _state(group: Any) -> _State:
    return _STATES.setdefault(group, _State())


def bytes_sent(group: dist.ProcessGroup) -> int:
    """Payload bytes this rank has sent through ``group`` for attention so far."""
    return _state(group).sent


@dataclass(slots=True)
class _Works:
    """Transfers under way, and what keeps their memory."""

    works: Sequence[tuple[Any, list[int]]]
    buffers: Sequence[torch.Tensor]
    blame: Callable[[RuntimeError, list[int]], RuntimeError]
    failures: type[RuntimeError]

    def wait(self) -> None:
        for work, peers in self.works:
            try:
                work.wait()  # NCCL: the compute stream's wait; the host's only if told to block
            except self.failures as error:
                raise self.blame(error, peers) from error
        # From here on the compute stream is ordered after the transfer: memory may be reused.
        self.works = self.buffers = ()


class GroupCommunicator:
    """A `Communicator` over a torch process group.

    Args:
        group: NCCL for CUDA tensors, gloo for CPU tensors.
        transfers: False sends nothing and leaves receive buffers as they are: wrong results, for
            measuring what transfers cost.
    """

    def __init__(self, group: dist.ProcessGroup, *, transfers: bool = True) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._others = [r for r in range(self.size) if r != self.rank]
        self._transfers = transfers
        self._state = _state(group)

    def exchange(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], what: str
    ) -> Ticket | None:
        """See `Communicator`; one batched call, so that NCCL runs all of them at once."""
        self._state.traffic.record(what)
        # Both ends derive shapes from the schedule, so both leave the same empty ones out.
        sends, receives = ([x for x in some if x[1].numel()] for some in (sends, receives))
        every = [*sends, *receives]
        if not every:
            return None
        kinds = [dist.isend] * len(sends) + [dist.irecv] * len(receives)

        def start() -> list[tuple[Any, list[int]]]:
            ops = [
                dist.P2POp(kind, x, group=self.group, group_peer=peer)
                for kind, (peer, x) in zip(kinds, every, strict=True)
            ]
            works = dist.batch_isend_irecv(ops)
            peers = [peer for peer, _ in every]
            if len(works) == len(every):
                return [(work, [peer]) for work, peer in zip(works, peers, strict=True)]
            return [(work, sorted(set(peers))) for work in works]

        self._state.sent += sum(x.nbytes for _, x in sends) if self._transfers else 0
        return self._launch(start, [x for _, x in every], what)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, what: str) -> Ticket:
        # Renamed in torch 2.13; gloo wants one flat output.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

        def start() -> list[tuple[Any, list[int]]]:
            work = gather(out.view(-1), x.view(-1), group=self.group, async_op=True)
            return [(work, self._others)]

        self._state.traffic.record(what)
        self._state.sent += (self.size - 1) * x.nbytes if self._transfers else 0
        return self._launch(start, [out, x], what)

    def maximum(self, x: torch.Tensor) -> None:
        self._state.traffic.record("largest logits")
        self._reduce(x, dist.ReduceOp.MAX, "largest logits").wait()

    def _reduce(self, x: torch.Tensor, op: Any, what: str) -> Ticket:
        def start() -> list[tuple[Any, list[int]]]:
            return [(dist.all_reduce(x, op=op, group=self.group, async_op=True), self._others)]

        return self._launch(start, [x], what)

    def _launch(
        self, start: Callable[[], list[tuple[Any, list[int]]]], buffers: list[Any], what: str
    ) -> Ticket:
        def blame(error: RuntimeError, peers: list[int]) -> RuntimeError:
            return explain(error, group=self.group, peers=peers, what=what)

        # gloo raises plain RuntimeErrors; those of CUDA (out of memory, say) blame nobody.
        failures = dist.DistError if buffers[0].device.type == "cuda" else RuntimeError
        try:
            return _Works(start() if self._transfers else (), buffers, blame, failures)
        except failures as error:
            raise blame(error, self._others) from error

    def connect(self, device: torch.device) -> None:
        """Let every rank connect once: a later batch may involve only some of them.

        Raises RuntimeError: inside the capture of a CUDA graph, which must not be the first call.
        """
        if device.type != "cuda" or not self._transfers or self._state.ready:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first call of context-parallel attention over a group connects its ranks, "
                "which a CUDA graph cannot hold; run the same call once before capturing it"
            )
        # Before the first transfer, so that every rank has written once all have connected.
        watch(self.group, self._state.traffic, timeout=_timeout(self.group, device))
        self._reduce(torch.zeros(1, device=device), dist.ReduceOp.SUM, "the first contact").wait()
        self._state.ready = True


def _timeout(group: Any, device: torch.device) -> float:
    """Seconds a transfer of ``group`` may take before the backend gives up."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return float(dist.default_pg_timeout.total_seconds())

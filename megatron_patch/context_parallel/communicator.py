"""What the four modes need of a process group: batched sends and receives, and an all-gather.

On CUDA every transfer is issued on a stream of the group's own, which waits for what the compute
stream has queued so far and for nothing after it; `Ticket.wait` makes the compute stream wait for
the transfer. The host never waits, so transfers overlap with kernels and the whole can be captured
into a CUDA graph (after one call outside: NCCL connects on first use). Buffers stay referenced by
the ticket until the compute stream has waited, so that the caching allocator cannot hand them to a
kernel that runs while they are in flight.

On the CPU (gloo) the same calls run without streams, and `Ticket.wait` blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_patch.context_parallel.failure import explain

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
    streams: dict[torch.device, Any] = field(default_factory=dict)


_STATES: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()


def _state(group: Any) -> _State:
    known = _STATES.get(group)
    if known is None:
        known = _STATES[group] = _State()
    return known


def bytes_sent(group: dist.ProcessGroup) -> int:
    """Payload bytes this rank has sent through ``group`` for attention so far."""
    return _state(group).sent


class _Works:
    """Transfers of a backend that blocks the host while waiting (gloo)."""

    def __init__(self, works: Sequence[tuple[Any, list[int]]], blame: Callable[..., Any]) -> None:
        self._works, self._blame = works, blame

    def wait(self) -> None:
        for work, peers in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._blame(error, peers) from error


class _Event:
    """Transfers on a CUDA stream: waiting is the compute stream's, not the host's."""

    def __init__(self, event: Any, buffers: Sequence[torch.Tensor]) -> None:
        self._event, self._buffers = event, buffers

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
        # From here on the compute stream is ordered after the transfer: memory may be reused.
        self._buffers = ()


class _Nothing:
    def wait(self) -> None:
        return


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
        self._transfers = transfers
        self._state = _state(group)

    def exchange(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], what: str
    ) -> Ticket | None:
        """See `Communicator`; one batched call, so that NCCL runs all of them at once."""
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
        """See `Communicator`."""
        # Renamed in torch 2.13; gloo wants one flat output.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        others = [r for r in range(self.size) if r != self.rank]

        def start() -> list[tuple[Any, list[int]]]:
            work = gather(out.view(-1), x.view(-1), group=self.group, async_op=True)
            return [(work, others)]

        self._state.sent += (self.size - 1) * x.nbytes if self._transfers else 0
        return self._launch(start, [out, x], what)

    def maximum(self, x: torch.Tensor) -> None:
        """See `Communicator`; ordered on the compute stream."""
        if self._transfers:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)

    def _launch(
        self, start: Callable[[], list[tuple[Any, list[int]]]], buffers: list[Any], what: str
    ) -> Ticket:
        if not self._transfers:
            return _Nothing()

        def blame(error: RuntimeError, peers: list[int]) -> RuntimeError:
            return explain(error, group=self.group, peers=peers, what=what)

        device = buffers[0].device
        # gloo raises plain RuntimeErrors; those of CUDA (out of memory, say) blame nobody.
        failures = dist.DistError if device.type == "cuda" else RuntimeError
        try:
            if device.type != "cuda":
                return _Works(start(), blame)
            return self._launch_cuda(start, buffers, device)
        except failures as error:
            raise blame(error, [r for r in range(self.size) if r != self.rank]) from error

    def _launch_cuda(
        self, start: Callable[[], list[tuple[Any, list[int]]]], buffers: list[Any], device: Any
    ) -> Ticket:
        stream = self._state.streams.get(device)
        if stream is None:
            # High priority: a transfer that waits for a free multiprocessor delays every rank.
            stream = self._state.streams[device] = torch.cuda.Stream(device, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for work, _ in start():
                work.wait()
            event = torch.cuda.Event()
            event.record(stream)
        return _Event(event, buffers)

    def connect(self, device: torch.device) -> None:
        """Let every rank connect once: a later batch may involve only some of them."""
        if device.type == "cuda" and self._transfers and not self._state.ready:
            self._state.ready = True
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)

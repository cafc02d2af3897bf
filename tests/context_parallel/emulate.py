"""Context parallelism of any size in one process: every rank is a thread, transfers are hand-overs.

The same `Attention` runs as over a process group; only the `Communicator` differs. One thread runs
at a time and gives way only where it would wait for a transfer, so results do not depend on timing,
Triton's interpreter (which is not thread-safe) can be used, and on a GPU all ranks share a stream.

    result = emulate(q, k, v, dout, size=8, mode="p2p", causal=True)     # whole-sequence tensors

What it is for: tests of features and of the schedule without starting processes, and the accuracy
of context-parallel sizes that the machine at hand does not have.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patch.context_parallel.api import BACKENDS, Single, build
from megatron_patch.context_parallel.communicator import Communicator, Ticket, Transfer
from megatron_patch.context_parallel.engine import Attention
from megatron_patch.context_parallel.layout import shard, unshard
from megatron_patch.context_parallel.packed import shard_packed, unshard_packed
from stable_attention.problem import Options

TURN_SECONDS = 600.0
"""A rank that waits longer for another is stuck: a deadlock, which ends the emulation."""


class Exchange:
    """What ranks hand over to each other; shared by all threads of an emulation."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.boxes: dict[tuple[Any, ...], deque[torch.Tensor]] = {}
        self.failed = False

    def put(self, key: tuple[Any, ...], x: torch.Tensor) -> None:
        """Leave a copy under (group, from, to, ...); the caller holds the turn."""
        self.boxes.setdefault(key, deque()).append(x.clone())
        self.turn.notify_all()

    def get(self, key: tuple[Any, ...]) -> torch.Tensor:
        """Take what was left, giving way until it is there."""
        there = self.turn.wait_for(lambda: self.failed or self.boxes.get(key), TURN_SECONDS)
        if self.failed or not there:
            raise RuntimeError(f"nothing came from rank {key[1]} to rank {key[2]} of {key[0]}")
        box = self.boxes[key]
        found = box.popleft()
        if not box:
            del self.boxes[key]
        return found


class _Receipt:
    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive = arrive

    def wait(self) -> None:
        self._arrive()


class ThreadCommunicator:
    """A `Communicator` between the threads of one process; ``name`` tells groups apart.

    What one rank sends another is matched in the order in which both started it, as by NCCL and
    gloo, whatever the order in which it is waited for.
    """

    def __init__(self, exchange: Exchange, name: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent = 0
        self._exchange, self._name = exchange, name
        self._started: Counter[tuple[int, int]] = Counter()

    def exchange(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], what: str
    ) -> Ticket | None:
        """See `Communicator`; what is sent is copied at once."""
        if not sends and not receives:
            return None
        for peer, x in sends:
            assert x.is_contiguous()
            self.sent += x.nbytes
            self._exchange.put(self._key(self.rank, peer), x)
        keys = [self._key(peer, self.rank) for peer, _ in receives]

        def arrive() -> None:
            for key, (_, x) in zip(keys, receives, strict=True):
                x.copy_(self._take(key, x))

        return _Receipt(arrive)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, what: str) -> Ticket:
        """See `Communicator`."""
        keys = self._swap(x)
        self.sent += (self.size - 1) * x.nbytes

        def arrive() -> None:
            for key, part in zip(keys, out, strict=True):
                part.copy_(self._take(key, part))

        return _Receipt(arrive)

    def maximum(self, x: torch.Tensor) -> None:
        """See `Communicator`."""
        for key in self._swap(x):
            torch.maximum(x, self._take(key, x), out=x)

    def _key(self, source: int, reader: int) -> tuple[Any, ...]:
        """Place of the next hand-over from one rank to another."""
        self._started[source, reader] += 1
        return self._name, source, reader, self._started[source, reader]

    def _swap(self, x: torch.Tensor) -> list[tuple[Any, ...]]:
        """Hand ``x`` to every rank; where theirs will lie, by rank."""
        keys = []
        for peer in range(self.size):
            mine = self._key(self.rank, peer)
            self._exchange.put(mine, x)
            keys.append(mine if peer == self.rank else self._key(peer, self.rank))
        return keys

    def _take(self, key: tuple[Any, ...], like: torch.Tensor) -> torch.Tensor:
        x = self._exchange.get(key)
        # Both ends derive shapes from the schedule alone: a difference is a bug in it.
        assert x.shape == like.shape and x.dtype == like.dtype, (x.shape, like.shape, x.dtype)
        return x


@dataclass(slots=True)
class Emulated:
    """Whole-sequence results, and what every rank sent."""

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None
    """Sum of the ranks' shares."""
    max_logits: torch.Tensor
    delta_out: torch.Tensor
    """O as delta sees it: its high and its low part, float32."""
    sent: list[int]
    """Bytes sent by every rank, forward and backward."""


def levels_of(
    exchange: Exchange, rank: int, size: int, mode: str, across: int
) -> tuple[ThreadCommunicator, tuple[Communicator, Communicator]]:
    """(whole group, (head exchange, key movement)) of one rank, as Megatron-Core groups them."""
    everyone = ThreadCommunicator(exchange, "cp", rank, size)
    if mode == "a2a":
        return everyone, (everyone, Single())
    if mode != "a2a+p2p":
        return everyone, (Single(), everyone)
    outer, inner = divmod(rank, across)
    return everyone, (
        ThreadCommunicator(exchange, ("a2a", outer), inner, across),
        ThreadCommunicator(exchange, ("p2p", inner), outer, size // across),
    )


def emulate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    size: int,
    mode: str = "p2p",
    across: int = 2,
    layout: str = "sbhd",
    backend: str = "stable_flash",
    sinks: torch.Tensor | None = None,
    dropout_seed: int = 0,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
    document_lengths: Sequence[int] | None = None,
    wire: torch.dtype | None = None,
    head_groups: int | None = None,
    primitives: Any = None,
    want_max_logits: bool = False,
    **options: Any,
) -> Emulated:
    """Forward and backward of ``size`` virtual ranks on tensors of the whole sequence.

    Args:
        q, k, v, dout: whole sequence in natural order, "sbhd" [s, b, heads, d] or packed.
        across: size of the a2a group of "a2a+p2p".
        primitives: replaces the backend's chunk primitives (emulations of other arithmetic).
        options: keywords of `stable_attention`.
    """
    exchange = Exchange()
    asked = Options.of(layout=layout, allow_broken=True, **options)
    seed = torch.full((), dropout_seed, dtype=torch.int64, device=q.device)
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded

    def cut(x: torch.Tensor, rank: int) -> torch.Tensor:
        if padded is None:
            return shard(x, rank=rank, size=size, dim=0)
        return shard_packed(x, padded, rank=rank, size=size)

    def run(rank: int) -> tuple[Any, ...]:
        everyone, levels = levels_of(exchange, rank, size, mode, across)
        q_own, k_own, v_own = (cut(x, rank) for x in (q, k, v))
        attention: Attention = build(
            q_own,
            k_own,
            v_own,
            asked,
            sinks=sinks,
            everyone=everyone,
            levels=levels,
            mode=mode,
            primitives=BACKENDS[backend],
            want_max_logits=want_max_logits,
            packed=(cu_seqlens, cu_seqlens_padded, None, document_lengths),
            wire=wire,
            head_groups=head_groups,
        )
        if primitives is not None:
            attention.primitives = primitives
        out, top, saved = attention.forward(q_own, k_own, v_own, sinks, seed)
        grads = attention.backward(cut(dout, rank), saved)
        whole = saved.out.to(saved.lse.dtype)
        if saved.low.numel():
            whole = whole + saved.low.to(saved.lse.dtype)
        whole = attention.exchange.together([("o", whole)])[0]
        sent = {id(c): c for c in (everyone, *levels)}.values()
        return out, *grads, top, whole, sum(getattr(c, "sent", 0) for c in sent)

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if padded is None:
            return unshard(list(parts), dim=0)
        return unshard_packed(list(parts), padded)

    results = run_ranks(run, size, exchange)
    columns = list(zip(*results, strict=True))
    shares = columns[4]
    return Emulated(
        out=join(columns[0]),
        dq=join(columns[1]),
        dk=join(columns[2]),
        dv=join(columns[3]),
        dsinks=None if shares[0] is None else torch.stack(shares).sum(0),
        max_logits=columns[5][0],
        delta_out=join(columns[6]),
        sent=list(columns[7]),
    )


def run_ranks(run: Callable[[int], Any], size: int, exchange: Exchange) -> list[Any]:
    """``run(rank)`` of every rank, one thread each, one running at a time.

    Raises what the first failing rank raised.
    """
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        with exchange.turn:  # given up only inside Exchange.get
            try:
                with torch.no_grad():  # a setting of each thread
                    results[rank] = run(rank)
            except BaseException as error:
                errors.append(error)
                exchange.failed = True
                exchange.turn.notify_all()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class SixteenBitMerges:
    """Chunk primitives whose results meet in 16 bits: the rings this project differs from.

    Partial O are 16-bit kernel outputs added in 16 bits; every launch returns 16-bit dQ, dK, dV,
    which are added in 16 bits; delta comes from the rounded O. LSE stays float32. This is how
    Transformer Engine's p2p (2.11, BF16) and ring-flash-attention add, with the kernels given.
    Use it with ``stabilizer="none"`` and a 16-bit ``wire``.
    """

    def __init__(self, primitives: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self.primitives, self.dtype = primitives, dtype

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).to(x.dtype)

    def projected_rows(self, *args: Any, **options: Any) -> Any:
        """As the primitives'."""
        return self.primitives.projected_rows(*args, **options)

    def chunk_forward(self, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        """As the primitives', O rounded."""
        out, *rest = self.primitives.chunk_forward(*args, **options)
        return self._round(out), *rest

    def merge_chunks(
        self, out: torch.Tensor, lse: torch.Tensor, *part: torch.Tensor, **options: Any
    ) -> None:
        """As the primitives', O rounded after every merge."""
        self.primitives.merge_chunks(out, lse, *part, **options)
        out.copy_(self._round(out))

    def finish_chunks(
        self, out: torch.Tensor, lse: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the primitives', without a low-order part."""
        high, _ = self.primitives.finish_chunks(out, lse, **options)
        return high, high.new_empty(0)

    def chunk_delta(self, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The primitives'."""
        return self.primitives.chunk_delta(*args, **options)

    def chunk_backward(
        self,
        *args: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        **options: Any,
    ) -> None:
        """As the primitives', each launch's share and each sum rounded."""
        shares = [torch.zeros_like(x) for x in (dq, dk, dv)]
        names = zip(("dq", "dk", "dv"), shares, strict=True)
        self.primitives.chunk_backward(*args, **dict(names), **options)
        for total, share in zip((dq, dk, dv), shares, strict=True):
            total.copy_(self._round(total + self._round(share)))

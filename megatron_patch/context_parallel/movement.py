"""How keys and values reach a rank, and how their gradients go home: alone, ring, all-gather.

Shape legend: k [s, b, kv_heads, d], v [s, b, kv_heads, dv] of a shard ("sbhd"), without b packed
("thd"); n ranks. Gradients are float32 (float64 for float64 inputs) until the last one is added.

Each class offers ``forward(k, v, compute)`` and ``backward(k, v, compute)``; ``compute`` is called
once for every `Block` that the schedule knows, in an order that is the same from run to run. What
is sent to whom follows from the schedule alone, so that both ends agree without asking.

Transfers of the next block are started before the current one is computed, and gradients travel
while the next block is computed. A block of the ring holds the keys of two ranks where no mask
tells them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_patch.context_parallel.communicator import Communicator, Ticket, Transfer
from megatron_patch.context_parallel.schedule import Mask, Part, Schedule
from megatron_patch.context_parallel.tokens import Dense, Tokens, View

TOGETHER = 2
"""Steps of the ring whose keys are computed on at once where nothing is masked. A launch costs its
tail, a merge of O and a pass over dQ; a block more costs the memory of two on their way."""
Launch = tuple[View, View, Mask]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """Keys and values at hand, and what this rank computes on them."""

    k: torch.Tensor
    v: torch.Tensor
    heads: slice
    """Key/value heads they are, of this rank's."""
    launches: tuple[Launch, ...]


Forward = Callable[[Block], None]
Backward = Callable[[Block, torch.Tensor, torch.Tensor], None]


def accumulator(x: torch.Tensor) -> torch.Tensor:
    """Zeros of the accumulation type, shaped like ``x``."""
    return torch.zeros(x.shape, dtype=accumulation(x), device=x.device)


def _spans(tokens: Tokens, plan: Schedule) -> tuple[Launch, ...]:
    """Launches on the keys of the whole sequence in order."""
    return tuple(
        (tokens.local(plan.rank, span.q), tokens.span(span.first, span.last), span.mask)
        for span in plan.spans()
    )


@dataclass(slots=True)
class Alone:
    """Nothing moves: this rank holds the whole sequence (of its heads)."""

    tokens: Tokens
    plan: Schedule

    def forward(self, k: torch.Tensor, v: torch.Tensor, compute: Forward) -> None:
        """Compute the only block."""
        compute(Block(k, v, slice(0, k.shape[-2]), _spans(self.tokens, self.plan)))

    def backward(self, k: torch.Tensor, v: torch.Tensor, compute: Backward) -> Pair:
        """(dK, dV), accumulated."""
        dk, dv = accumulator(k), accumulator(v)
        compute(Block(k, v, slice(0, k.shape[-2]), _spans(self.tokens, self.plan)), dk, dv)
        return dk, dv


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block that is there, or nothing to compute; the steps that brought it, and its rows."""

    block: Block | None
    steps: tuple[tuple[int, slice], ...]
    ends_group: bool = False


Home = tuple[Ticket | None, list[tuple[Pair, Part]]]
"""Gradients of a group of steps on their way, and to which of this rank's keys they belong."""


@dataclass(slots=True)
class Ring:
    """p2p: in step i every rank sends to the i-th rank after it and receives from the i-th before.

    Keys go straight from their owner to a reader and only the chunks that reader's queries see, so
    that a window or a causal mask saves bytes; a rank that is not concerned sits the step out.

    Steps come in groups, the same for all ranks: transfers of a group are one batch, that of keys
    started before the group before is computed, that of gradients after its own. How much of a
    group a rank computes at once is its own affair; it starts no transfer in between, because one
    that waits for other ranks keeps processors from attention.
    """

    tokens: Tokens
    plan: Schedule
    comm: Communicator
    wire: torch.dtype | None
    """Type in which dK and dV travel; None keeps the accumulator's."""

    def forward(self, k: torch.Tensor, v: torch.Tensor, compute: Forward) -> None:
        """Compute every block this rank's queries see."""
        for arrival in self._arrivals(k, v, "forward"):
            if arrival.block is not None:
                compute(arrival.block)

    def backward(self, k: torch.Tensor, v: torch.Tensor, compute: Backward) -> Pair:
        """(dK, dV) of this rank's own keys, summed over all ranks in a fixed order."""
        dk, dv = accumulator(k), accumulator(v)
        home: Home = None, []
        made: list[tuple[int, Pair | None]] = []
        for arrival in self._arrivals(k, v, "backward"):
            block = arrival.block
            if not arrival.steps:
                assert block is not None
                compute(block, dk, dv)
                continue
            grads = None
            if block is not None:
                grads = accumulator(block.k), accumulator(block.v)
                compute(block, *grads)
            made += [
                (step, None if grads is None else (grads[0][rows], grads[1][rows]))
                for step, rows in arrival.steps
            ]
            if arrival.ends_group:
                later = self._send_home(made, k, v)
                made = []
                self._add(home, dk, dv)
                home = later
        self._add(home, dk, dv)
        return dk, dv

    def _arrivals(self, k: torch.Tensor, v: torch.Tensor, what: str) -> Iterator[Arrival]:
        """Everything to compute, this rank's own keys (no steps) first."""
        ready: dict[Part, Pair] = {}

        def outgoing(part: Part) -> Pair:
            if part not in ready:
                ready[part] = self.tokens.take(k, part), self.tokens.take(v, part)
            return ready[part]

        def post(group: list[list[int]]) -> tuple[Ticket | None, list[Arrival]]:
            sends: list[Transfer] = []
            receives: list[Transfer] = []
            arrivals = []
            for run in group:
                part = self.plan.needs(me, self._partners(run[0])[1])
                rows = 0 if part is None else self.tokens.rows_of(part)
                k_in, v_in = (x.new_empty(rows * len(run), *x.shape[1:]) for x in (k, v))
                places = [(step, slice(i * rows, (i + 1) * rows)) for i, step in enumerate(run)]
                for step, at in places:
                    reader, source = self._partners(step)
                    wanted = self.plan.needs(reader, me)
                    sends += [] if wanted is None else [(reader, x) for x in outgoing(wanted)]
                    receives += [] if part is None else [(source, k_in[at]), (source, v_in[at])]
                block = None if part is None else self._block(run, part, k_in, v_in)
                arrivals.append(Arrival(block, (*places,), run is group[-1]))
            text = f"keys and values of p2p {self._told(group[0][0], group[-1][-1])}, {what}"
            return self.comm.exchange(sends, receives, text), arrivals

        me = self.comm.rank
        groups = self._groups()
        coming = post(groups[0])
        yield Arrival(self._block([0], Part.BOTH, k, v), ())
        for number in range(len(groups)):
            ticket, here = coming
            if number + 1 < len(groups):
                coming = post(groups[number + 1])
            if ticket is not None:
                ticket.wait()
            yield from here

    def _groups(self) -> list[list[list[int]]]:
        """Runs of steps that this rank computes on at once, in the groups of all ranks."""
        size = self.comm.size
        wide = TOGETHER if isinstance(self.tokens, Dense) and self.plan.unmasked else 1
        groups = [list(range(i, min(i + wide, size))) for i in range(1, size, wide)]
        return [self._runs(group) for group in groups]

    def _runs(self, group: list[int]) -> list[list[int]]:
        """Neighbouring steps stay together if the same queries see the same part of their keys."""
        runs = [group[:1]]
        for before, step in itertools.pairwise(group):
            one, two = (self.plan.pairs(self._partners(x)[1]) for x in (before, step))
            if one == two:
                runs[-1].append(step)
            else:
                runs.append([step])
        return runs

    def _partners(self, step: int) -> tuple[int, int]:
        """(who reads this rank's keys in a step, whose keys this rank reads)."""
        me, size = self.comm.rank, self.comm.size
        return (me + step) % size, (me - step) % size

    def _block(self, run: list[int], part: Part, k: torch.Tensor, v: torch.Tensor) -> Block:
        """Keys ``part`` of the ranks that the steps of ``run`` (0 is this one) come from."""
        tokens, me, source = self.tokens, self.plan.rank, self._partners(run[0])[1]
        pairs = self.plan.pairs(source)
        if len(run) > 1:
            assert isinstance(tokens, Dense)
            launches: tuple[Launch, ...] = tuple(
                (tokens.local(me, pair.q), tokens.side_by_side(k.shape[0]), Mask.NONE)
                for pair in pairs
            )
        else:
            place = tokens.local if part is Part.BOTH else tokens.alone
            launches = tuple(
                (tokens.local(me, pair.q), place(source, pair.k), pair.mask) for pair in pairs
            )
        return Block(k, v, slice(0, k.shape[-2]), launches)

    def _send_home(
        self, made: list[tuple[int, Pair | None]], k: torch.Tensor, v: torch.Tensor
    ) -> Home:
        """Send the gradients of steps to their owners; receive those the readers made of ours."""
        sends: list[Transfer] = []
        coming: list[tuple[Pair, Part]] = []
        receives: list[Transfer] = []
        for step, grads in made:
            reader, source = self._partners(step)
            if grads is not None:
                sends += [(source, x if self.wire is None else x.to(self.wire)) for x in grads]
            part = self.plan.needs(reader, self.comm.rank)
            if part is not None:
                rows = self.tokens.rows_of(part)
                dk_in, dv_in = (
                    torch.empty(
                        (rows, *x.shape[1:]), dtype=self.wire or accumulation(x), device=x.device
                    )
                    for x in (k, v)
                )
                receives += [(reader, dk_in), (reader, dv_in)]
                coming.append(((dk_in, dv_in), part))
        text = f"gradients of p2p {self._told(made[0][0], made[-1][0])}"
        return self.comm.exchange(sends, receives, text), coming

    def _add(self, home: Home, dk: torch.Tensor, dv: torch.Tensor) -> None:
        ticket, coming = home
        if ticket is not None:
            ticket.wait()
        for (dk_in, dv_in), part in coming:
            self.tokens.add(dk, dk_in.to(dk.dtype), part)
            self.tokens.add(dv, dv_in.to(dv.dtype), part)

    def _told(self, first: int, last: int) -> str:
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{steps} of {self.comm.size - 1}"


def accumulation(x: torch.Tensor) -> torch.dtype:
    """float32, or float64 for float64 tensors."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(slots=True)
class Gathered:
    """all_gather: every rank gets all keys, a group of heads at a time, and puts them in order.

    Two launches a group of heads and nothing to merge, for the memory of the gathered keys of two
    groups. Gradients go to their owners in one batch a group and are added in rank order.
    """

    tokens: Tokens
    plan: Schedule
    comm: Communicator
    wire: torch.dtype | None
    head_groups: int

    def forward(self, k: torch.Tensor, v: torch.Tensor, compute: Forward) -> None:
        """Compute the whole sequence of each group of heads."""
        for block in self._arrivals(k, v, "forward"):
            compute(block)

    def backward(self, k: torch.Tensor, v: torch.Tensor, compute: Backward) -> Pair:
        """(dK, dV) of this rank's own keys, summed over all ranks in rank order."""
        dk, dv = accumulator(k), accumulator(v)
        home: Callable[[], None] | None = None
        for block in self._arrivals(k, v, "backward"):
            grads = accumulator(block.k), accumulator(block.v)
            compute(block, *grads)
            later = self._send_home(block.heads, grads, dk, dv)
            if home is not None:
                home()
            home = later
        if home is not None:
            home()
        return dk, dv

    def _groups(self, kv_heads: int) -> list[slice]:
        step = -(-kv_heads // self.head_groups)
        return [slice(i, min(i + step, kv_heads)) for i in range(0, kv_heads, step)]

    def _arrivals(self, k: torch.Tensor, v: torch.Tensor, what: str) -> Iterator[Block]:
        groups = self._groups(k.shape[-2])
        launches = _spans(self.tokens, self.plan)

        def post(heads: slice) -> tuple[list[Ticket], list[torch.Tensor]]:
            tickets, parts = [], []
            for name, x in (("keys", k), ("values", v)):
                own = x[..., heads, :].contiguous()
                parts.append(own.new_empty(self.comm.size, *own.shape))
                text = f"{name} of heads {heads.start}..{heads.stop - 1} (all_gather, {what})"
                tickets.append(self.comm.all_gather(parts[-1], own, text))
            return tickets, parts

        coming = post(groups[0])
        for number, heads in enumerate(groups):
            tickets, parts = coming
            if number + 1 < len(groups):
                coming = post(groups[number + 1])
            for ticket in tickets:
                ticket.wait()
            k_all, v_all = (self.tokens.gather(x) for x in parts)
            yield Block(k_all, v_all, heads, launches)

    def _send_home(
        self, heads: slice, grads: Pair, dk: torch.Tensor, dv: torch.Tensor
    ) -> Callable[[], None]:
        """Start sending every owner its part; the result adds what arrives."""
        me, size = self.comm.rank, self.comm.size
        shares = [self.tokens.scatter(x, size) for x in grads]
        totals = [x[..., heads, :] for x in (dk, dv)]
        for total, share in zip(totals, shares, strict=True):
            total.add_(share[me])
        sends: list[Transfer] = []
        receives: list[Transfer] = []
        arriving: list[tuple[torch.Tensor, torch.Tensor, Part]] = []
        for other in (r for r in range(size) if r != me):
            part = self.plan.needs(me, other)
            if part is not None:
                part = self.tokens.whole(part)
                for share in shares:
                    x = self.tokens.take(share[other], part)
                    sends.append((other, x if self.wire is None else x.to(self.wire)))
            part = self.plan.needs(other, me)
            if part is not None:
                part = self.tokens.whole(part)
                rows = self.tokens.rows_of(part)
                for total in totals:
                    shape = (rows, *total.shape[1:])
                    x = torch.empty(shape, dtype=self.wire or total.dtype, device=total.device)
                    receives.append((other, x))
                    arriving.append((total, x, part))
        ticket = self.comm.exchange(
            sends, receives, f"gradients of heads {heads.start}..{heads.stop - 1} (all_gather)"
        )

        def add() -> None:
            if ticket is not None:
                ticket.wait()
            for total, x, part in arriving:
                self.tokens.add(total, x.to(total.dtype), part)

        return add


Movement = Alone | Ring | Gathered

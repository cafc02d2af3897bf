"""Attention over a sequence split among context-parallel ranks: the public function.

    out = context_parallel_attention(q, k, v, group=pg_collection.cp, mode="p2p", causal=True)

Shape legend: s tokens of this rank's shard (sequence / n) and b batch, or t packed tokens (pack /
n); h query heads and kv_heads key/value heads of this tensor-parallel rank; d, dv head dims of
query/key and value; n ranks. Shards are Megatron's zigzag shards (`layout`, `packed`).

| mode | what moves | memory of keys |
| --- | --- | --- |
| p2p | keys and values, owner to reader, up to two ranks a step | four shards |
| all_gather | keys and values of a group of heads, to everybody | sequence / head groups, twice |
| a2a | q, k, v, O: tokens of all heads for the whole sequence of some | a shard |
| a2a+p2p | a2a inside the first group, p2p between the larger shards | four larger shards |
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from megatron_patch.context_parallel.checks import (
    MODES,
    ContextParallelError,
    check,
    check_packed,
    check_shapes,
)
from megatron_patch.context_parallel.communicator import Communicator, GroupCommunicator, bytes_sent
from megatron_patch.context_parallel.engine import Attention, Saved
from megatron_patch.context_parallel.heads import HeadExchange, HeadSplit
from megatron_patch.context_parallel.movement import Alone, Gathered, Movement, Ring
from megatron_patch.context_parallel.schedule import Bounds, Schedule
from megatron_patch.context_parallel.tokens import Dense, Packed, Tokens
from stable_attention.once import once_differentiable
from stable_attention.problem import AttentionArgumentError, Options

BACKENDS = {
    "stable_flash": "stable_attention.chunks",
    "reference": "stable_attention.reference.chunks",
}
"""Modules of chunk primitives by backend name."""
LAYOUTS = ("sbhd", "thd")
WIRES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
HEAD_GROUPS = 4
"""all_gather: groups of heads, of which the next travels while one is computed."""

Pack = tuple[torch.Tensor | None, torch.Tensor | None, int | None, Sequence[int] | None]
"""cu_seqlens, cu_seqlens_padded, max_seqlen, document_lengths: `context_parallel_attention`."""
NOT_PACKED: Pack = (None, None, None, None)

__all__ = ["BACKENDS", "MODES", "ContextParallel", "ContextParallelError", "attend", "bytes_sent",
           "check", "context_parallel_attention"]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel:
    """Over which ranks a sequence is split, and how: see `context_parallel_attention`."""

    group: Any  # torch.distributed.ProcessGroup
    mode: str = "p2p"
    hierarchical: Sequence[Any] | None = None  # (a2a group, p2p group) of "a2a+p2p"
    gradient_wire: str = "fp32"
    head_groups: int | None = None
    transfers: bool = True


P = ParamSpec("P")
R = TypeVar("R")


def _eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` as it is inside ``torch.compile``: a break in the graph, and nothing traced.

    What it does is launches and transfers, whose order all ranks share; traced piece by piece, each
    rank would compile for itself while the others wait.
    """
    left_alone: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:  # whose import takes seconds
            return function(*args, **options)
        if not left_alone:
            left_alone.append(torch.compiler.disable(function))
        return left_alone[0](*args, **options)

    return call


@_eagerly
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    mode: str = "p2p",
    hierarchical: Sequence[dist.ProcessGroup] | None = None,
    layout: str = "sbhd",
    backend: str = "stable_flash",
    sinks: torch.Tensor | None = None,
    dropout_seed: int | torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_padded: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    document_lengths: Sequence[int] | None = None,
    return_max_logits: bool = False,
    gradient_wire: str = "fp32",
    head_groups: int | None = None,
    transfers: bool = True,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * Q K^T + mask) V over the whole sequence, differentiable.

    Every rank of ``group`` calls it with the same options, at the same time.

    Args:
        q, k, v: [s, b, h, d], [s, b, kv_heads, d], [s, b, kv_heads, dv], or packed without b; any
            strides with a contiguous last dimension. Any dtype the backend takes.
        group: the context-parallel group (``pg_collection.cp``, or a call's own).
        hierarchical: (a2a group, p2p group) for "a2a+p2p": ``pg_collection.hcp``, the first of
            neighbouring ranks.
        options: those of `stable_attention`: causal and window (on positions in the whole sequence
            or document), scale, softcap, dropout_p, batch_offset and head_offset (global index of
            batch 0 and of head 0, for dropout), stabilizer, o_lo, allow_broken, beta, eps;
            deterministic has no effect here, where sums are always made in a fixed order. The
            backend "reference" keeps all of O and ignores stabilizer and o_lo.
        sinks: [h] sink logits (natural log). Their gradient is this rank's share, because the
            data-parallel reduction of parameters also adds over context-parallel ranks.
        dropout_seed: required with dropout; an int, or an int64 scalar on q's device, the same on
            every rank. The mask is a function of it and of document, head, query and key alone.
        cu_seqlens: int32 [documents + 1], thd: real lengths, of the whole pack, as offsets.
        cu_seqlens_padded: where documents begin in the whole pack; default ``cu_seqlens``. Padded
            lengths are multiples of 2 n (not checked, since the host does not read them;
            ``STABLE_ATTENTION_DEBUG=1`` does).
        max_seqlen: a bound of the longest real document, thd.
        document_lengths: padded lengths, if the host knows them: with a window, p2p then sends only
            what is seen; without them it assumes documents as short as can be.
        return_max_logits: also the largest logit of each head over the whole sequence, float32 [h].
        gradient_wire: type in which dK and dV of other ranks' keys travel: "fp32", or "bf16", which
            halves those bytes and rounds every rank's share once. No effect under "a2a":
            gradients travel complete, or float32 where heads are replicated.
        head_groups: all_gather: groups of heads that travel one after another.
        transfers: False computes without sending anything. The result is wrong; it is there to
            measure exposed communication.

    Returns:
        O [s, b, h, dv] in q's dtype (or packed), with the maximum logits if asked for. Rows that
        see no key are 0.

    Raises:
        ContextParallelError: what cannot be, with the reason and what to use instead.
        RankLostError: another rank died or hangs, named in the text.
    """
    try:
        parsed = Options.of(layout=layout, **options)
    except AttentionArgumentError as error:
        raise ContextParallelError(str(error)) from None
    ranks = ContextParallel(
        group=group, mode=mode, hierarchical=hierarchical, gradient_wire=gradient_wire,
        head_groups=head_groups, transfers=transfers,
    )  # fmt: skip
    if backend not in tuple(BACKENDS):
        raise _not_allowed("backend", backend, BACKENDS)
    return attend(
        q, k, v, parsed, ranks=ranks, primitives=BACKENDS[backend], sinks=sinks,
        packed=(cu_seqlens, cu_seqlens_padded, max_seqlen, document_lengths),
        dropout_seed=dropout_seed, return_max_logits=return_max_logits,
    )  # fmt: skip


@_eagerly
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    *,
    ranks: ContextParallel,
    primitives: str,
    packed: Pack = NOT_PACKED,
    sinks: torch.Tensor | None = None,
    dropout_seed: int | torch.Tensor | None = None,
    return_max_logits: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`context_parallel_attention` with parsed options, by the chunk primitives of a module."""
    if options.layout not in LAYOUTS:
        raise _not_allowed("layout", options.layout, LAYOUTS)
    if ranks.gradient_wire not in tuple(WIRES):
        raise _not_allowed("gradient_wire", ranks.gradient_wire, WIRES)
    if options.dropout_p > 0 and dropout_seed is None:
        raise ContextParallelError(
            "dropout_p is set without dropout_seed; every rank must pass the same seed, because "
            "each computes its own part of one mask"
        )
    comm = GroupCommunicator(ranks.group, transfers=ranks.transfers)
    levels = _levels(ranks, comm)
    for each in {id(c): c for c in (comm, *levels)}.values():
        if isinstance(each, GroupCommunicator):
            each.connect(q.device)
    attention = build(
        q, k, v, options, want_max_logits=return_max_logits, sinks=sinks, everyone=comm,
        levels=levels, mode=ranks.mode, primitives=primitives, packed=packed,
        wire=WIRES[ranks.gradient_wire], head_groups=ranks.head_groups,
    )  # fmt: skip
    if isinstance(dropout_seed, int):
        dropout_seed = torch.full((), dropout_seed, dtype=torch.int64, device=q.device)
    out, top = _Function.apply(q, k, v, sinks, dropout_seed, attention)
    return (out, top) if return_max_logits else out


def build(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    *,
    sinks: torch.Tensor | None = None,
    everyone: Communicator,
    levels: tuple[Communicator, Communicator],
    mode: str,
    primitives: str,
    want_max_logits: bool = False,
    packed: Pack = NOT_PACKED,
    wire: torch.dtype | None = None,
    head_groups: int | None = None,
) -> Attention:
    """The `Attention` of one rank; ``levels`` are the (head exchange, key movement) groups."""
    check_shapes(q, k, v, sinks)
    heads, kv_heads = q.shape[-2], k.shape[-2]
    across, along = levels
    sizes = across.size, along.size
    check(mode=mode, size=everyone.size, heads=heads, kv_heads=kv_heads, hierarchical_sizes=sizes)
    tokens = _tokens(q.shape[0], options.layout, everyone.size, packed)
    larger = tokens.larger(across.size)
    short, long = larger.chunk_lengths()
    bounds, drops = Bounds(options.window_left, options.window_right), options.dropout_p > 0
    plan = Schedule(along.size, along.rank, bounds, short=short, long=long, by_position=drops)
    movement: Movement
    if along.size == 1:
        movement = Alone(larger, plan)
    elif mode == "all_gather":
        groups = min(HEAD_GROUPS, kv_heads) if head_groups is None else head_groups
        if not 1 <= groups <= kv_heads:
            raise ContextParallelError(f"head_groups is {groups}; allowed: 1..{kv_heads}")
        movement = Gathered(larger, plan, along, wire, groups)
    else:
        movement = Ring(larger, plan, along, wire)
    return Attention(
        options=options,
        want_max_logits=want_max_logits,
        primitives=importlib.import_module(primitives),
        tokens=larger,
        exchange=HeadExchange(across, tokens, HeadSplit(across.size, heads, kv_heads)),
        movement=movement,
        everyone=everyone,
    )


class Single:
    """A `Communicator` of one rank."""

    rank, size = 0, 1

    def exchange(self, sends: Any, receives: Any, what: str) -> None:
        assert not sends and not receives

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, what: str) -> Any:
        raise AssertionError("a group of one gathers nothing")

    def maximum(self, x: torch.Tensor) -> None:
        """Already it."""


def _levels(ranks: ContextParallel, comm: GroupCommunicator) -> tuple[Communicator, Communicator]:
    """(group that exchanges heads, group that moves keys)."""
    if ranks.mode == "a2a":
        return comm, Single()
    if ranks.mode != "a2a+p2p":
        return Single(), comm
    groups = ranks.hierarchical
    sizes = None if groups is None else [dist.get_world_size(g) for g in groups]
    # Says what is wrong with the sizes; heads are checked with the tensors.
    check(mode=ranks.mode, size=comm.size, heads=comm.size, kv_heads=1, hierarchical_sizes=sizes)
    assert groups is not None
    across, along = (GroupCommunicator(g, transfers=ranks.transfers) for g in groups)
    if comm.rank != along.rank * across.size + across.rank:
        raise ContextParallelError(
            f"rank {comm.rank} of the context-parallel group is rank {across.rank} of the a2a and "
            f"{along.rank} of the p2p group; the a2a group must be of neighbouring ranks, as "
            "Megatron-Core's hierarchical groups are (the first of pg_collection.hcp)"
        )
    return across, along


def _not_allowed(name: str, value: object, allowed: Iterable[str]) -> ContextParallelError:
    return ContextParallelError(
        f"{name} is {value!r}; allowed under context parallelism: {', '.join(allowed)}"
    )


def _tokens(length: int, layout: str, size: int, packed: Pack) -> Tokens:
    """The geometry of a shard of ``length`` tokens."""
    cu, cu_padded, longest, lengths = packed
    if layout == "sbhd":
        if cu is not None:
            raise ContextParallelError("cu_seqlens goes with layout 'thd', and only with it")
        if length % 2 and size > 1:
            raise ContextParallelError(
                f"this rank has {length} tokens of the sequence; a zigzag shard is two equal "
                f"chunks. Make the sequence length a multiple of 2 x {size}"
            )
        return Dense(length=length, size=size)
    if cu is None:
        raise ContextParallelError("layout 'thd' needs cu_seqlens (of the whole pack)")
    if os.environ.get("STABLE_ATTENTION_DEBUG") == "1":
        check_packed(cu, cu if cu_padded is None else cu_padded, length, size)
    known = None
    if lengths is not None:
        used = [x for x in lengths if x > 0] or [2 * size]
        known = (min(used), max(used))
    whole = cu if cu_padded is None else cu_padded
    return Packed(cu=cu, cu_padded=whole, tokens=length, size=size, longest=longest, padded=known)


class _Function(torch.autograd.Function):
    """The autograd rule; differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        seed: torch.Tensor | None,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            logits = None if sinks is None else sinks.to(wide)
            out, top, saved = attention.forward(q, k, v, logits, seed)
        ctx.save_for_backward(*saved)
        ctx.attention = attention
        ctx.sinks_dtype = None if sinks is None else sinks.dtype
        ctx.mark_non_differentiable(top)
        return out, top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _top: torch.Tensor) -> Any:
        with torch.autocast(dout.device.type, enabled=False):
            dq, dk, dv, dsinks = ctx.attention.backward(dout, Saved(*ctx.saved_tensors))
        if dsinks is not None:
            dsinks = dsinks.to(ctx.sinks_dtype)
        return dq, dk, dv, dsinks, None, None

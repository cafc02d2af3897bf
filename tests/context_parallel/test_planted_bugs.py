"""Bugs planted into the library: the verdict that the other tests use catches every one.

Each entry changes one thing while the emulation runs a case; the case passes without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cp_cases import Case, complaints, make_inputs, truth, uncut
from emulated import found, run

from megatron_patch.context_parallel import engine, movement
from megatron_patch.context_parallel.engine import Attention
from megatron_patch.context_parallel.heads import HeadExchange
from megatron_patch.context_parallel.layout import chunks_of
from megatron_patch.context_parallel.movement import Gathered, Ring
from megatron_patch.context_parallel.schedule import Mask, Part, Schedule
from megatron_patch.context_parallel.tokens import Dense, Packed
from stable_attention.reference import chunks as primitives

P2P = Case(size=4, mode="p2p", dropout_p=0.0)
BUGS: dict[str, tuple[Case, Callable[[Any], None]]] = {}


def planted(case: Case) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """A function that plants its bug with pytest's monkeypatch."""

    def add(plant: Callable[[Any], None]) -> Callable[[Any], None]:
        BUGS[plant.__name__] = (case, plant)
        return plant

    return add


def bug(case: Case, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What is called in place of ``owner.name``; its first argument is the right function."""

    def add(wrong: Callable[..., Any]) -> Callable[..., Any]:
        def plant(patch):
            real = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **options: wrong(real, *args, **options))

        BUGS[wrong.__name__] = (case, plant)
        return wrong

    return add


def change(**fields: Any) -> Case:
    return dataclasses.replace(P2P, **fields)


SINKS, FULL = change(sinks=True), change(causal=False)
ROUNDED = change(dtype="bf16", causal=False)
ROUNDED8 = change(dtype="bf16", causal=False, size=8, s=64)


@bug(SINKS, primitives, "finish_chunks")
def sink_counted_twice(real, out, lse, *, sinks, **rest):
    real(out, lse, sinks=sinks, **{**rest, "dtype": out.dtype})
    return real(out, lse, sinks=sinks, **rest)


@bug(SINKS, primitives, "chunk_forward")
def sink_in_every_partial_result(real, q, k, v, **options):
    out, lse, *rest = real(q, k, v, **options)
    sinks = make_inputs(SINKS).sinks
    high, _ = primitives.finish_chunks(out, lse, dtype=out.dtype, layout="sbhd", sinks=sinks)
    return high, lse, *rest


@bug(SINKS, primitives, "chunk_delta")
def every_rank_has_the_whole_gradient_of_the_sinks(real, *args, **options):
    rows, share = real(*args, **options)
    return rows, share * 4


@bug(P2P, primitives, "merge_chunks")
def lse_merged_in_bf16(real, out, lse, part, part_lse, **options):
    real(out, lse, part, part_lse.bfloat16().float(), **options)


@bug(ROUNDED, primitives, "merge_chunks")
def partial_outputs_merged_in_bf16(real, out, lse, part, part_lse, **options):
    real(out, lse, part.bfloat16().float(), part_lse, **options)
    out.copy_(out.bfloat16())


@bug(ROUNDED8, primitives, "chunk_backward")
def dq_accumulated_in_bf16(real, *args, dq, **options):
    real(*args, dq=dq, **options)
    dq.copy_(dq.bfloat16())


@bug(ROUNDED8, Ring, "_send_home")
def gradients_of_keys_rounded_on_the_way(real, self, made, k, v):
    rounded = [(i, grads and tuple(x.bfloat16().float() for x in grads)) for i, grads in made]
    return real(self, rounded, k, v)


@bug(change(dtype="bf16", v_mean=30.0), primitives, "chunk_delta")
def delta_from_the_high_part_alone(real, dout, out, lse, **options):
    return real(dout, out, lse, **{**options, "low": None})


@bug(change(window=(5, 0)), Schedule, "sees")
def window_off_by_one_at_chunk_borders(real, self, query_chunk, key_chunk):
    """A chunk that only its neighbour's first query sees is not sent."""
    some, every = real(self, query_chunk, key_chunk)
    low = (query_chunk - key_chunk - 1) * self.long + 1
    return some and not (query_chunk > key_chunk and self.bounds.left < low + 1), every


@bug(change(window=(1, 0)), Schedule, "sees")
def last_key_of_the_chunk_before_is_missed(real, self, query_chunk, key_chunk):
    some, every = real(self, query_chunk, key_chunk)
    return some and query_chunk == key_chunk, every


@bug(change(window=(5, 0)), Attention, "_options")
def window_one_longer(real, self, mask, at, seed):
    out = real(self, mask, at, seed)
    if out["window"] is not None:
        out["window"] = (out["window"][0] + 1, out["window"][1])
    return out


@planted(change(window=(9, 0)))
def second_zigzag_neighbour_is_missing(patch):
    real = Schedule.needs

    def needs(self, reader, source):
        part = real(self, reader, source)
        return Part.FIRST if part is Part.BOTH and reader != source else part

    def pairs(self, source):
        found = real_pairs(self, source)
        if source == self.rank:
            return found
        part = self.needs(self.rank, source)
        return tuple(p for p in found if p.k is part or part is Part.BOTH)

    real_pairs = Schedule.pairs
    patch.setattr(Schedule, "needs", needs)
    patch.setattr(Schedule, "pairs", pairs)


@bug(P2P, Ring, "_send_home")
def dk_summed_over_the_wrong_ranks(real, self, made, k, v):
    """The gradients of a step go to the rank after instead of to the owner."""
    partners = Ring._partners
    try:
        Ring._partners = lambda s, i: partners(s, s.comm.size - i)
        return real(self, made, k, v)
    finally:
        Ring._partners = partners


@bug(FULL, Ring, "backward")
def gradients_of_the_last_step_are_lost(real, self, k, v, compute):
    dk, dv = movement.accumulator(k), movement.accumulator(v)
    for arrival in self._arrivals(k, v, "backward"):
        block = arrival.block
        if not arrival.steps:
            compute(block, dk, dv)
            continue
        grads = movement.accumulator(block.k), movement.accumulator(block.v)
        compute(block, *grads)
        for step, rows in arrival.steps:
            home = self._send_home([(step, (grads[0][rows], grads[1][rows]))], k, v)
            if step + 1 < self.comm.size:
                self._add(home, dk, dv)
    return dk, dv


@bug(change(dropout_p=0.3), engine, "arguments")
def dropout_keyed_by_local_positions(real, q, k, *, by_position):
    out = real(q, k, by_position=by_position)
    # Same difference, so that the mask stays right.
    return out | {"q_position": 100 + q.position - k.position, "k_position": 100}


@bug(change(dropout_p=0.3, mode="a2a"), Attention, "_options")
def dropout_keyed_by_local_heads(real, self, mask, at, seed):
    return real(self, mask, at, seed) | {"head_offset": 0}


@bug(change(mode="a2a", kv=1), HeadExchange, "together")
def gradients_of_replicas_are_not_added(real, self, named):
    if self.split.replicas > 1 and len(named) == 3:
        named = [(n, x if n == "dq" else x * (self.comm.rank == 0)) for n, x in named]
    return real(self, named)


@bug(change(mode="a2a"), Dense, "gather")
def second_chunks_not_reversed(real, self, parts):
    half = parts.shape[1] // 2
    return torch.cat([*parts[:, :half].unbind(0), *parts[:, half:].unbind(0)], 0)


@bug(change(mode="all_gather"), Dense, "scatter")
def gradients_to_the_wrong_owner(real, self, x, ranks):
    return real(self, x, ranks).roll(1, 0)


@bug(change(mode="all_gather", causal=False), Gathered, "_send_home")
def own_share_added_twice(real, self, heads, grads, dk, dv):
    mine = self.tokens.scatter(grads[0], self.comm.size)[self.comm.rank]
    dk[..., heads, :].add_(mine)
    return real(self, heads, grads, dk, dv)


@bug(change(mode="a2a+p2p", window=(9, 0)), Dense, "larger")
def levels_swapped(real, self, ranks):
    """The p2p rank is taken for the a2a rank when tokens are put in order."""
    out = real(self, ranks)
    if ranks > 1:
        out.local = lambda rank, part: Dense.local(out, 1 - rank, part)
    return out


@planted(P2P)
def max_logits_of_one_rank_only(patch):
    from emulate import ThreadCommunicator

    patch.setattr(ThreadCommunicator, "maximum", lambda self, x: None)


@bug(FULL, Ring, "_arrivals")
def gradients_of_two_steps_change_places(real, self, k, v, what):
    for arrival in real(self, k, v, what):
        rows = [at for _, at in arrival.steps]
        steps = zip((step for step, _ in arrival.steps), reversed(rows), strict=True)
        yield dataclasses.replace(arrival, steps=tuple(steps))


@bug(P2P, Ring, "_runs")
def steps_of_which_other_queries_see_the_keys_are_joined(real, self, group):
    return [group]


@bug(P2P, Schedule, "pairs")
def causal_mask_between_different_chunks(real, self, source):
    return tuple(dataclasses.replace(p, mask=Mask.LOCAL) for p in real(self, source))


@bug(change(dropout_p=0.1), Dense, "local")
def chunk_positions_without_zigzag(real, self, rank, part):
    view = real(self, rank, part)
    if part is Part.SECOND:
        first = chunks_of(rank, self.size)[0]
        view = dataclasses.replace(view, position=(first + 1) * self.chunk)
    return view


@bug(change(layout="thd", causal=False), Packed, "__init__")
def padding_is_seen(real, self, *, cu, cu_padded, **rest):
    real(self, cu=cu_padded, cu_padded=cu_padded, **rest)


@bug(change(layout="thd", window=(6, 0)), Packed, "_lengths")
def documents_run_into_each_other(real, self, piece):
    """Positions count from the start of the pack; harmless for a mask, not for keys sent."""
    return real(self, piece + 1) if piece == 0 else real(self, piece)


@bug(change(causal=False, softcap=2.0), primitives, "chunk_backward")
def softcap_forgotten_in_the_backward(real, *args, softcap, **options):
    real(*args, softcap=0.0, **options)


@bug(change(layout="thd", window=(3, 0)), primitives, "merge_chunks")
def empty_rows_give_nan(real, out, lse, part, part_lse, *, layout):
    total = torch.log(torch.exp(lse) + torch.exp(part_lse))
    old = primitives._rows_like(torch.exp(lse - total), layout)
    out.mul_(old).add_(part * primitives._rows_like(torch.exp(part_lse - total), layout))
    lse.copy_(total)


@pytest.mark.parametrize("name", sorted(BUGS))
def test_caught(name, monkeypatch):
    case, plant = BUGS[name]
    given = make_inputs(case)
    exact, whole = truth(case, given), uncut(case, given)
    assert not complaints(case, found(run(case, given)), exact, whole)
    plant(monkeypatch)
    try:
        result = found(run(case, given))
    except (AssertionError, RuntimeError):
        return  # the two ends of a transfer disagree: over a real group, an error or a hang
    assert complaints(case, result, exact, whole), f"{name} was not noticed"


def test_how_many():
    assert len(BUGS) >= 25

"""Launches on sm_90; `forward` and `backward` have the signatures of the portable ones.

Tensors that a descriptor cannot describe (rows not 16-byte aligned, a stride of 0), chunks whose
positions only the device knows and calls without queries or keys take the portable kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton

from stable_attention import configs
from stable_attention.hopper.backward import backward_kernel
from stable_attention.hopper.descriptors import (
    described,
    entries,
    narrow,
    of_rows,
    processors,
    room,
    shared_counter,
    steps,
    tiled,
)
from stable_attention.hopper.forward import forward_kernel
from stable_attention.hopper.plan import (
    FAR,
    Plan,
    divisor,
    dropout,
    head_block,
    mask,
    planned,
    reach,
    segment,
    units,
)
from stable_attention.hopper.rows import (
    MARKED,
    places_kernel,
    rows_kernel,
    saturated_kernel,
    sum_kernel,
)
from stable_attention.hopper.shapes import FORWARD, TILES, width
from stable_attention.hopper.tiles import FIELDS, TILE
from stable_attention.hopper.wide import launch_keys, launch_queries
from stable_attention.layouts import strides
from stable_attention.problem import Extras, Problem
from stable_attention.stabilizers import KNOWN
from stable_attention.triton import backward as portable_backward
from stable_attention.triton import forward as portable_forward
from stable_attention.triton.launches import Arguments, launch
from stable_attention.triton.results import ForwardResult, allocate, new_gradients

PROJECTING = 232
"""Registers of a consumer where other warps sum the rows of dS, for which they need 32 at least."""
RANKED = 2**23
"""Keys that `numerics.key_of_rank` tells apart."""
L2_FORWARD = {True: 32 * 2**20, False: 8 * 2**20}
"""The same of the K and V that a group of query heads reads in the forward pass."""
NOTHING = (None,) * 12
"""Of what `sum_kernel` takes off a gradient of which nothing is."""


def forward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    extras: Extras,
    out_dtype: torch.dtype | None = None,
    with_max_logits: bool = False,
    with_lse: bool = True,
    config: configs.Tile | None = None,
) -> ForwardResult:
    """As `stable_attention.triton.forward.forward`, whose arguments these are."""
    assert config is None and not problem.dropout_p and not (problem.chunked and problem.varlen)
    partial = out_dtype == torch.float32
    result = allocate(
        problem, q.device,
        out_dtype=out_dtype or q.dtype, with_max_logits=with_max_logits, with_lse=with_lse,
    )  # fmt: skip
    low = result.low if result.low.numel() else None
    described = (q, k, v, *([] if partial else [result.out]), *([] if low is None else [low]))
    found = room(problem, described)
    if not found or extras.pos_q is not None:
        return portable_forward.forward(
            problem, q, k, v,
            extras=extras, out_dtype=out_dtype, with_max_logits=with_max_logits,
            with_lse=with_lse,
        )  # fmt: skip
    lse, row = (x if x.numel() else None for x in (result.lse, result.row_lse))
    rest = None
    if problem.planes > 1:
        row, rest = result.row_lse.unbind()
    sinks = extras.sinks if problem.has_sinks else None
    for part, cut in _parts(problem, found):
        plan = planned(part)
        counter, places = _places(plan, extras, q.device, backward=False)
        launch(
            forward_kernel,
            (plan,),
            (
                *(cut(x, True) for x in (q, k, v, result.out, low)),
                cut(lse), cut(row), result.max_logits if with_max_logits else None, sinks,
                cut(rest), counter, places, _total(plan, q.device),
            ),
            functools.partial(_forward_arguments, plan),
            own=3,
        )  # fmt: skip
    return result


def _total(plan: Plan, device: torch.device) -> torch.Tensor | None:
    """Where consumers keep the total of segments that nothing else has room for."""
    d, dv = width(plan.problem.d), width(plan.problem.dv)
    if not (FORWARD[d, dv].total_away and segment(plan.problem)):
        return None
    return torch.empty((plan.programs(device), 2, 64 * dv), dtype=torch.float32, device=device)


def _places(
    plan: Plan, extras: Extras, device: torch.device, *, backward: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(counter of items, where tiles of packed sequences lie): of queries, then of keys where the
    backward pass asks."""
    new = functools.partial(torch.empty, dtype=torch.int32, device=device)
    # In a tensor of its own: its address must be a multiple of 16.
    if not plan.problem.varlen:
        # `rows_kernel` sets that of the backward pass.
        return new(4) if backward else shared_counter(device), None
    counter = new(4)
    most = plan.backward_tiles if backward else plan.query_tiles
    places = new((1 + backward, most, FIELDS.value))
    cu_q, cu_k, start_q, start_k, _, _ = extras.pointers()
    launch(
        places_kernel,
        (plan, backward),
        (cu_q, cu_k, start_q, start_k, places, counter),
        functools.partial(_places_arguments, plan.problem, backward),
        own=2,
    )
    return counter, places


def _places_arguments(problem: Problem, backward: bool, *tensors: torch.Tensor) -> Arguments:
    places = tensors[4]
    positional = (
        *tensors, problem.batch, problem.sq, problem.sk, problem.tq, problem.tk, places.shape[1],
    )  # fmt: skip
    bm, bn = TILES[problem.d] if backward else (TILE.value, TILE.value)
    return (problem.batch, places.shape[0]), positional, {"BM": bm, "BN": bn, "num_warps": 4}


def backward(
    problem: Problem,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lse: torch.Tensor,
    delta: torch.Tensor,
    extras: Extras,
    accumulators: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) as `stable_attention.triton.backward.backward`, whose arguments these are."""
    assert not problem.chunked or not (problem.varlen or problem.dropout_p), "see `dispatch`"
    add = accumulators is not None
    assert problem.d <= 128 or not (add or problem.dropout_p or problem.softcap), "see `dispatch`"
    dq, dk, dv = accumulators or gradients or new_gradients(problem, q, k, v)[1]
    found = room(problem, (q, k, v, dout) if add else (q, k, v, dout, dk, dv))
    projects = bool(KNOWN[problem.stabilizer].projection)
    if not found or extras.pos_q is not None or (projects and problem.sk > RANKED):
        return portable_backward.backward(
            problem, dout, q, k, v, lse=lse, delta=delta, extras=extras,
            accumulators=accumulators, gradients=(dq, dk, dv), kept=kept,
        )  # fmt: skip
    target = None
    if problem.planes > 1 and delta.dim() == lse.dim():
        delta, target, _ = delta.unbind()
    for part, cut in _parts(problem, found):
        _launch(
            planned(part),
            *(cut(x, True) for x in (q, k, v, dout, dq, dk, dv)),
            numbers=tuple(cut(x) for x in (lse, delta, target)),
            kept=None if kept is None else (cut(kept[0]), cut(kept[1]), cut(kept[2], True)),
            extras=extras,
            add=add,
        )
    return dq, dk, dv


def _parts(problem: Problem, most: int) -> Iterator[tuple[Problem, Callable[..., Any]]]:
    """(Problem of ``most`` sequences of the batch, what cuts tensors to them) for all of it.

    A sequence has the bits that it has alone, so what is too large for a descriptor is cut and not
    handed over.
    """
    if most == entries(problem):
        yield problem, lambda x, tiled=False: x
        return
    for first in range(0, problem.batch, most):
        n = min(most, problem.batch - first)

        def cut(
            x: torch.Tensor | None, tiled: bool = False, first: int = first, n: int = n
        ) -> torch.Tensor | None:
            if x is None:
                return None
            planes = "sbhd" if x.dim() == 4 else ""  # they come before the batch
            return narrow(problem.layout if tiled else planes, first, n, x)

        offset = problem.batch_offset + first if problem.dropout_p > 0 else problem.batch_offset
        yield replace(problem, batch=n, batch_offset=offset), cut


def _launch(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    numbers: tuple[torch.Tensor | None, ...],
    kept: tuple[torch.Tensor, ...] | None,
    extras: Extras,
    add: bool,
) -> None:
    """numbers: of rows, LSE in one plane or two, delta, and what rows of dS sum to where a
    projecting stabilizer asks and it is not 0. kept: of chunks, as in `backward`."""
    lse, delta, target = numbers
    problem, parts, key_tiles = plan.problem, plan.parts, plan.key_tiles
    bm, bn = TILES[problem.d]
    tiles = plan.entries * problem.heads * plan.backward_tiles
    new = functools.partial(torch.empty, device=q.device)
    wide = problem.d > 128
    project = bool(KNOWN[problem.stabilizer].projection)

    def queries() -> None:
        table = _places(plan, extras, q.device, backward=False)
        launch_queries(plan, (q, k, v, dout, dq), numbers, table)

    if wide and project:
        queries()  # corrects the delta that dK is made with
    shift, padded = new((2, tiles, bm), dtype=torch.float32).unbind()
    excess = rank = weight = of_key = marks = None
    if project:
        shift = new((tiles, 2 * bm), dtype=torch.float32)
    if project and not wide:
        excess = new((tiles, bm), dtype=torch.float32)
        rank = new((tiles, bm), dtype=torch.int32)
        if kept is None:
            weight, of_key = torch.empty_like(excess), torch.empty_like(rank)
            tokens = problem.tk if problem.varlen else problem.sk
            blocks = triton.cdiv(tokens, MARKED.value) + 1
            marks = new((plan.entries * problem.kv_heads, blocks), dtype=torch.int32)
    turns = None if wide else new(tiles, dtype=torch.int32)
    counter, places = _places(plan, extras, q.device, backward=True)
    of_queries, of_keys = (None, None) if places is None else places.unbind()
    launch(
        rows_kernel,
        (plan,),
        (lse, delta, shift, padded, rank, marks, turns, counter, of_queries),
        functools.partial(_rows_arguments, plan),
        own=7,
    )
    if wide:
        launch_keys(plan, (q, k, v, dout, dk, dv, shift, padded, counter, of_keys))
        if not project:
            queries()
        return
    sums = new((tiles * bm, problem.d), dtype=torch.float32)
    partial = None
    if parts > 1 or add:
        rows = plan.entries * problem.kv_heads * parts * key_tiles * bn
        partial = new((2, rows, problem.d), dtype=torch.float32)
    launch(
        backward_kernel,
        (plan, add),
        (
            q, k, v, dout, *((None, None) if add else (dk, dv)),
            extras.seed if problem.dropout_p > 0 else None,
            shift, padded, sums, excess, rank, turns, counter, of_keys, partial,
        ),
        functools.partial(_backward_arguments, plan),
        own=9,
    )  # fmt: skip
    touched = turns if plan.band else None
    found = (
        NOTHING
        if excess is None
        else (k, q, target, *(kept or NOTHING[:3]), excess, rank, shift, weight, of_key, marks)
    )
    todo = [(dq, sums, found, touched, of_queries, False, problem.scale)]
    if partial is not None:
        of_k, of_v = partial.unbind()
        todo += [
            (dk, of_k, NOTHING, None, of_keys, True, problem.scale),
            (dv, of_v, NOTHING, None, of_keys, True, 1.0),
        ]
    for out, total, found, adds, table, keys, scale in todo:
        launch(
            sum_kernel,
            (plan, keys, scale, add),
            (out, *found, total, adds, None if places is None else counter, table),
            functools.partial(_sum_arguments, plan, keys, scale, add),
            own=10,
        )
    if weight is not None:
        launch(
            saturated_kernel,
            (plan,),
            (dk, q, weight, of_key, marks, None if places is None else counter, of_keys),
            functools.partial(_saturated_arguments, plan),
            own=5,
        )


def _rows_arguments(plan: Plan, lse: torch.Tensor, *tensors: torch.Tensor | None) -> Arguments:
    problem, tiles, marks = plan.problem, plan.backward_tiles, tensors[4]
    steps = (0, lse.stride(-2)) if problem.varlen else (lse.stride(-3), lse.stride(-2))
    plane = lse.stride(0) if problem.planes > 1 else None
    positional = (
        lse, *tensors, *steps, plane, None if marks is None else marks.numel(),
        problem.sq, problem.heads, tiles,
    )  # fmt: skip
    named: dict[str, object] = {
        "BM": TILES[problem.d][0], "PACKED": problem.varlen, "num_warps": 2,
    }  # fmt: skip
    return (plan.entries * problem.heads * tiles,), positional, named


def _sum_arguments(
    plan: Plan, keys: bool, scale: float, add: bool, out: torch.Tensor, k: torch.Tensor | None,
    q: torch.Tensor | None, target: torch.Tensor | None, *others: Any,
) -> Arguments:  # fmt: skip
    *found, total, adds, counter, table = others
    problem = plan.problem
    bm, bn = TILES[problem.d]
    heads, length, tiles, rows = (
        (problem.kv_heads, problem.sk, plan.key_tiles, bn)
        if keys
        else (problem.heads, problem.sq, plan.backward_tiles, bm)
    )
    # None is no argument of a compiled kernel: calls without keep their code.
    carrier: tuple[float | None, ...] = (None,) * 14
    if k is not None and q is not None:
        rows_of: tuple[int, ...] = (0, 0)
        like = target if found[0] is None else found[0]
        if like is not None:
            rows_of = (0, like.stride(0)) if problem.varlen else like.stride()[:2]
        marks = found[-1]
        carrier = (
            *rows_of, *strides(k, problem.layout), *strides(q, problem.layout),
            0 if marks is None else marks.shape[1],
            problem.sk, *reach(problem), problem.group, units(problem)[0],
        )  # fmt: skip
    positional = (
        total, out, adds, counter, table, *strides(out, problem.layout), length, heads, tiles,
        scale, *found, target, k, q, *carrier,
    )  # fmt: skip
    named: dict[str, object] = {
        "ROWS": rows, "D": problem.d, "PARTS": plan.parts if keys else 1,
        "TURNS": adds is not None, "PACKED": problem.varlen, "LATER": int(keys),
        "ADD": add, "num_warps": rows // 16,
    }  # fmt: skip
    return (plan.entries * heads * tiles,), positional, named


def _saturated_arguments(
    plan: Plan, dk: torch.Tensor, q: torch.Tensor, weight: torch.Tensor, of_key: torch.Tensor,
    marks: torch.Tensor, *table: torch.Tensor | None,
) -> Arguments:  # fmt: skip
    problem = plan.problem
    bm, bn = TILES[problem.d]
    positional = (
        dk, q, weight, of_key, marks, *table, *strides(dk, problem.layout),
        *strides(q, problem.layout), marks.shape[1], problem.sq, problem.sk, *reach(problem),
        problem.kv_heads, problem.group, plan.key_tiles, plan.backward_tiles, problem.scale,
    )  # fmt: skip
    named: dict[str, object] = {
        "BM": bm, "BN": bn, "D": problem.d, "PACKED": problem.varlen, "SCAN": 1024, "STEP": 64,
        # Most programs have no work: two to a processor.
        "num_warps": 8, "maxnreg": 128,
    }  # fmt: skip
    return (plan.entries * problem.kv_heads * plan.key_tiles,), positional, named


def _forward_arguments(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    low: torch.Tensor | None,
    lse: torch.Tensor | None,
    row: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    sinks: torch.Tensor | None,
    rest: torch.Tensor | None,
    counter: torch.Tensor,
    places: torch.Tensor | None,
    total: torch.Tensor | None,
) -> Arguments:
    problem, query_tiles = plan.problem, plan.query_tiles
    partial = out.dtype == torch.float32
    d, dv, layout = width(problem.d), width(problem.dv), problem.layout
    tile = FORWARD[d, dv]
    bn, columns = tile.bn, tile.columns
    bounds, masked = mask(problem, square=bn == TILE.value)
    limited = reach(problem)[1] != FAR
    heads = plan.entries * problem.heads
    positional = (
        tiled(q, layout, 64, columns), tiled(k, layout, bn, columns), tiled(v, layout, bn, dv),
        None if partial else tiled(out, layout, 64, tile.out),
        None if low is None else tiled(low, layout, 64, tile.out),
        out if partial else None, lse, row, max_logits, sinks, rest, counter, places, total,
        *(s for x in (q, k, v, out) for s in steps(x, layout)),
        strides(out, layout)[1] if partial else None,
        problem.sq, problem.sk, problem.tq if problem.varlen else problem.sq, *bounds,
        query_tiles, triton.cdiv(problem.sk, bn),
        divisor(heads, L2_FORWARD[limited] // max(1, 2 * (d + dv) * problem.sk)), heads,
        problem.heads, *units(problem),
    )  # fmt: skip
    named: dict[str, object] = {
        "D": d, "DV": dv, "BN": bn, "GROUP": problem.group, "CAPPED": problem.softcap > 0,
        **masked, "EVEN": masked["BAND"] or problem.sk % bn == 0,
        "SLOTS": tile.slots, "Q_SLOTS": tile.q_slots,
        "SEGMENT": segment(problem), "ROUNDED": KNOWN[problem.stabilizer].rounded_normalizer,
        "SUM": lse is not None, "HAS_LOW": low is not None, "HAS_MAX": max_logits is not None,
        "HAS_SINK": sinks is not None, "Q_IN_REGISTERS": tile.q_in_registers,
        # A consumer gets 240 of them: what the kernel starts with leaves these to it.
        "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    return (plan.programs(q.device),), positional, named


def _backward_arguments(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    seed: torch.Tensor | None,
    shift: torch.Tensor,
    delta: torch.Tensor,
    sums: torch.Tensor,
    excess: torch.Tensor | None,
    *small: torch.Tensor | None,
) -> Arguments:
    problem, parts, key_tiles = plan.problem, plan.parts, plan.key_tiles
    d, layout = problem.d, problem.layout
    bm, bn = TILES[d]
    heads = plan.entries * problem.kv_heads * parts
    (bounds, masked), (unit, steepness) = mask(problem), units(problem)
    positional = (
        *(tiled(x, layout, rows) for x, rows in ((q, bm), (k, bn), (v, bn), (dout, bm))),
        of_rows(shift), of_rows(delta),
        *(None if x is None else tiled(x, layout, 64) for x in (dk, dv)),
        described(sums, list(sums.shape), [d, 1], [64, d if bm == 128 else d // 2]),
        None if excess is None else of_rows(excess), *small, seed,
        *(s for x in (q, k, v, dout, dk, dv) for s in ((0, 0) if x is None else steps(x, layout))),
        problem.sq, problem.sk, *bounds, heads, key_tiles, plan.backward_tiles,
        head_block(problem, parts), problem.kv_heads * parts,
        # None is no argument of a compiled kernel: calls without keep their code.
        unit, steepness if problem.softcap else None, problem.scale,
        *((None,) * 4 if seed is None else dropout(problem)),
    )  # fmt: skip
    named: dict[str, object] = {
        "BM": bm, "BN": bn, "D": d, "CAPPED": problem.softcap > 0, "DROPOUT": seed is not None,
        **masked, "EVEN": masked["BAND"] or problem.sk % bn == 0,
        "GROUP": problem.group // parts, "SPLITS": parts,
        "SUMS": small[-1] is not None,
        # At d = 64 the scores of the next tile have no registers left.
        "AHEAD": d == 128, "PROJECT": excess is not None,
        # Of a consumer; what the kernel starts with leaves these to it.
        "REGISTERS": 240 if excess is None else PROJECTING, "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    return (min(heads * key_tiles, processors(q.device)),), positional, named


__all__ = ["backward", "forward"]

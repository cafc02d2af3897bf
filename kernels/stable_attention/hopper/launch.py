"""Launches on sm_90; `forward` and `backward` have the signatures of the portable ones.

Tensors that a descriptor cannot describe (rows not 16-byte aligned, a stride of 0) and calls
without queries or keys take the portable kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stable_attention import configs
from stable_attention.hopper.backward import backward_kernel
from stable_attention.hopper.descriptors import (
    ROW,
    described,
    entries,
    narrow,
    room,
    shared_counter,
    steps,
    tiled,
)
from stable_attention.hopper.forward import forward_kernel
from stable_attention.hopper.rows import places_kernel, rows_kernel, sum_kernel
from stable_attention.hopper.shapes import FORWARD, TILES, WIDE, width
from stable_attention.hopper.tiles import FIELDS, TILE
from stable_attention.hopper.wide import wide_kernel
from stable_attention.layouts import strides
from stable_attention.problem import UNLIMITED, Extras, Problem
from stable_attention.triton import backward as portable_backward
from stable_attention.triton import forward as portable_forward
from stable_attention.triton.launches import KEPT, Arguments, launch
from stable_attention.triton.options import LOG2E
from stable_attention.triton.results import ForwardResult, allocate, new_gradients

L2_BYTES = {True: 12 * 2**20, False: 24 * 2**20}
"""Causal or not -> bytes of Q, K, V and dO that a group of heads may have in the backward pass.
Without a mask all key tiles of a head start at its first query tile, one after the other: more
heads, less waiting."""
L2_FORWARD = {True: 32 * 2**20, False: 8 * 2**20}
"""The same of the K and V that a group of query heads reads in the forward pass."""
WIDE_HEADS = 8
"""Head dims above 128: heads of a group at least. With fewer, more key tiles of a head run at once,
each of which waits for the one before."""
FAR = 2**30
"""Keys to the side that no window has."""
PROCESSORS = 132
"""Of an H100 or H200: how a call is split must not depend on the device, or its bits would."""
SEGMENT = 2048
"""Keys that the tensor cores add up before "compensated" adds in float32. `numerics.truncation` of
them, 8e-6, is within the 1e-5 of RMS(delta) that its mean error may have at any length."""


def _divisor(heads: int, most: int) -> int:
    """The largest group, of ``most`` heads and of 1 at least, into which all heads divide."""
    return next(n for n in range(max(1, min(heads, most)), 0, -1) if heads % n == 0)


def _banded(problem: Problem) -> bool:
    """Whether the visible keys are those of a band: neither all nor all up to the diagonal."""
    left, right = problem.window_left, problem.window_right
    aligned = right == UNLIMITED or (right == 0 and problem.sq == problem.sk)
    return problem.varlen or left != UNLIMITED or not aligned


def _mask(problem: Problem, *, square: bool = True) -> tuple[tuple[int, int], dict[str, object]]:
    """(left, right) of a band, and what kernels are told of the mask.

    A causal mask is one where tiles are not ``square``.
    """
    band = _banded(problem) or (problem.window_right == 0 and not square)
    bounds = (problem.window_left, problem.window_right)
    left, right = (FAR if x == UNLIMITED else min(x, FAR) for x in bounds)
    causal = problem.window_right == 0 and not band
    return (left, right), {"CAUSAL": causal, "BAND": band, "PACKED": problem.varlen}


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What the launches of a problem share, worked out once; known by its identity."""

    problem: Problem
    band: bool
    entries: int
    parts: int
    """`splits`."""
    query_tiles: int
    """Of a head in the forward pass; of packed sequences a bound."""
    backward_tiles: int
    """Of a head in the backward pass; of packed sequences a bound on those of keys too."""
    key_tiles: int

    @classmethod
    def of(cls, problem: Problem) -> _Plan:
        (bm, bn), most = TILES[width(problem.d)], max(problem.tq, problem.tk)

        def tiles(length: int, rows: int) -> int:
            if problem.varlen:
                return triton.cdiv(most, rows) + problem.batch
            return triton.cdiv(length, rows)

        return cls(
            problem, _banded(problem), entries(problem), splits(problem),
            query_tiles=tiles(problem.sq, TILE.value),
            backward_tiles=tiles(problem.sq, bm),
            key_tiles=tiles(problem.sk, min(bm, bn) if problem.varlen else bn),
        )  # fmt: skip


_plan = functools.lru_cache(maxsize=KEPT)(_Plan.of)


def splits(problem: Problem) -> int:
    """Parts of the query heads of a key/value head, each an item of the backward pass.

    Items are started in the order in which their additions to dQ get ready, under a causal mask the
    longest last: the fewer there are, the longer most processors wait for it. But float32 dK and dV
    of each part go through memory. Reckoned in query tiles of one processor, and for a batch of
    one: the bits of a sequence do not depend on what else there is.
    """
    if problem.d > 128:
        return 1
    bm, bn = TILES[width(problem.d)]
    left = problem.window_left
    uneven = problem.window_right != UNLIMITED and left == UNLIMITED
    queries = problem.sq
    if left != UNLIMITED:
        queries = min(queries, left + max(problem.window_right, 0) + bn)
    query_tiles = triton.cdiv(queries, bm)
    items = problem.kv_heads * triton.cdiv(problem.sk, bn)

    def cost(parts: int) -> float:
        longest = problem.group // parts * query_tiles
        rounds = max(1.0, items * parts / PROCESSORS)
        traffic = 3.2 * rounds if parts > 1 else 0.0
        return longest * (0.5 * rounds + 0.6 if uneven else rounds) + traffic

    return min((n for n in (1, 2, 4) if problem.group % n == 0), key=cost)


def head_block(problem: Problem, parts: int = 1) -> int:
    """Parts of key/value heads of a group in the backward pass, counted over the batch."""
    one = 2 * (problem.d + problem.dv) * (problem.sk + problem.group // parts * problem.sq)
    most = L2_BYTES[problem.window_right != UNLIMITED] // max(1, one)
    if problem.d > 128:
        most = max(most, WIDE_HEADS)
    return _divisor(entries(problem) * problem.kv_heads * parts, most)


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
    assert out_dtype in (None, q.dtype) and config is None, "partial outputs are the portable set's"
    result = allocate(
        problem, q.device, out_dtype=q.dtype, with_max_logits=with_max_logits, with_lse=with_lse
    )
    low = result.low if result.low.numel() else None
    described = (q, k, v, result.out) if low is None else (q, k, v, result.out, low)
    found = room(problem, described)
    if not found:
        return portable_forward.forward(
            problem, q, k, v,
            extras=extras, with_max_logits=with_max_logits, with_lse=with_lse,
        )  # fmt: skip
    lse, row = (x if x.numel() else None for x in (result.lse, result.row_lse))
    sinks = extras.sinks if problem.has_sinks else None
    for part, cut in _parts(problem, found):
        plan = _plan(part)
        counter, places = _places(plan, extras, q.device, backward=False)
        launch(
            forward_kernel,
            (plan,),
            (
                *(cut(x, True) for x in (q, k, v, result.out, low)),
                cut(lse), cut(row), result.max_logits if with_max_logits else None, sinks,
                counter, places,
            ),
            functools.partial(_forward_arguments, plan),
            own=2,
        )  # fmt: skip
    return result


def _places(
    plan: _Plan, extras: Extras, device: torch.device, *, backward: bool
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
    bm, bn = TILES[width(problem.d)]
    rows = bm if backward else TILE.value
    return (problem.batch, places.shape[0]), positional, {"BM": rows, "BN": bn, "num_warps": 4}


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) as `stable_attention.triton.backward.backward`, whose arguments these are."""
    assert accumulators is None and not problem.softcap, "the portable kernels' (`dispatch`)"
    dq, dk, dv = gradients or new_gradients(problem, q, k, v)[1]
    found = room(problem, (q, k, v, dout, dk, dv))
    if not found:
        return portable_backward.backward(
            problem, dout, q, k, v, lse=lse, delta=delta, extras=extras, gradients=(dq, dk, dv)
        )
    for part, cut in _parts(problem, found):
        _launch(
            _plan(part),
            *(cut(x, True) for x in (q, k, v, dout, dq, dk, dv)),
            lse=cut(lse),
            delta=cut(delta),
            extras=extras,
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
            return None if x is None else narrow(problem.layout if tiled else "", first, n, x)

        yield replace(problem, batch=n), cut


def _launch(
    plan: _Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    lse: torch.Tensor,
    delta: torch.Tensor,
    extras: Extras,
) -> None:
    problem, parts, key_tiles = plan.problem, plan.parts, plan.key_tiles
    bm, bn = TILES[width(problem.d)]
    tiles = plan.entries * problem.heads * plan.backward_tiles
    new = functools.partial(torch.empty, device=q.device)
    sums = new((tiles * bm, width(problem.d)), dtype=torch.float32)
    shift, padded = new((2, tiles, bm), dtype=torch.float32).unbind()
    turns = new(tiles, dtype=torch.int32)
    counter, places = _places(plan, extras, q.device, backward=True)
    of_queries, of_keys = (None, None) if places is None else places.unbind()
    launch(
        rows_kernel,
        (plan,),
        (lse, delta, shift, padded, turns, counter, of_queries),
        functools.partial(_rows_arguments, plan),
        own=5,
    )
    partial = None
    if parts > 1:
        rows = plan.entries * problem.kv_heads * parts * key_tiles * bn
        partial = new((2, rows, width(problem.d)), dtype=torch.float32)
    wide = problem.d > 128
    small = (turns, counter, of_keys) if wide else (turns, counter, of_keys, partial)
    launch(
        wide_kernel if wide else backward_kernel,
        (plan,),
        (q, k, v, dout, dk, dv, shift, padded, sums, *small),
        functools.partial(_backward_arguments, plan),
        own=3 + len(small),
    )
    touched = turns if plan.band else None
    todo = [(dq, sums, touched, of_queries, False, problem.scale)]
    if partial is not None:
        of_k, of_v = partial.unbind()
        todo += [
            (dk, of_k, None, of_keys, True, problem.scale),
            (dv, of_v, None, of_keys, True, 1.0),
        ]
    for out, total, adds, table, keys, scale in todo:
        launch(
            sum_kernel,
            (plan, keys, scale),
            (out, total, adds, None if places is None else counter, table),
            functools.partial(_sum_arguments, plan, keys, scale),
            own=4,
        )


def _rows_arguments(plan: _Plan, lse: torch.Tensor, *tensors: torch.Tensor) -> Arguments:
    problem, tiles = plan.problem, plan.backward_tiles
    steps = (0, lse.stride(0)) if problem.varlen else (lse.stride(0), lse.stride(1))
    positional = (lse, *tensors, *steps, problem.sq, problem.heads, tiles)
    named: dict[str, object] = {
        "BM": TILES[width(problem.d)][0], "PACKED": problem.varlen, "num_warps": 2,
    }  # fmt: skip
    return (plan.entries * problem.heads * tiles,), positional, named


def _sum_arguments(
    plan: _Plan, keys: bool, scale: float, out: torch.Tensor, total: torch.Tensor, *others: Any
) -> Arguments:
    problem = plan.problem
    heads, length, tiles, rows = (
        (problem.kv_heads, problem.sk, plan.key_tiles, TILES[width(problem.d)][1])
        if keys
        else (problem.heads, problem.sq, plan.backward_tiles, TILES[width(problem.d)][0])
    )
    positional = (
        total, out, *others, *strides(out, problem.layout), length, heads, tiles, scale,
    )  # fmt: skip
    named: dict[str, object] = {
        "ROWS": rows, "D": total.shape[1], "C": triton.next_power_of_2(total.shape[1]),
        "WIDTH": problem.d, "PARTS": plan.parts if keys else 1,
        "TURNS": others[0] is not None, "PACKED": problem.varlen, "LATER": int(keys),
        "num_warps": rows // 16,
    }  # fmt: skip
    return (plan.entries * heads * tiles,), positional, named


def _forward_arguments(
    plan: _Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    low: torch.Tensor | None,
    lse: torch.Tensor | None,
    row: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    sinks: torch.Tensor | None,
    counter: torch.Tensor,
    places: torch.Tensor | None,
) -> Arguments:
    problem, query_tiles = plan.problem, plan.query_tiles
    d, dv, layout = width(problem.d), width(problem.dv), problem.layout
    tile = FORWARD[d, dv]
    bn, columns, out_columns = tile.bn, tile.columns, tile.out
    bounds, mask = _mask(problem, square=bn == TILE.value)
    limited = problem.window_right != UNLIMITED
    heads = plan.entries * problem.heads
    positional = (
        tiled(q, layout, 64, columns), tiled(k, layout, bn, columns), tiled(v, layout, bn, dv),
        tiled(out, layout, 64, out_columns),
        None if low is None else tiled(low, layout, 64, out_columns),
        lse, row, max_logits, sinks, counter, places,
        *(s for x in (q, k, v, out) for s in steps(x, layout)),
        problem.sq, problem.sk, problem.tq if problem.varlen else problem.sq, *bounds,
        query_tiles, triton.cdiv(problem.sk, bn),
        _divisor(heads, L2_FORWARD[limited] // max(1, 2 * (d + dv) * problem.sk)), heads,
        problem.heads,
        (problem.softcap or problem.scale) * LOG2E,
        2 * LOG2E * problem.scale / problem.softcap if problem.softcap else 0.0,
    )  # fmt: skip
    named: dict[str, object] = {
        "D": d, "DV": dv, "BN": bn, "GROUP": problem.group, "CAPPED": problem.softcap > 0,
        **mask,
        "EVEN": mask["BAND"] or problem.sk % bn == 0,
        "SLOTS": tile.slots, "Q_SLOTS": tile.q_slots,
        "SEGMENT": (
            SEGMENT // bn if row is not None and problem.sk > SEGMENT and tile.segments else 0
        ),
        "ROUNDED": row is not None, "SUM": lse is not None, "HAS_LOW": low is not None,
        "HAS_MAX": max_logits is not None, "HAS_SINK": sinks is not None,
        "Q_IN_REGISTERS": tile.q_in_registers,
        # A consumer gets 240 of them: what the kernel starts with leaves these to it.
        "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    return (min(heads * query_tiles, _processors(q.device)),), positional, named


def _backward_arguments(
    plan: _Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    sums: torch.Tensor,
    *small: torch.Tensor | None,
) -> Arguments:
    problem, parts, key_tiles = plan.problem, plan.parts, plan.key_tiles
    d, layout = width(problem.d), problem.layout
    bm, bn = TILES[d]
    heads = plan.entries * problem.kv_heads * parts
    bounds, mask = _mask(problem)
    wide, all_of_v = d > 128, width(problem.dv)
    columns = FORWARD[d, all_of_v].columns
    # Of a piece of dQ.
    piece = 32 if wide else d if bm == 128 else d // 2
    gradients: tuple[object, ...] = (dk, dv)
    if not wide:
        gradients = (tiled(dk, layout, 64, d), tiled(dv, layout, 64, d))

    def of_rows(x: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), [bm, 1], [1, bm], ROW)

    positional = (
        tiled(q, layout, bm, columns), tiled(k, layout, bn, columns),
        tiled(v, layout, bn, all_of_v), tiled(dout, layout, bm, all_of_v),
        of_rows(shift), of_rows(delta), *gradients,
        described(sums, list(sums.shape), [d, 1], [64, piece]),
        *small,
        *(s for x in (q, k, v, dout) for s in steps(x, layout)),
        *(s for x in (dk, dv) for s in (strides(x, layout) if wide else steps(x, layout))),
        problem.sq, problem.sk, *bounds, heads, key_tiles, plan.backward_tiles,
        head_block(problem, parts), problem.kv_heads * parts,
        problem.scale * LOG2E, problem.scale,
    )  # fmt: skip
    shared: dict[str, object] = {
        "D": d, "PACKED": problem.varlen, "GROUP": problem.group // parts,
        # Of a consumer; what the kernel starts with leaves these to it.
        "REGISTERS": 240, "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    if wide:
        whole = not mask["BAND"] and not mask["CAUSAL"] and problem.sk % bn == 0
        named = shared | {"DV": all_of_v, "BAND": not whole, **WIDE[d]}
        return (min(heads * key_tiles, _processors(q.device)),), positional, named
    named = shared | {
        "BM": bm, "BN": bn,
        **mask, "EVEN": mask["BAND"] or problem.sk % bn == 0,
        "SPLITS": parts,
        # At d = 64 the scores of the next tile have no registers left.
        "AHEAD": d == 128,
    }  # fmt: skip
    return (min(heads * key_tiles, _processors(q.device)),), positional, named


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # an H100 that is not there: the launch is only compiled (`aot`)
    return torch.cuda.get_device_properties(device).multi_processor_count


__all__ = ["backward", "forward"]

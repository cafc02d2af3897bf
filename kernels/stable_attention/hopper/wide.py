"""Arguments of the kernels that are the backward pass of head dims above 128: dK and dV in one, dQ
in another. These are seven products of tiles, not the five of `backward`, and no program waits for
another; sums of dQ that several add to would go through L2, which bounds these head dims.

Shape legend: as in `forward`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from stable_attention.hopper.descriptors import of_rows, processors, steps, tiled
from stable_attention.hopper.key_gradients import key_gradients_kernel
from stable_attention.hopper.plan import FAR, Plan, divisor, head_block, mask, reach, units
from stable_attention.hopper.query_gradient import query_kernel
from stable_attention.hopper.shapes import FORWARD, TILES
from stable_attention.layouts import strides
from stable_attention.triton.launches import Arguments, Tensors, launch


class KeyTile(NamedTuple):
    """Of the kernel of dK and dV."""

    slots: int
    """Of each of its rings."""
    queries: int
    """Of a product: of the scores of more, registers have no room."""
    spared: bool
    """`key_gradients`: what is faster under a causal mask."""


KEY_TILES = {(192, 128): KeyTile(4, 64, True), (256, 256): KeyTile(3, 32, False)}
"""(head dim of q and k, of v) -> tile."""


class QueryTile(NamedTuple):
    """Of the kernel of dQ, 128 queries of which are a tile's."""

    columns: int
    """Of q and k in a tile of shared memory."""
    k_slots: int
    v_slots: int
    do_in_registers: bool
    turns: bool


QUERY_TILES = {
    (192, 128): QueryTile(64, 3, 3, do_in_registers=True, turns=True),
    (256, 256): QueryTile(256, 2, 1, do_in_registers=False, turns=False),
}
"""(head dim of q and k, of v) -> tile."""
BLOCK = 64
"""Keys of a block of it."""
L2_BYTES = {True: 32 * 2**20, False: 8 * 2**20}
"""Causal or not -> bytes of K and V that a group of query heads may have."""


def launch_keys(plan: Plan, tensors: Tensors) -> None:
    """tensors: of `key_arguments`."""
    launch(
        key_gradients_kernel, (plan,), tensors, functools.partial(key_arguments, plan), own=4
    )  # fmt: skip


def launch_queries(plan: Plan, tensors: Tensors, numbers: Tensors, table: Tensors) -> None:
    """tensors: q, k, v, dO and dQ; numbers: LSE, delta and target of `launch`; table: counter of
    items, and places.

    Of a projecting stabilizer delta is corrected in place, as `triton.backward.backward` does.
    """
    launch(
        query_kernel,
        (plan,),
        (*tensors, *numbers, *table),
        functools.partial(query_arguments, plan),
        own=2,
    )


def key_arguments(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    shift: torch.Tensor,
    delta: torch.Tensor,
    counter: torch.Tensor,
    places: torch.Tensor | None,
) -> Arguments:
    """Of `key_gradients`, to which a causal mask is a band and keys past the end are one."""
    problem, key_tiles, layout = plan.problem, plan.key_tiles, plan.problem.layout
    bm, bn = TILES[problem.d]
    columns = FORWARD[problem.d, problem.dv].columns
    tile = KEY_TILES[problem.d, problem.dv]
    heads = plan.entries * problem.kv_heads
    bounds, masked = mask(problem, square=False)
    positional = (
        tiled(q, layout, bm, columns), tiled(k, layout, bn, columns),
        tiled(v, layout, bn), tiled(dout, layout, bm), of_rows(shift), of_rows(delta),
        tiled(dk, layout, bn, 64), tiled(dv, layout, bn, 64), counter, places,
        *(s for x in (q, k, v, dout, dk, dv) for s in steps(x, layout)),
        problem.sq, problem.sk, *bounds, heads, key_tiles, plan.backward_tiles,
        head_block(problem), problem.kv_heads, problem.group, units(problem)[0], problem.scale,
    )  # fmt: skip
    named: dict[str, object] = {
        "D": problem.d, "SLOTS": tile.slots, "N": tile.queries, "SPARED": tile.spared,
        "BAND": bool(masked["BAND"]) or problem.sk % bn != 0, "PACKED": problem.varlen,
        # Of a consumer; what the kernel starts with leaves these to it.
        "REGISTERS": 240, "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    return (min(heads * key_tiles, processors(q.device)),), positional, named


def query_arguments(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    target: torch.Tensor | None,
    counter: torch.Tensor,
    places: torch.Tensor | None,
) -> Arguments:
    problem, query_tiles = plan.problem, plan.query_tiles
    d, dv, layout = problem.d, problem.dv, problem.layout
    tile = QUERY_TILES[d, dv]
    bounds, masked = mask(problem, square=False)
    limited = reach(problem)[1] != FAR
    heads = plan.entries * problem.heads
    project = problem.planes > 1
    plane, *rows = lse.stride() if project else (None, *lse.stride())
    positional = (
        tiled(q, layout, 64, tile.columns), tiled(dout, layout, 64),
        tiled(k, layout, BLOCK, tile.columns), tiled(v, layout, BLOCK),
        dq, lse, delta, target, k if project else None, counter, places,
        *(s for x in (q, dout, k, v) for s in steps(x, layout)), *strides(dq, layout),
        # None is no argument of a compiled kernel: calls without keep their code.
        strides(k, layout)[1] if project else None,
        *((0, rows[0]) if problem.varlen else rows[:2]), plane,
        problem.sq, problem.sk, *bounds, query_tiles, triton.cdiv(problem.sk, BLOCK),
        divisor(heads, L2_BYTES[limited] // max(1, 2 * (d + dv) * problem.sk)), heads,
        problem.heads, units(problem)[0], problem.scale,
    )  # fmt: skip
    named: dict[str, object] = {
        "D": d, "DV": dv, "BN": BLOCK, "GROUP": problem.group,
        "K_SLOTS": tile.k_slots, "V_SLOTS": tile.v_slots,
        # The longest items first.
        "CAUSAL": limited, "BAND": masked["BAND"], "PACKED": masked["PACKED"],
        "MASKED": masked["BAND"] or problem.sk % BLOCK != 0,
        "DO_IN_REGISTERS": tile.do_in_registers, "TURNS": tile.turns, "PROJECT": project,
        # A consumer gets 240 of them: what the kernel starts with leaves these to it.
        "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    return (min(heads * query_tiles, processors(q.device)),), positional, named


__all__ = [
    "KEY_TILES",
    "QUERY_TILES",
    "key_arguments",
    "launch_keys",
    "launch_queries",
    "query_arguments",
]

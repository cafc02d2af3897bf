"""Arguments of the launches whose kernels serve the backward pass of head dims above 128.

Shape legend: as in `forward`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from stable_attention.hopper.descriptors import steps, tiled
from stable_attention.hopper.plan import FAR, Plan, divisor, mask, reach, units
from stable_attention.layouts import strides
from stable_attention.triton.launches import Arguments


class QueryTile(NamedTuple):
    """Of the kernel of dQ, 128 queries of which are a tile's."""

    columns: int
    """Of q and k in a tile of shared memory."""
    k_slots: int
    v_slots: int
    q_slots: int = 1
    do_in_registers: bool = False
    turns: int = 0
    ahead: bool = True


QUERY_TILES = {
    (192, 128): QueryTile(64, 2, 3, q_slots=2, do_in_registers=True, turns=1),
    (256, 256): QueryTile(256, 2, 1),
}
"""(head dim of q and k, of v) -> tile."""
BLOCK = 64
"""Keys of a block of it."""
L2_BYTES = {True: 32 * 2**20, False: 8 * 2**20}
"""Causal or not -> bytes of K and V that a group of query heads may have."""


def query_arguments(
    plan: Plan,
    processors: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    counter: torch.Tensor,
    places: torch.Tensor | None,
) -> Arguments:
    problem, query_tiles = plan.problem, plan.query_tiles
    d, dv, layout = problem.d, problem.dv, problem.layout
    tile = QUERY_TILES[d, dv]
    bounds, masked = mask(problem, square=False)
    limited = reach(problem)[1] != FAR
    heads = plan.entries * problem.heads
    positional = (
        q, dout, tiled(q, layout, 64, tile.columns), tiled(dout, layout, 64),
        tiled(k, layout, BLOCK, tile.columns), tiled(v, layout, BLOCK),
        dq, lse, delta, counter, places,
        *(s for x in (q, dout, k, v) for s in steps(x, layout)),
        strides(q, layout)[1], strides(dout, layout)[1], *strides(dq, layout),
        *((0, lse.stride(0)) if problem.varlen else (lse.stride(0), lse.stride(1))),
        problem.sq, problem.sk, *bounds, query_tiles, triton.cdiv(problem.sk, BLOCK),
        divisor(heads, L2_BYTES[limited] // max(1, 2 * (d + dv) * problem.sk)), heads,
        problem.heads, units(problem)[0], problem.scale,
    )  # fmt: skip
    named: dict[str, object] = {
        "D": d, "DV": dv, "BN": BLOCK, "GROUP": problem.group,
        "K_SLOTS": tile.k_slots, "V_SLOTS": tile.v_slots,
        "Q_SLOTS": tile.q_slots,
        # The longest items first.
        "CAUSAL": limited, "BAND": masked["BAND"], "PACKED": masked["PACKED"],
        "MASKED": masked["BAND"] or problem.sk % BLOCK != 0,
        "DO_IN_REGISTERS": tile.do_in_registers, "TURNS": tile.turns,
        "AHEAD": tile.ahead,
        # A consumer gets 240 of them: what the kernel starts with leaves these to it.
        "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    return (min(heads * query_tiles, processors),), positional, named


__all__ = ["BLOCK", "QUERY_TILES", "QueryTile", "query_arguments"]

"""Arguments of the kernels that are the backward pass of head dims above 128: dK and dV in one, dQ
in another. These are seven products of tiles, not the five of `backward`, and no program waits for
another; sums of dQ that several add to would go through L2, which bounds these head dims.

Shape legend: as in `forward`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from stable_attention.hopper.descriptors import of_rows, processors, steps, tiled
from stable_attention.hopper.plan import Plan, head_block, mask, units
from stable_attention.hopper.shapes import FORWARD, TILES
from stable_attention.triton.launches import Arguments


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


__all__ = ["KEY_TILES", "KeyTile", "key_arguments"]

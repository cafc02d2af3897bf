"""Arguments of the kernels that are the backward pass of head dims above 128: seven products in two
kernels, and no sum that several programs add to."""

from __future__ import annotations

import torch

from stable_attention.hopper.descriptors import of_rows, processors, steps, tiled
from stable_attention.hopper.plan import Plan, head_block, mask, units
from stable_attention.hopper.shapes import FORWARD, TILES, WIDE_SLOTS
from stable_attention.layouts import strides
from stable_attention.triton.launches import Arguments


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
    """Of `key_gradients`: a causal mask is a band, too, and gradients have no descriptors."""
    problem, key_tiles = plan.problem, plan.key_tiles
    d, dv_width, layout = problem.d, problem.dv, problem.layout
    bm, bn = TILES[d]
    columns = FORWARD[d, dv_width].columns
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
        "D": d, "SLOTS": WIDE_SLOTS[d], "N": 32 if d == 256 else 64,
        "BAND": bool(masked["BAND"]) or problem.sk % bn != 0, "PACKED": problem.varlen,
        # Of a consumer; what the kernel starts with leaves these to it.
        "REGISTERS": 240, "A0": 4, "A1": 4,  "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    return (min(heads * key_tiles, processors(q.device)),), positional, named


def pair_arguments(plan, *tensors):
    """Experiment."""
    import dataclasses

    import triton

    p = plan.problem
    tiles = (
        plan.key_tiles if p.varlen else triton.cdiv(p.sk, 128)
    )
    grid, positional, named = key_arguments(plan, *tensors)
    q, k, v = tensors[:3]
    positional = list(positional)
    positional[1] = tiled(k, p.layout, 128, FORWARD[p.d, p.dv].columns)
    positional[2] = tiled(v, p.layout, 128)
    heads = plan.entries * p.kv_heads
    positional[6:8] = tensors[4:6]
    positional[18:22] = [s for x in tensors[4:6] for s in strides(x, p.layout)]
    i = 10 + 8 + 6 + 4 + 1
    assert positional[i] == plan.key_tiles
    positional[i] = tiles
    named = {
        "D": p.d, "SLOTS": 3, "N": 32, "BAND": bool(mask(p, square=False)[1]["BAND"]) or p.sk % 128 != 0,
        "PACKED": p.varlen, "REGISTERS": 240, "maxnreg": 168, "num_warps": 4,
    }  # fmt: skip
    return (min(heads * tiles, processors(q.device)),), tuple(positional), named


__all__ = ["key_arguments", "pair_arguments"]

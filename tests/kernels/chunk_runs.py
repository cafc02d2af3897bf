"""A sequence cut into chunks, run through the chunk primitives as context parallelism would."""

from __future__ import annotations

from itertools import pairwise

import torch
from attention_cases import Case, Inputs
from error_rule import Results


def pieces(n: int, chunks: int) -> list[slice]:
    """``chunks`` contiguous slices of n tokens, as even as possible."""
    edges = [n * i // chunks for i in range(chunks + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def key_order(query_chunk: int, chunks: int, order: str) -> list[int]:
    """Key chunks in the order they arrive at the owner of a query chunk.

    "contiguous": a ring of ``chunks`` ranks, own chunk first, then the neighbours before it.
    "zigzag": chunks / 2 ranks, rank r holds chunks r and chunks - 1 - r, which travel together.
    """
    if order == "contiguous":
        return [(query_chunk - hop) % chunks for hop in range(chunks)]
    ranks = chunks // 2
    rank = min(query_chunk, chunks - 1 - query_chunk)
    owners = [(rank - hop) % ranks for hop in range(ranks)]
    return [c for r in owners for c in (r, chunks - 1 - r)]


def run_chunked(case: Case, given: Inputs, chunks: int, order: str) -> Results:
    """Forward and backward of a dense bshd case with sq == sk, cut into ``chunks``."""
    from stable_attention import chunks as primitives

    named = given.arguments(case)
    options = {x: named[x] for x in ("causal", "window", "scale", "softcap", "dropout_p")}
    if case.dropout:
        options["dropout_seed"] = named["dropout_seed"]
    options["stabilizer"] = case.stabilizer
    sinks = given.sinks if isinstance(given.sinks, torch.Tensor) else None
    cuts = pieces(case.sq, chunks)
    grads = [torch.zeros(x.shape, device=x.device) for x in (given.q, given.k, given.v)]
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    outs, lses, tops = [], [], []
    for i, rows in enumerate(cuts):
        out = lse = None
        pairs = [(j, cuts[j]) for j in key_order(i, chunks, order)]
        for _, keys in pairs:
            where = {"q_position": rows.start, "k_position": keys.start}
            part, part_lse, top = primitives.chunk_forward(
                given.q[:, rows], given.k[:, keys], given.v[:, keys],
                return_max_logits=True, **where, **options,
            )  # fmt: skip
            tops.append(top)
            if out is None:
                out, lse = part, part_lse
            else:
                primitives.merge_chunks(out, lse, part, part_lse)
        final, low = primitives.finish_chunks(
            out, lse, dtype=given.q.dtype, sinks=sinks,
            stabilizer=case.stabilizer, o_lo=case.o_lo,
        )  # fmt: skip
        dout = given.dout[:, rows]
        delta, share = primitives.chunk_delta(dout, final, lse, low=low, sinks=sinks)
        if dsinks is not None:
            dsinks += share
        kept = primitives.projected_rows(given.q[:, rows], lse, stabilizer=case.stabilizer)
        mine = grads[0][:, rows].contiguous()
        for _, keys in pairs:
            primitives.chunk_backward(
                dout, given.q[:, rows], given.k[:, keys], given.v[:, keys], lse, delta,
                dq=mine, dk=grads[1][:, keys], dv=grads[2][:, keys],
                q_position=rows.start, k_position=keys.start, rows=kept, **options,
            )  # fmt: skip
        if kept is not None:
            primitives.project_chunks(mine, kept, lse, delta, scale=options["scale"], sinks=sinks)
        grads[0][:, rows] = mine
        outs.append(final)
        lses.append(lse)
    rounded = [x.to(given.q.dtype) for x in grads]
    return Results(
        torch.cat(outs, 1), torch.cat(lses, 2), torch.stack(tops).amax(0), *rounded, dsinks
    )

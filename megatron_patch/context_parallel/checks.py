"""What context parallelism refuses, with the reason and what to use instead.

Shape legend: q [s, b, h, d], k [s, b, kv_heads, d], v [s, b, kv_heads, dv] of a shard ("sbhd"),
without b packed ("thd").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")


class ContextParallelError(ValueError):
    """What context parallelism cannot do; the text says why, and which mode or value can."""


def check(
    *,
    mode: str,
    size: int,
    heads: int,
    kv_heads: int,
    hierarchical_sizes: Sequence[int] | None = None,
) -> None:
    """`ContextParallelError` unless ``mode`` can serve these heads on ``size`` ranks.

    Args:
        heads, kv_heads: of one tensor-parallel rank.
        hierarchical_sizes: (a2a group, p2p group) of "a2a+p2p".
    """
    if mode not in MODES:
        raise ContextParallelError(
            f"cp_comm_type is {mode!r}; allowed: {', '.join(MODES)}. p2p serves every model"
        )
    ranks = size
    if mode == "a2a+p2p":
        if hierarchical_sizes is None:
            raise ContextParallelError(
                "cp_comm_type 'a2a+p2p' needs two groups, and none are given; set "
                f"hierarchical_context_parallel_sizes (a2a, p2p) with product {size}, or use p2p"
            )
        given = tuple(hierarchical_sizes)
        if len(given) != 2 or math.prod(given) != size:
            raise ContextParallelError(
                f"hierarchical_context_parallel_sizes is {list(given)}; allowed: two sizes with "
                f"product {size}, the context-parallel size. The first is the a2a group"
            )
        ranks = given[0]
    if mode in ("a2a", "a2a+p2p") and heads % ranks:
        smaller = max(x for x in range(1, ranks + 1) if ranks % x == 0 and heads % x == 0)
        other = f"a2a+p2p with an a2a group of {smaller}, or " if smaller > 1 else ""
        raise ContextParallelError(
            f"cp_comm_type {mode!r} gives each of {ranks} ranks equally many query heads, and "
            f"{heads} (of one tensor-parallel rank) is not a multiple of {ranks}. Use {other}"
            "p2p or all_gather"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise ContextParallelError(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly"
        )


def check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    """`ContextParallelError` unless these belong together.

    The chunk primitives take sizes from one of the tensors and trust the others.
    """
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise ContextParallelError(
            f"q has {q.shape[0]} tokens on this rank, k {k.shape[0]} and v {v.shape[0]}; under "
            "context parallelism they must be shards of one sequence (no cross-attention, no "
            "decoding with a cache)"
        )
    shapes = f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}"
    if not q.shape[1:-2] == k.shape[1:-2] == v.shape[1:-2]:
        raise ContextParallelError(
            f"{shapes}; allowed: equal batch sizes. Pass keys and values of the same batch rows as "
            "the queries (expand those that are shared)"
        )
    if k.shape[-2] != v.shape[-2]:
        raise ContextParallelError(
            f"{shapes}: {k.shape[-2]} key heads and {v.shape[-2]} value heads; allowed: equally "
            "many. Repeat the fewer ones"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ContextParallelError(
            f"{shapes}: head dims {q.shape[-1]} of q and {k.shape[-1]} of k; allowed: equal ones. "
            "Only v may have a head dim of its own"
        )
    if sinks is not None and (sinks.shape != (q.shape[-2],) or sinks.device != q.device):
        raise ContextParallelError(
            f"sinks is of shape {list(sinks.shape)} on {sinks.device}; allowed: [{q.shape[-2]}] on "
            f"{q.device}. Pass one logit for each query head of this tensor-parallel rank"
        )


def check_packed(cu: torch.Tensor, cu_padded: torch.Tensor, length: int, size: int) -> None:
    """`ContextParallelError` unless these offsets are those of a pack; reads them on the host."""
    real, padded = ([b - a for a, b in itertools.pairwise(x.tolist())] for x in (cu, cu_padded))
    for number, (used, room) in enumerate(zip(real, padded, strict=True)):
        if room % (2 * size) and size > 1:
            raise ContextParallelError(
                f"document {number} takes {room} tokens; a multiple of 2 x {size} ranks is needed "
                "(packed.padded_cu_seqlens pads)"
            )
        if used > room:
            raise ContextParallelError(f"document {number} has {used} tokens in {room} padded ones")
    if sum(padded) > length * size:
        raise ContextParallelError(
            f"documents take {sum(padded)} tokens and the pack has {length * size}; cu_seqlens are "
            "those of the whole pack, q, k and v those of this rank"
        )

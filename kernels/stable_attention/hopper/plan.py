"""What a call on sm_90 is, worked out once: tiles, bounds of its mask, how its heads are split."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from stable_attention.hopper.descriptors import entries, processors
from stable_attention.hopper.shapes import FORWARD, TILES, width
from stable_attention.hopper.tiles import TILE
from stable_attention.problem import UNLIMITED, Problem
from stable_attention.stabilizers import KNOWN
from stable_attention.triton.launches import KEPT
from stable_attention.triton.options import LOG2E

L2_BYTES = {True: 12 * 2**20, False: 24 * 2**20}
"""Causal or not -> bytes of Q, K, V and dO that a group of heads may have in the backward pass.
Without a mask all key tiles of a head start at its first query tile, one after the other: more
heads, less waiting."""
FAR = 2**30
"""Keys to the side that no window has."""
PROCESSORS = 132
"""Of an H100 or H200: how a call is split must not depend on the device, or its bits would."""


SEGMENT = 2048
"""Keys that the tensor cores add up before "compensated" adds in float32. `numerics.truncation` of
them, 8e-6, is within the 1e-5 of RMS(delta) that its mean error may have at any length."""


def divisor(heads: int, most: int) -> int:
    """The largest group, of ``most`` heads and of 1 at least, into which all heads divide."""
    return next(n for n in range(max(1, min(heads, most)), 0, -1) if heads % n == 0)


def _banded(problem: Problem) -> bool:
    """Whether the visible keys are those of a band: neither all nor all up to the diagonal."""
    left, right = reach(problem)
    aligned = right == FAR or (right == 0 and problem.sq == problem.sk)
    return problem.varlen or left != FAR or not aligned


def reach(problem: Problem) -> tuple[int, int]:
    """Keys that a query sees to the left and right of the bottom-right aligned diagonal.

    The diagonal of a pair of chunks lies elsewhere, so these may be negative there; FAR where the
    side hides nothing.
    """
    left, right = (
        FAR if x == UNLIMITED else min(x, FAR) for x in (problem.window_left, problem.window_right)
    )
    if problem.chunked:
        moved = problem.pos_q - problem.pos_k - (problem.sk - problem.sq)
        if left != FAR:
            left = FAR if left - moved >= problem.sk - 1 else max(left - moved, -FAR)
        if right != FAR:
            right = FAR if right + moved >= problem.sq - 1 else max(right + moved, -FAR)
    return left, right


def mask(problem: Problem, *, square: bool = True) -> tuple[tuple[int, int], dict[str, object]]:
    """(left, right) of a band, and what kernels are told of the mask.

    A causal mask is one where tiles are not ``square``.
    """
    left, right = reach(problem)
    band = _banded(problem) or (right == 0 and not square)
    causal = right == 0 and not band
    return (left, right), {"CAUSAL": causal, "BAND": band, "PACKED": problem.varlen}


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What the launches of a problem share, worked out once; known by its identity."""

    problem: Problem
    band: bool
    entries: int
    query_tiles: int
    """Of a head in the forward pass; of packed sequences a bound."""
    parts: int
    """`splits`; with the tiles of the backward pass 0 for head dims that have none here."""
    backward_tiles: int
    """Of a head in the backward pass; of packed sequences a bound on those of keys too."""
    key_tiles: int

    @classmethod
    def of(cls, problem: Problem) -> Plan:
        most = max(problem.tq, problem.tk)

        def tiles(length: int, rows: int) -> int:
            if problem.varlen:
                return triton.cdiv(most, rows) + problem.batch
            return triton.cdiv(length, rows)

        parts = backward_tiles = key_tiles = 0
        if problem.d in TILES:
            bm, bn = TILES[problem.d]
            parts = splits(problem)
            backward_tiles = tiles(problem.sq, bm)
            key_tiles = tiles(problem.sk, min(bm, bn) if problem.varlen else bn)
        return cls(
            problem, _banded(problem), entries(problem), tiles(problem.sq, TILE.value),
            parts, backward_tiles, key_tiles,
        )  # fmt: skip

    def programs(self, device: torch.device) -> int:
        """Of the forward pass."""
        return min(self.entries * self.problem.heads * self.query_tiles, processors(device))


def segment(problem: Problem) -> int:
    """Blocks of keys in a segment of the forward pass; 0 where there are none."""
    rounded = KNOWN[problem.stabilizer].rounded_normalizer
    bn = FORWARD[width(problem.d), width(problem.dv)].bn
    return SEGMENT // bn if rounded and problem.sk > SEGMENT else 0


def splits(problem: Problem) -> int:
    """Parts of the query heads of a key/value head, each an item of the backward pass.

    Items are started in the order in which their additions to dQ get ready, under a causal mask the
    longest last: the fewer there are, the longer most processors wait for it. But float32 dK and dV
    of each part go through memory. Reckoned in query tiles of one processor, and for a batch of
    one: the bits of a sequence do not depend on what else there is.
    """
    if problem.d > 128:
        return 1  # `key_gradients` writes no partial sums
    bm, bn = TILES[problem.d]
    left, right = reach(problem)
    uneven = right != FAR and left == FAR
    queries = problem.sq
    if left != FAR and not problem.chunked:
        queries = min(queries, left + (0 if right == FAR else right) + bn)
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
    most = L2_BYTES[reach(problem)[1] != FAR] // max(1, one)
    return divisor(entries(problem) * problem.kv_heads * parts, most)


def units(problem: Problem) -> tuple[float, float]:
    """(unit, steepness) of `softmax.softened`."""
    cap = problem.softcap
    return (cap or problem.scale) * LOG2E, 2 * LOG2E * problem.scale / cap if cap else 0.0


def dropout(problem: Problem) -> tuple[int, int, int, float]:
    """(threshold as the 32 bits of an int32, offsets of batch and head, scale of what stays)."""
    threshold = min(int(problem.dropout_p * 2**32), 2**32 - 1)
    threshold -= 2**32 if threshold >= 2**31 else 0
    keep_scale = 1.0 / (1.0 - problem.dropout_p)
    return threshold, problem.batch_offset, problem.head_offset, keep_scale


planned = functools.lru_cache(maxsize=KEPT)(Plan.of)

__all__ = [
    "FAR",
    "SEGMENT",
    "Plan",
    "divisor",
    "dropout",
    "head_block",
    "mask",
    "planned",
    "reach",
    "segment",
    "splits",
    "units",
]

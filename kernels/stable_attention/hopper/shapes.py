"""Head dims that the kernels of this package serve, and their tiles."""

from __future__ import annotations

from typing import NamedTuple

TILES = {64: (128, 128), 128: (64, 128), 192: (64, 64), 256: (64, 64)}
"""Head dim of q and k -> (queries, keys) of a tile of the backward pass, which serves no others:
what shared memory and registers hold. 64 keys are each consumer's, or both's above 128."""


def width(d: int) -> int:
    """Head dim as the kernels see it: what a tile has more reads as zeros."""
    return 128 if d == 96 else d


class Tile(NamedTuple):
    """Of the forward pass."""

    bn: int
    """Keys of a block."""
    columns: int
    """Of q and k in a tile of shared memory."""
    slots: int
    """Of the rings of K and of V."""
    q_slots: int = 2
    out: int = 128
    """Columns of O that leave at once; all of them through Q's place where that has two slots."""
    q_in_registers: bool = False
    total_away: bool = False
    """Whether the total of segments lies in global memory: nothing else has room for it."""


FORWARD = {
    (64, 64): Tile(128, 64, 3, out=64, q_in_registers=True),
    (128, 128): Tile(128, 128, 2),
    (192, 128): Tile(64, 64, 3, q_slots=1, out=64),
    (256, 256): Tile(64, 256, 2, q_slots=1, out=64, total_away=True),
}
"""(head dim of q and k, of v) -> tile."""


__all__ = ["FORWARD", "TILES", "Tile", "width"]

"""What may be chosen of INT8 attention, and the numbers that kernels and oracle share.

No Triton here: configurations and the oracle import this file.
"""

from __future__ import annotations

from dataclasses import dataclass

from stable_attention.problem import choose, flag

BLOCK = 64
"""Tokens that share one scale of Q, K, V or dO; also the tile of keys or queries of every step."""
CODES = 127.0
"""Largest code: symmetric, -128 is never used."""
SMALLEST = 2.0**-100
"""Least largest value of a block, row or tile: below it codes are 0, and 127 / x stays finite."""
HEAD_DIMS = (64, 128)
SCALES = ("row", "tile")
NORMALIZERS = ("rounded", "paper")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The method. `PAPER` is SageBwd as published; the defaults differ where it is biased."""

    smooth_k: bool = True
    """Subtract the mean over the tokens from K before its rounding; the softmax does not change."""
    smooth_q: bool = False
    """Subtract the mean of each block from Q before its rounding, and add its scores back."""
    scales: str = "row"
    """Scales of P and dS in the backward: one a "row" of a tile along the axis that is not summed
    (a query's for dQ, a key's for dK and dV), or one a 64 x 64 "tile"."""
    normalizer: str = "rounded"
    """O is divided by the sum of the "rounded" P that multiplied V, or, in the "paper", of P."""
    projection: bool = True
    """Take the row sum of the rounded dS out of dQ, along P K (one more 16-bit product), and that
    of the unrounded dS, which is the error of delta, out of dK."""

    def __post_init__(self) -> None:
        """Raise AttentionArgumentError (a ValueError) for values that are none."""
        for name in ("smooth_k", "smooth_q", "projection"):
            flag(name, getattr(self, name))
        choose("scales", self.scales, SCALES)
        choose("normalizer", self.normalizer, NORMALIZERS)


DEFAULT = Settings()
PAPER = Settings(scales="tile", normalizer="paper", projection=False)

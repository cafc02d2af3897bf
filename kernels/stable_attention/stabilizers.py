"""The stabilizers by name: what each does, what it keeps for the backward, and its parameters.

The arithmetic itself is in `numerics`; this file is the table that the API, the launchers and the
documentation read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Storage of O's low-order part. fp32 keeps O_hi + O_lo = the float32 O exactly: the yardstick of
# experiments, not a saving.
LOW_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp32": torch.float32}
O_LO_FORMATS = tuple(LOW_DTYPES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stabilizer:
    """What a stabilizer changes in the forward pass and what it saves."""

    name: str
    rounded_normalizer: bool
    """O is divided by the sum of the rounded P that multiplied V, not by the float32 sum."""
    keeps_o_lo: bool
    """O_lo, the low-order part of O, is saved, and delta is built from O_hi + O_lo."""
    dynamic: bool = False
    """The row shift moves where a row's maximum repeats (the paper's dynamic maximum)."""
    projection: str = ""
    """The row sum of the rounded dS is taken out of dQ along the "key" with the row's largest P, or
    along the "mean" P K; and out of delta before dK. The backward's LSE then has two planes."""
    paper: bool = False
    """S, the unnormalised O and l are rounded to BF16: the failing emulation, on purpose."""

    def saved_bytes(self, dv: int, o_lo: str = "bf16") -> int:
        """Bytes per token and query head the backward needs: O, LSE and O_lo."""
        low = LOW_DTYPES[o_lo].itemsize * dv if self.keeps_o_lo else 0
        return 2 * dv + 4 * self.planes + low

    @property
    def planes(self) -> int:
        """Float32 numbers that LSE is kept in for the backward."""
        return 2 if self.projection else 1


STABILIZERS = {
    s.name: s
    for s in (
        Stabilizer(name="compensated", rounded_normalizer=True, keeps_o_lo=True),
        Stabilizer(name="dynamic_max", rounded_normalizer=False, keeps_o_lo=False, dynamic=True),
        Stabilizer(name="none", rounded_normalizer=False, keeps_o_lo=False),
        Stabilizer(name="paper_bf16", rounded_normalizer=False, keeps_o_lo=False, paper=True),
        Stabilizer(name="projected", rounded_normalizer=False, keeps_o_lo=False, projection="mean"),
        Stabilizer(
            name="compensated_projected",
            rounded_normalizer=True,
            keeps_o_lo=True,
            projection="key",
        ),
    )
}

# Halves of "compensated", for experiments that ask which of them carries the effect
# (research/variants.py), and the projections in exchanged places. "consistent_sum" also accumulates
# in segments, as "compensated" does.
ABLATIONS = {
    s.name: s
    for s in (
        Stabilizer(name="low_order_o", rounded_normalizer=False, keeps_o_lo=True),
        Stabilizer(name="consistent_sum", rounded_normalizer=True, keeps_o_lo=False),
        Stabilizer(
            name="projected_key", rounded_normalizer=False, keeps_o_lo=False, projection="key"
        ),
        Stabilizer(
            name="compensated_projected_mean",
            rounded_normalizer=True,
            keeps_o_lo=True,
            projection="mean",
        ),
    )
}

KNOWN = STABILIZERS | ABLATIONS

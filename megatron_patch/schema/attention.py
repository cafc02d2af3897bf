"""The ``attention:`` section: which kernel serves core attention, and with which numerics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

BackendName = Literal[
    "stable_flash", "sdpa_cudnn", "sdpa_flash", "fa4", "sage_int8", "te", "mcore_local", "reference"
]


@dataclass(kw_only=True, frozen=True, slots=True)
class Int8Config:
    """Numerics of ``sage_int8`` (docs/low_bit.md)."""

    smooth_k: bool = True
    """Subtract the mean over tokens from K before it is rounded."""
    smooth_q: bool = False
    """Subtract the mean of each block of 64 queries before they are rounded."""
    scales: Literal["row", "tile"] = "row"
    """Scales of P and dS in the backward: one a row or column of a 64 x 64 tile, or one a tile."""
    normalizer: Literal["rounded", "paper"] = "rounded"
    """O is divided by the sum of the rounded P, or of P as published, which biases delta."""
    projection: bool = True
    """Make the rows of dS sum to zero after their rounding."""


@dataclass(kw_only=True, frozen=True, slots=True)
class AttentionConfig:
    """Backend and numerics of core attention. Switching ``backend`` changes nothing else."""

    backend: BackendName = "stable_flash"
    """Kernel that serves core attention; see ``megatron-patch doctor``."""
    stabilizer: Literal[
        "compensated", "compensated_projected", "projected", "dynamic_max", "none", "paper_bf16"
    ] = "compensated"
    """Numerics of ``stable_flash``; ``fa4`` has ``compensated`` and ``none``; other backends accept
    only their own (leave the default)."""
    backward: Literal["auto", "own", "own_x2", "sdpa_cudnn", "sdpa_flash", "fa4"] = "auto"
    """Backward pass of ``stable_flash``: its own, its own with P and dS in two parts (projecting
    ``stabilizer``), or that of cuDNN, FlashAttention-2 (both by PyTorch) or FlashAttention-4, given
    the same delta. ``auto`` is the fastest of those measured on the GPU's architecture, else
    ``own``."""
    o_lo: Literal["default", "bf16", "int8"] = "default"
    """Format in which ``compensated`` and ``compensated_projected`` keep O_lo, the low-order part
    of O, for the backward."""
    dynamic_max_beta: float = 2.0
    """``dynamic_max``: factor applied to a repeated positive row maximum."""
    dynamic_max_eps: float = 1e-3
    """``dynamic_max``: scores within this distance of the maximum count as repeats of it."""
    fp8: bool = False
    """FP8 attention by ``te``; needs ``training.fp8: current``."""
    allow_broken: bool = False
    """Must be true for ``stabilizer: paper_bf16``, which exists to reproduce the failure."""
    int8: Int8Config = field(default_factory=Int8Config)
    """Numerics of ``sage_int8``."""

    REMOVED: ClassVar[dict[str, str]] = {"residual": "it is attention.o_lo now"}
    """Keys of the release before, and what stands for them; the next release forgets them."""

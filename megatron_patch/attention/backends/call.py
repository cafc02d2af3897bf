"""What core attention asks of a backend.

Shape legend: sq, sk lengths; b batch; h query heads and kv_heads key/value heads of this
tensor-parallel rank; d, dv head dims of query/key and value; t packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel:
    """Over which ranks the sequence of a call is split, and how they communicate."""

    group: Any  # torch.distributed.ProcessGroup
    mode: str  # "p2p", "all_gather", "a2a" or "a2a+p2p"
    hierarchical: tuple[Any, ...] | None = None  # (a2a group, p2p group) of "a2a+p2p"
    options: dict[str, Any] = field(default_factory=dict)  # gradient_wire, head_groups


@dataclass(kw_only=True, slots=True)
class Call:
    """One attention call. Tensors may have any strides; their last dimension is contiguous."""

    q: torch.Tensor  # [sq, b, h, d], or [t, h, d] for thd
    k: torch.Tensor  # [sk, b, kv_heads, d], or [t, kv_heads, d]
    v: torch.Tensor  # [sk, b, kv_heads, dv], or [t, kv_heads, dv]
    layout: str  # "sbhd" or "thd"
    scale: float
    causal: bool
    window: tuple[int, int] | None = None  # (left, right), inclusive, -1 unlimited
    sinks: torch.Tensor | None = None  # [h] sink logits, natural log
    dropout_p: float = 0.0  # 0 outside training
    cu_seqlens_q: torch.Tensor | None = None  # int32 [b + 1], thd
    cu_seqlens_k: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None  # where each sequence starts in memory
    cu_seqlens_k_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    deterministic: bool = False
    want_max_logits: bool = False
    cp: ContextParallel | None = None  # None: this rank has the whole sequence
    held: dict[str, torch.Tensor] | None = None  # see `HELD`
    options: dict[str, Any] = field(default_factory=dict)  # the backend's own settings


Result = tuple[torch.Tensor, torch.Tensor | None]
"""(output [sq, b, h, dv] or [t, h, dv]; float32 [h] maximum logits where they were asked for)."""

Backend = Callable[[Call], Result]

HELD = ("max_logits", "low")
"""What an observer may ask for: with ``Call.held`` a dict, a backend that has it leaves there the
float32 [h] maximum logits, and O's low-order part as the kernel stores it, [sq, b, h, dv]."""

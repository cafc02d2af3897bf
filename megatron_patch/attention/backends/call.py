"""What core attention asks of a backend.

Shape legend: sq, sk lengths; b batch; h query heads and kv_heads key/value heads of this
tensor-parallel rank; d, dv head dims of query/key and value; t packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_patch.context_parallel.api import ContextParallel
from stable_attention.problem import Options


@dataclass(kw_only=True, slots=True)
class AttentionCall:
    """One attention call. Tensors may have any strides; their last dimension is contiguous."""

    q: torch.Tensor  # [sq, b, h, d], or [t, h, d] for thd
    k: torch.Tensor  # [sk, b, kv_heads, d], or [t, kv_heads, d]
    v: torch.Tensor  # [sk, b, kv_heads, dv], or [t, kv_heads, dv]
    options: Options  # layout "sbhd" or "thd", mask, scale, dropout (0 outside training), numerics
    sinks: torch.Tensor | None = None  # [h] sink logits, natural log
    packed: dict[str, Any] = field(default_factory=dict)
    """thd: cu_seqlens_q, cu_seqlens_k, their "_padded", max_seqlen_q, max_seqlen_k, as keywords of
    `stable_attention`."""
    want_max_logits: bool = False
    cp: ContextParallel | None = None  # None: this rank has the whole sequence
    own: dict[str, Any] = field(default_factory=dict)
    """Settings of the backend (``Capability.own_options``)."""
    observed: dict[str, torch.Tensor] | None = None
    """A dict while an observer watches. A backend that has them leaves there the float32 [h]
    ``max_logits``, and ``low``, O's low-order part as the kernel stores it, [sq, b, h, dv]."""

    def result(self, out: torch.Tensor | tuple[torch.Tensor, ...]) -> Result:
        """Of O, or (O, maximum logits and, of our kernels, low-order part): what is observed is
        left for the observer."""
        if not isinstance(out, tuple):
            return out, None
        for name, value in zip(("max_logits", "low"), out[1:], strict=False):
            if self.observed is not None and value.numel():
                self.observed[name] = value
        return out[0], out[1]


Result = tuple[torch.Tensor, torch.Tensor | None]
"""(output [sq, b, h, dv] or [t, h, dv]; float32 [h] maximum logits where they were asked for)."""

"""Multi-latent attention with local layers whose gradients are right under tensor parallelism.

Shape legend: s sequence, b batch; r = kv_lora_rank + qk_pos_emb_head_dim; tp tensor-parallel ranks.

Every head uses the same rotary key k_pos [s, b, 1, qk_pos_emb_head_dim], so its gradient is a sum
over all heads, of which a rank holds 1/tp. Megatron-Core 0.19.2 adds the ranks up for Transformer
Engine's replicated projection under sequence parallelism, but with local layers each rank keeps the
sum over its own heads: the rows of ``linear_kv_down_proj`` behind k_pos, and everything below, get
a wrong gradient. Nothing fails; the loss of the first step is right.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention as core


class MLASelfAttention(core.MLASelfAttention):
    """Megatron-Core's module, its down projection handed on whole instead of split over ranks."""

    def _qkv_down_projection(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query latent, and [s, b, r] of key/value latent and k_pos ([s / tp, ...] under SP)."""
        q_compressed, combined = super()._qkv_down_projection(hidden_states)
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        if combined.shape[-1] == sum(widths):
            return q_compressed, combined
        combined = gather_from_tensor_model_parallel_region(combined, group=self.tp_group)
        if self.config.sequence_parallel:
            # Core gathers k_pos along the sequence again, and that sums its gradient over ranks.
            return q_compressed, scatter_to_sequence_parallel_region(combined, self.tp_group)
        latent, k_pos = combined.split(widths, dim=-1)
        k_pos = copy_to_tensor_model_parallel_region(k_pos, group=self.tp_group)
        return q_compressed, torch.cat([latent, k_pos], dim=-1)

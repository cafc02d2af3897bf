"""Rotary positions of packed documents, without the host.

Megatron-Core 0.19.2 without Transformer Engine's kernel brings the lengths of the documents to the
host in every layer, twice, and rotates each document by itself; and where the table of angles is as
long as the pack it takes positions in the pack for positions in the document.

Shape legend: t packed tokens of this rank, h heads, d head dim, m rows of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_patch.context_parallel.packed import packed_positions
from megatron_patch.core_patches.replace import Change, Replacement


def _rotate_packed() -> Iterator[Change]:
    from megatron.core.models.common.embeddings import rope_utils

    if rope_utils._apply_rotary_pos_emb_thd is not rotate:
        yield rope_utils, "_apply_rotary_pos_emb_thd", rotate


packed_rope = Replacement(_rotate_packed)


def rotate(
    t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *, cp_group: Any, **options: Any
) -> torch.Tensor:
    """``t`` [t, h, d] rotated by the position of each token in its document.

    Args:
        t: this context-parallel rank's tokens.
        cu_seqlens: int32 [documents + 1], where documents begin in the whole pack, padded.
        freqs: [m, 1, 1, r], angles of the first r channels at position 0, 1, ...
        cp_group: context-parallel group.
        options: of core's `_apply_rotary_pos_emb_bshd`.
    """
    from megatron.core.models.common.embeddings import rope_utils

    # One tensor a micro-batch, which every layer asks about.
    positions = getattr(cu_seqlens, "positions", None)
    if positions is None:
        size = cp_group.size()
        positions = packed_positions(cu_seqlens, len(t) * size, rank=cp_group.rank(), size=size)
        cu_seqlens.positions = positions  # type: ignore[attr-defined]
    # Padding may lie beyond the table; nothing reads it.
    angles = freqs[positions.clamp(max=len(freqs) - 1)]
    options.pop("multi_latent_attention", None)
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, **options).squeeze(1)

"""Rotary positions by `stable_attention.rotary`: float32 arithmetic, and angles that stay exact.

Megatron-Core multiplies by a cosine and a sine in the tensor's type, in four kernels a tensor. Its
angles are float32 products of position and frequency: 2^-8 off at position 100,000, where neither
kernel nor type would matter any more. Here they are float64 products, less whole turns.

Of packed documents core brings the lengths to the host in every layer, twice; and where the table
of angles is as long as the pack it takes positions in the pack for positions in the document:
`packed_rope` does neither.

Shape legend: s tokens of this rank, b micro-batch, h heads, d head dim, r rotated channels, t
packed tokens of this rank, m rows of the table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from megatron_patch.context_parallel import packed as documents
from megatron_patch.core_patches.replace import Change, Replacement
from stable_attention.rotary import DTYPES, packed_positions, rotary


def _own_kernel() -> Iterator[Change]:
    from megatron.core.models.common.embeddings import rope_utils as core
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    if isinstance(core._apply_rotary_pos_emb_bshd, functools.partial):
        return
    for name, ours in (
        ("_apply_rotary_pos_emb_bshd", _whole),
        ("_apply_rotary_pos_emb_thd", _packed),
    ):
        yield core, name, functools.partial(ours, getattr(core, name))
    yield RotaryEmbedding, "get_freqs_non_repeated", exact_angles


own_rope = Replacement(_own_kernel)


def exact_angles(self: Any, max_seq_len: int, offset: int = 0) -> torch.Tensor:
    """[max_seq_len, r / 2] float32 angles in [-pi, pi] of the positions from ``offset`` on."""
    device = self.inv_freq.device
    position = torch.arange(max_seq_len, device=device, dtype=torch.float64) + offset
    if self.seq_len_interpolation_factor is not None:
        position /= self.seq_len_interpolation_factor
    turns = torch.outer(position, self.inv_freq.double()) / (2 * math.pi)
    return ((turns - turns.round()) * (2 * math.pi)).float()


def _whole(
    core: Any,
    t: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    multi_latent_attention: bool | None = None,
) -> torch.Tensor:
    """t [s, b, h, d] turned by freqs [s, 1, 1, r]; core's for anything else."""
    plain = freqs.dim() == 4 and freqs.shape[1] == freqs.shape[2] == 1
    if (
        not plain
        or t.dim() != 4
        or t.dtype not in DTYPES
        or (rotary_interleaved and mla_rotary_interleaved)
    ):
        return core(
            t,
            freqs,
            rotary_interleaved=rotary_interleaved,
            mla_rotary_interleaved=mla_rotary_interleaved,
            mscale=mscale,
            multi_latent_attention=multi_latent_attention,
        )
    return rotary(
        t,
        freqs.float().reshape(freqs.shape[0], -1),
        interleaved=rotary_interleaved,
        regroup=mla_rotary_interleaved,
        scale=mscale,
    )


def _packed(
    core: Any,
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    multi_latent_attention: bool | None = None,
) -> torch.Tensor:
    """t [t, h, d] turned by freqs [positions, 1, 1, r], without a wait for ``cu_seqlens``."""
    size, rank = cp_group.size(), cp_group.rank()
    place = packed_positions(cu_seqlens, t.shape[0], cp_size=size, cp_rank=rank)
    if freqs.shape[0] == t.shape[0] * size:
        # As core: angles of the whole pack, where a sequence goes on from the one before.
        first = torch.arange(t.shape[0], dtype=torch.int32, device=t.device)
        starts = cu_seqlens.to(torch.int32)
        which = torch.searchsorted((starts[1:-1] // size).contiguous(), first, right=True)
        place = place + starts[which]
    return rotary(
        t,
        freqs.float().reshape(freqs.shape[0], -1),
        # Padding may lie beyond the table; nothing reads it.
        positions=place.to(torch.int32).clamp_(max=len(freqs) - 1),
        interleaved=rotary_interleaved,
        regroup=mla_rotary_interleaved,
        scale=mscale,
    )


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
        positions = documents.packed_positions(
            cu_seqlens, len(t) * size, rank=cp_group.rank(), size=size
        )
        cu_seqlens.positions = positions  # type: ignore[attr-defined]
    # Padding may lie beyond the table; nothing reads it.
    angles = freqs[positions.clamp(max=len(freqs) - 1)]
    options.pop("multi_latent_attention", None)
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, **options).squeeze(1)

"""The dropout mask as a function of seed and global position, in plain PyTorch."""

from __future__ import annotations

import torch

from stable_attention.reference.philox import philox


def keep_mask(
    seed: int,
    p: float,
    *,
    batches: torch.Tensor,
    heads: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
) -> torch.Tensor:
    """Boolean [batches, heads, rows, columns] of kept elements for dropout probability ``p``.

    The index tensors (int64) are positions within the batch, the query heads and the sequence;
    the same element gets the same bit whatever the tile it is computed in.
    """
    word = philox(
        seed,
        columns[None, None, None, :],
        rows[None, None, :, None],
        heads[None, :, None, None],
        batches[:, None, None, None],
    )[0]
    return word >= round(p * 2**32)

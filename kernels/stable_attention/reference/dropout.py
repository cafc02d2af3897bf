"""The dropout mask as a function of seed and global position, in plain PyTorch.

The same function as the kernels' ``stable_attention.philox``: the Philox counter is
(key // 4, query, head, batch) and word key % 4 of the four belongs to the key.
"""

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
    quads, place = torch.unique(columns // 4, return_inverse=True)
    words = philox(
        seed,
        quads[None, None, None, :],
        rows[None, None, :, None],
        heads[None, :, None, None],
        batches[:, None, None, None],
    )
    keep = torch.stack(words, -1) >= int(p * 2**32)  # [b, h, rows, quads, 4]
    return keep[..., place, columns % 4]

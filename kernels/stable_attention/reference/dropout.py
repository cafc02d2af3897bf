"""The dropout mask as a function of seed and global position, in plain PyTorch.

The same function as the kernels' ``stable_attention.philox``: the Philox counter is
(key // 4, query, head, batch) and word key % 4 of the four belongs to the key. Philox-4x32-10 is
the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11).
"""

from __future__ import annotations

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def _multiply(a: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of a 32 x 32 bit product, kept in int64.

    The product is taken in 16-bit halves of ``constant``, so that nothing passes 2^63.
    """
    low, high = a * (constant & 0xFFFF), a * (constant >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(
    seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words per counter (int64 tensors holding 0 .. 2^32-1; arguments broadcast)."""
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    for _ in range(10):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


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

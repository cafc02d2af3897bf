"""Counter-based dropout: the mask is a function of (seed, batch, head, query, key), nothing else.

Philox 4x32-10 (Salmon et al., SC 2011) gives four 32-bit words per counter. The counter is
(key / 4, query, head, batch) with global indices; word key % 4 belongs to the key. No tile size,
chunking, layout or schedule enters, so recomputation, context parallelism and another kernel draw
the same mask.
"""

import triton
import triton.language as tl


@triton.jit
def keep_mask(
    seed, batch, head, row0, col0, threshold,
    BM: tl.constexpr, BN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """[BM, BN] mask of the weights that stay.

    Args:
        seed: int64; batch, head: global indices; row0, col0: global position of the tile;
            threshold: dropout_p * 2^32 as an integer: words below it are dropped.
        ALIGNED: col0 is a multiple of 4, so that one counter serves four keys.
    """
    if ALIGNED:
        rows = (row0 + tl.arange(0, BM)).to(tl.uint32)[:, None]
        quads = (col0 // 4 + tl.arange(0, BN // 4)).to(tl.uint32)[None, :]
        zero = tl.zeros([BM, BN // 4], tl.uint32)
        w0, w1, w2, w3 = tl.philox(
            seed, zero + quads, zero + rows, zero + head.to(tl.uint32), zero + batch.to(tl.uint32)
        )
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    else:
        rows = (row0 + tl.arange(0, BM)).to(tl.uint32)[:, None]
        cols = (col0 + tl.arange(0, BN)).to(tl.uint32)[None, :]
        zero = tl.zeros([BM, BN], tl.uint32)
        w0, w1, w2, w3 = tl.philox(
            seed,
            zero + cols // 4,
            zero + rows,
            zero + head.to(tl.uint32),
            zero + batch.to(tl.uint32),
        )
        word = cols % 4
        words = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return words >= threshold.to(tl.uint32)

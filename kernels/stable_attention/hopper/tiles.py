"""Work items and their order. In the backward pass an item is a key tile of one key/value head, in
the forward pass a query tile of one query head.

Items are numbered, and each program takes the next number when it is done with one. So whoever
waits for an item waits for one that a running program has, and no order of scheduling can block.

Heads come in groups whose K and V, and the Q and dO that meet them, stay in L2. Within a group all
heads' tiles of one place follow each other: under a causal mask from the last to the first. That
has the longest items of the forward pass first; in the backward pass it has them last, and the
additions to a dQ tile in the order in which they get ready.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def item_at(item, tiles, head_block, CAUSAL: gl.constexpr):
    """(tile, head counted over the batch) of an item."""
    group = item // (tiles * head_block)
    place = item - group * tiles * head_block
    n = place // head_block
    if CAUSAL:
        n = tiles - 1 - n
    return n, group * head_block + place % head_block


@gluon.jit
def first_query_tile(n, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """The first query tile that sees key tile ``n``; all later ones do."""
    m = 0
    if CAUSAL:
        m = (n * BN) // BM
    return m


@gluon.jit
def turn_of(m, n, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """How many key tiles add to query tile ``m`` before key tile ``n`` does."""
    turn = n
    if CAUSAL:
        turn = (m * BM) // BN - n
    return turn


__all__ = ["first_query_tile", "item_at", "turn_of"]

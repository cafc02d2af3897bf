"""Work items and their order. In the backward pass an item is a key tile of one key/value head, in
the forward pass a query tile of one query head.

Items are numbered, and each program takes the next number when it is done with one. So whoever
waits for an item waits for one that a running program has, and no order of scheduling can block.

Heads come in groups whose K and V, and the Q and dO that meet them, stay in L2. Within a group all
heads' tiles of one place follow each other: under a causal mask from the last to the first. That
has the longest items of the forward pass first; in the backward pass it has them last, and the
additions to a dQ tile in the order in which they get ready.

A BAND has, for query i, keys i + sk - sq - left .. i + sk - sq + right: windows, causal masks with
other lengths of q than of k, and all packed sequences, whose tiles are found in a table (`rows`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

FIELDS = gl.constexpr(8)
"""int32 numbers of a tile of packed sequences: its number within its sequence; the sequence's first
query token, queries, first key token, keys, first query tile (of all sequences'); the sequence's
own number; one unused."""
ONE_PLANE = gl.constexpr(1.0e30)
"""First number of a query tile's second plane of LSE where that is not needed."""
TILE = gl.constexpr(128)
"""Queries of a tile in the forward pass."""
_END = gl.constexpr(2**30)
"""Rows of a sequence in a ragged descriptor, of which its own are the last."""


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
def query_tiles_of(
    n, query_tiles, sq, sk, left, right,
    BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """(first query tile that sees key tile ``n``, how many do)."""
    if BAND:
        shift = sk - sq
        first = gl.maximum(n * BN - shift - right, 0)
        last = gl.minimum(gl.minimum(n * BN + BN, sk) - 1 - shift + left, sq - 1)
        count = last // BM - first // BM + 1
        return gl.where(first <= last, first // BM, 0), gl.where(first <= last, count, 0)
    else:
        m = 0
        if CAUSAL:
            m = (n * BN) // BM
        return m, query_tiles - m


@gluon.jit
def turn_of(
    m, n, sq, sk, right,
    BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """How many key tiles add to query tile ``m`` before key tile ``n`` does."""
    turn = n
    if BAND:
        last = gl.minimum(m * BM + BM, sq) - 1 + (sk - sq) + right
        turn = gl.minimum(last, sk - 1) // BN - n
    elif CAUSAL:
        turn = (m * BM) // BN - n
    return turn


@gluon.jit
def zeros_outside(p, right, left, end):
    """P [64 keys, BM queries] with 0 where query ``row`` sees keys left + row .. right + row, and
    there are none after ``end``, counted from the first key of the tile."""
    like: gl.constexpr = p.type.layout
    keys = gl.expand_dims(gl.arange(0, p.shape[0], gl.SliceLayout(1, like)), 1)
    rows = gl.expand_dims(gl.arange(0, p.shape[1], gl.SliceLayout(0, like)), 0)
    first = gl.where(keys <= end, keys - right, p.shape[1])
    return gl.where((rows >= first) & (rows <= keys - left), p, 0.0)


@gluon.jit
def first_row_of(places, t, PACKED: gl.constexpr):
    """The first query tile of a key tile's sequence, counted over all sequences."""
    if PACKED:
        return gl.load(places + t * FIELDS + 5)
    else:
        return 0


@gluon.jit
def batch_of(places, t, entry, PACKED: gl.constexpr):
    """The batch entry or sequence that tile t of batch entry ``entry`` is of."""
    if PACKED:
        return gl.load(places + t * FIELDS + 6)
    else:
        return entry


@gluon.jit
def place_of(places, t, sq, sk, PACKED: gl.constexpr):
    """(tile within its sequence, first query token, queries, first key token, keys) of tile t."""
    if PACKED:
        place = places + t * FIELDS
        return (
            gl.load(place), gl.load(place + 1), gl.load(place + 2), gl.load(place + 3),
            gl.load(place + 4),
        )  # fmt: skip
    else:
        return t, 0, sq, 0, sk


@gluon.jit
def keys_of(first_row, last_row, sq, sk, left, right):
    """(first, last) key that any of these queries sees; last < first where there is none."""
    shift = sk - sq
    return gl.maximum(first_row + shift - left, 0), gl.minimum(last_row + shift + right, sk - 1)


@gluon.jit
def key_blocks_of(
    m, key_blocks, sq, sk, left, right,
    BN: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """(last block that query tile m sees, how many); one that is hidden where it sees none.

    Under a plain causal mask there are as many as query tiles.
    """
    blocks = gl.minimum(m + 1, key_blocks) if CAUSAL else key_blocks
    last = blocks - 1
    if BAND:
        first_key, last_key = keys_of(
            m * TILE, gl.minimum(m * TILE + TILE, sq) - 1, sq, sk, left, right
        )
        last = gl.maximum(last_key, 0) // BN
        blocks = last + 1 - gl.minimum(first_key // BN, last)
    return last, blocks


@gluon.jit
def limits_of(m, last, sq, sk, left, right, W: gl.constexpr, BN: gl.constexpr):
    """Of this consumer's first query, against the first key of block ``last``: the last key that
    it may see, its first one, and the last one that there is."""
    middle = m * TILE + W * 64 + (sk - sq) - last * BN
    return middle + right, middle - left, sk - 1 - last * BN


@gluon.jit
def at_edge(right, left, end, BN: gl.constexpr):
    """Whether 64 queries miss one of BN keys; arguments as in `hidden_outside`."""
    return (gl.minimum(right, end) < BN - 1) | (left + 63 > 0)


@gluon.jit
def _place_in(row, column, start, length, RANK: gl.constexpr, PACKED: gl.constexpr):
    """Coordinates in a descriptor (`descriptors.tiled`)."""
    if RANK == 5:
        return _END, start + length, column // 8, _END - length + row, 0
    elif PACKED:
        return _END, start + length, _END - length + row, column
    elif RANK == 3:
        return column // 8, row, 0
    else:
        return row, column


@gluon.jit
def load_tile(desc, row, column, start, length, full, target, PACKED: gl.constexpr):
    """Start a copy to shared memory of which the barrier learns: rows from ``row`` on of a sequence
    of ``length`` tokens, which packed ones begin at token ``start``; zeros past its end."""
    place = _place_in(row, column, start, length, len(desc.block_type.shape), PACKED)
    tma.async_copy_global_to_shared(desc, place, full, target)


@gluon.jit
def load_parts(
    desc, row, column, start, length, full, ring, slot, PARTS: gl.constexpr, PACKED: gl.constexpr
):
    """`load_tile` to a slot of a ring whose tiles hold so many columns side by side as one."""
    for part in gl.static_range(PARTS):
        target = ring.index(slot * PARTS + part)
        load_tile(desc, row, column + part * target.shape[1], start, length, full, target, PACKED)


@gluon.jit
def store_tile(desc, row, column, start, length, source, PACKED: gl.constexpr):
    """The inverse of `load_tile`; nothing is written past the sequence's end."""
    place = _place_in(row, column, start, length, len(desc.block_type.shape), PACKED)
    tma.async_copy_shared_to_global(desc, place, source)


__all__ = [
    "FIELDS",
    "ONE_PLANE",
    "TILE",
    "at_edge",
    "batch_of",
    "first_row_of",
    "item_at",
    "key_blocks_of",
    "limits_of",
    "load_parts",
    "load_tile",
    "place_of",
    "query_tiles_of",
    "store_tile",
    "turn_of",
    "zeros_outside",
]

"""What kernels hand to their device functions, in bundles with names.

The host launches a kernel with flat arguments, which `launches` remembers, and the kernel puts them
in these. A bundle that a variable holds has numbers of the run only: Triton makes them of constexpr
ones, and branches on these too. So what is compiled in travels apart, in *traits* T, gl.constexpr.

Triton's cache of compiled kernels does not know the order of fields: it changes with an edit of the
kernels that fill them, never alone.

Shape legend: as in `forward` and `backward`. What a call has no use for is None.
"""

from collections import namedtuple

Items = namedtuple(
    "Items", "counter places sq sk left right query_tiles key_tiles head_block all_heads heads"
)
"""Work items of both passes, and the mask (`tiles`).

counter: int32, items taken; after it how many query and key tiles packed sequences have
places: int32 [tiles, FIELDS], of packed sequences
sq, sk: queries and keys of a sequence, of packed ones at most, as query_tiles and key_tiles
left, right: keys that a BAND has beside the diagonal
query_tiles, key_tiles: of a head; of BM or TILE queries and BN keys
head_block: heads of a group, of all_heads, counted over the batch
heads: of one batch entry: H, or in the backward pass HK * SPLITS
"""

Tiled = namedtuple("Tiled", "desc stride_b stride_h")
"""A tensor [tokens, columns] behind a TMA descriptor (`descriptors.tiled`); strides in columns."""

Inputs = namedtuple("Inputs", "q k v do shift_desc delta_desc", defaults=(None, None, None))
"""What a producer copies: q, k, v, do `Tiled`, shift and delta float32 [B * H * query tiles, BM].

The forward pass has the first three.
"""

Ring = namedtuple("Ring", "slots full empty", defaults=(None,))
"""Slots in shared memory, a barrier each for "full" and "empty"; where the latter is not a named
one (`barriers`)."""

Softmax = namedtuple("Softmax", "unit steepness sink_ptr", defaults=(None,))
"""P = exp2(softened(s, steepness) * unit - shift), see `plan.units`; sink_ptr [H]: a logit more."""

Dropout = namedtuple("Dropout", "seed_ptr threshold batch_offset head_offset keep_scale")
"""`plan.dropout`; offsets are those of the first batch entry and query head in the mask."""

Outputs = namedtuple(
    "Outputs",
    "o_desc low_desc part_ptr lse_ptr row_ptr max_ptr stride_b stride_s stride_h tq rest_ptr "
    "total_ptr",
)
"""Of the forward pass.

o_desc, low_desc: O and its low-order part
part_ptr: a partial O in float32, instead
lse_ptr, row_ptr: float32 [B, H, sq] or [H, tq], natural log, of P and of the rounded P; with
    rest_ptr the latter in two planes (`numerics.log_sum_exp_planes`)
max_ptr: float32 [H], largest logits
total_ptr: float32 [programs, 2, 64 * DV], of each consumer, for the total of segments
stride_b, stride_h: of O, in columns; in elements, with stride_s, of a partial one
"""

ForwardMemory = namedtuple("ForwardMemory", "item q k v high low total ones")
"""Shared memory of the forward pass.

item: int32 [ITEMS / Q_SLOTS * ITEM, 1], announced by the producer
q, k: `Ring` [2 * Q_SLOTS * PARTS, 64, D / PARTS] and [SLOTS * PARTS, BN, D / PARTS]
v: `Ring` [SLOTS, BN, DV]
high, low: each consumer's way out for O and its low-order part; high may be Q's place
total: [2, ...], 16 KiB each of a segment's total
ones: [8, 32], with which the rounded P is summed
"""

ForwardTraits = namedtuple(
    "ForwardTraits",
    "DV BN GROUP PARTS SLOTS Q_SLOTS Q_IN_REGISTERS CAUSAL BAND PACKED EVEN CAPPED SEGMENT ROUNDED "
    "SUM HAS_LOW HAS_MAX HAS_SINK",
)
"""Of a forward kernel.

PARTS: tiles side by side that Q and K lie in
SLOTS, Q_SLOTS: of the rings of K and V, and of Q
EVEN: no mask is needed for the end of the keys
SEGMENT: blocks that tensor cores accumulate, 0 for all
ROUNDED: O is divided by the sum of the rounded P
SUM: that of the unrounded P is wanted too, for LSE
"""

Gradients = namedtuple("Gradients", "dk dv part_ptr scale")
"""Where dK and dV go.

dk, dv: `Tiled`
part_ptr: float32 [2, B * HK * SPLITS * key tiles * BN, D], under SUMS instead
scale: of the scores, so of dK
"""

BackwardMemory = namedtuple("BackwardMemory", "item k v q do ds dq shift delta out")
"""Shared memory of the backward pass; but for shift, delta and out `Ring`.

item: int32 [PAIR, 1], announced by the producer, -1 after the last
k, v: [BN, D], with barriers that need no index
q, do: [PAIR, BM, D]
ds: [PAIR, BN, BM]
dq: float32 [2, 64, DQ], each consumer's half of one tile; "full" has PAIR barriers
shift, delta: float32 [PAIR, 1, BM], with the barriers of q and do; under PROJECT shift is followed
    by the second plane of LSE
out: [2, 64, D], of each consumer, for dV and dK
"""

Excess = namedtuple("Excess", "sum_desc rank_ptr ring")
"""Of the rows of dS as it multiplies K, under PROJECT.

sum_desc: their sums float32 [B * H * query tiles, BM]
rank_ptr: int32 of that shape, `numerics.key_of_rank`
ring: `Ring` [PAIR, 1, BM], sums of a tile on their way
"""

BackwardTraits = namedtuple(
    "BackwardTraits",
    "BM BN D GROUP SPLITS CAUSAL BAND PACKED EVEN CAPPED DROPOUT SUMS AHEAD PROJECT",
)
"""Of a backward kernel, as `ForwardTraits`.

GROUP: query heads of an item, of which SPLITS share a key tile
SUMS: dK and dV are added to others
AHEAD: scores are made a query tile early
PROJECT: rows of dS are summed and their largest followed (`excess`), and LSE has two planes
"""

Item = namedtuple("Item", "n first count queries keys head batch")
"""A key tile of the backward pass.

n: its number in its sequence, which has so many queries and keys
first, count: query tiles that see it, of each of GROUP heads
head, batch: the first of these heads, and the batch entry, as dropout counts them
"""

KeyTraits = namedtuple("KeyTraits", "SLOTS N BAND PACKED SPARED PLANES")
"""Of a kernel of dK and dV (`key_gradients`).

SLOTS: of both rings
N: queries of a product
SPARED: nothing is started behind the last tile; else a product of what lies there, which nobody
    reads
PLANES: LSE has two planes
"""

QueryMemory = namedtuple("QueryMemory", "item q do k v")
"""Shared memory of `query_gradient`: `Ring`, but for item.

item: int32 [ITEMS * ITEM, 1], announced by the producer
q, do: [2 * PARTS, 64, D / PARTS] and [2, 64, DV], each with one barrier
k, v: [K_SLOTS * PARTS, BN, D / PARTS] and [V_SLOTS, BN, DV]
"""

QueryTraits = namedtuple(
    "QueryTraits",
    "GROUP BN K_SLOTS V_SLOTS PARTS CAUSAL BAND PACKED MASKED DO_IN_REGISTERS TURNS PROJECT",
)
"""Of a kernel of dQ (`query_gradient`), as `ForwardTraits`.

CAUSAL: the longest items come first
MASKED: a tile may need a mask
TURNS: consumers issue dQ and scores in turn
PROJECT: dQ and delta without what rows of dS sum to too much
"""

QueryGradient = namedtuple("QueryGradient", "ptr stride_b stride_s stride_h scale")
"""dQ in memory; strides in elements; scale: of the scores."""

RowNumbers = namedtuple("RowNumbers", "lse_ptr delta_ptr stride_b stride_h rest_ptr target_ptr")
"""LSE and delta of rows, float32 [B, H, sq] or [H, tq]; under PROJECT LSE's second plane, and what
rows of dS sum to where that is not 0."""

KeyRows = namedtuple("KeyRows", "ptr stride_b stride_s stride_h")
"""K in memory, under PROJECT; strides in elements."""

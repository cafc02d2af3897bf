"""What kernels hand to their device functions, in bundles with names (as in `hopper.bundles`).

The host launches a kernel with flat arguments, which `launches` remembers, and the kernel puts them
in these. A bundle that a variable holds has numbers of the run only: Triton makes them of constexpr
ones, and branches on these too. So what is compiled in travels apart, in *traits* T, tl.constexpr.

Triton's cache of compiled kernels does not know the order of fields: it changes with an edit of the
kernels that fill them, never alone.

Shape legend: as in `forward`. What a call has no use for is None.
"""

from collections import namedtuple

Head = namedtuple("Head", "b h start rows")
"""A head of a sequence: its batch entry and number, first token and length (`geometry.locate`)."""

Tiles = namedtuple("Tiles", "sources offsets stride")
"""Tiles of a head along its tokens, in parts (`parts.load_parts`); stride: from token to token."""

Mask = namedtuple("Mask", "first length shift left right")
"""Which keys a program's queries see, or which queries its keys (`geometry`).

first: the program's first query or key
length: keys or queries of the sequence, those that the program loops over
"""

Softmax = namedtuple("Softmax", "unit capped_scale beta eps", defaults=(None, None))
"""P = exp2(soften(s, capped_scale) * unit - shift); beta, eps: of `numerics.softmax_step`."""

Dropout = namedtuple(
    "Dropout", "seed batch batch_offset head head_offset q_pos k_pos threshold keep_scale"
)
"""`philox.keep_mask`, which counts batch entries, heads and positions from some offset on."""

Rows = namedtuple("Rows", "lse_ptr delta_ptr delta_lo_ptr first plane")
"""Numbers of a head's queries; first: its first one's place, plane: to the second plane of LSE.

delta_lo_ptr: what `projection.finish` leaves beside the corrected delta
"""

ForwardTraits = namedtuple(
    "ForwardTraits",
    "DTYPE BM BN BD BDV D DV HAS_LEFT HAS_RIGHT CAPPED DROPOUT CHUNKED SUM ROUNDED EARLY DYNAMIC "
    "PAPER BOUND TMA",
)
"""Of a forward kernel.

DTYPE: of q, k and v
SUM, ROUNDED: the sum of P is wanted, that of the rounded P
EARLY: sums come before the product
DYNAMIC, PAPER, BOUND: as `numerics.softmax_step` has them
TMA: what tiles are read through (`memory`)
"""

BackwardTraits = namedtuple(
    "BackwardTraits",
    "BM BN BD BDV D DV HAS_LEFT HAS_RIGHT CAPPED DROPOUT CHUNKED PAPER TMA PLANES SPLIT PROJECT",
    defaults=(None,),
)
"""Of a backward kernel, as `ForwardTraits`.

PLANES: LSE has two planes
SPLIT: P and dS multiply in two parts (`parts.add_rest`)
PROJECT: of the pass that makes dQ (`projection`)
"""

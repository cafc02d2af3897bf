"""What the INT8 kernels hand to their device functions, beside `triton.bundles`.

Shape legend: as in `forward` and `backward`.
"""

from collections import namedtuple

ForwardQueries = namedtuple("ForwardQueries", "codes unit_q mu unit")
"""A tile of Q: codes [BM, D] with what a score of each is worth [BM], the mean that was taken off
[D], and what a score in 16 bits is worth."""

ForwardKeys = namedtuple("ForwardKeys", "k_ptr v_ptr k_scale v_scale offsets")
"""A head of K and V, from its first row and block on: codes, those of V by block, and scales."""

DqQueries = namedtuple("DqQueries", "codes do unit_q mu unit lse delta bad")
"""A tile of Q and dO as in `ForwardQueries`; bad [BM]: 0, or NaN where delta is not finite."""

DqKeys = namedtuple("DqKeys", "k_ptr turned_ptr v_ptr k_scale off_k off_v stride_v")
"""A head of K and V, from its first row and block on; V in 16 bits."""

DkdvKeys = namedtuple("DkdvKeys", "codes v scale unit length")
"""A tile of K [BN, D] with its scales [BN], of V in 16 bits; keys of the sequence."""

DkdvQueries = namedtuple(
    "DkdvQueries",
    "q_ptr turned_ptr do_ptr do_turned_ptr q_scale do_scale mu_ptr lse_ptr delta_ptr row block "
    "off_q off_do stride_do",
)
"""A head of Q and dO: its first row, and where its first turned block lies."""

Traits = namedtuple(
    "Traits",
    "BM BN D HAS_LEFT HAS_RIGHT SMOOTH_Q ROUNDED ROW PROJECT",
    defaults=(None, None, None),
)
"""tl.constexpr, as `triton.bundles` has them; the last two of backward kernels.

SMOOTH_Q: a mean was taken off Q
ROUNDED: O is divided by the sum of the rounded P
ROW: a scale for each row of a tile, not for the tile
PROJECT: delta is corrected by the row sums of dS
"""

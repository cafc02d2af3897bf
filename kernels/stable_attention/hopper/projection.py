"""Rows of dS that sum to what they should, in a kernel that has all of a row (`query_gradient`).

`triton.projection` says what is done, and `softmax.follow` what of P is followed for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stable_attention.hopper.consumer import announced
from stable_attention.hopper.softmax import largest_key
from stable_attention.hopper.tiles import TILE, place_of


@gluon.jit
def carriers(
    sums, rank, delta, own, tile, numbers, keys, smem, items,
    W: gl.constexpr, T: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(2^-rest, what the row sums to too much, the row's key of the largest P in memory, whether it
    has one) [64]; leaves delta corrected. own: the first block that was added.

    P of the tiles is 2^rest times what it should be: the shift is the first plane of LSE alone.
    """
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    number, column, found = largest_key(rank)
    excess = gl.convert_layout(gl.sum(sums, 1), LAYOUT)
    # Read again, so that registers do not hold it over the loop.
    _, t, b, h = announced(smem.item, tile, 1, one)
    m, start_q, queries, start_k, _ = place_of(items.places, t, items.sq, items.sk, T.PACKED)
    rows = m * TILE + W * 64 + gl.arange(0, 64, LAYOUT)
    here = rows < queries
    place = b.to(gl.int64) * numbers.stride_b + h.to(gl.int64) * numbers.stride_h + start_q
    weight = gl.exp2(-gl.load(numbers.rest_ptr + place + rows, mask=here, other=0.0))
    excess = excess * weight
    if numbers.target_ptr is not None:
        excess -= gl.load(numbers.target_ptr + place + rows, mask=here, other=0.0)
    delta = gl.convert_layout(delta, LAYOUT) + excess
    gl.store(numbers.delta_ptr + place + rows, delta, mask=here)
    first = keys.ptr + b.to(gl.int64) * keys.stride_b + (h // T.GROUP).to(gl.int64) * keys.stride_h
    if T.PACKED:
        first += start_k.to(gl.int64) * keys.stride_s
    key = gl.convert_layout((own - number) * T.BN + column, LAYOUT).to(gl.int64) * keys.stride_s
    return weight, excess, first + key, gl.convert_layout(found, LAYOUT)


@gluon.jit
def projected(dq, weight, excess, key_ptr, found, COLUMN: gl.constexpr):
    """dQ [64, N], from column ``COLUMN`` on, less the excess along `carriers`."""
    columns = COLUMN + gl.arange(0, dq.shape[1], gl.SliceLayout(0, dq.type.layout))
    place = gl.expand_dims(key_ptr, 1) + gl.expand_dims(columns, 0)
    k = gl.load(place, mask=gl.expand_dims(found, 1), other=0.0).to(gl.float32)
    return dq * gl.expand_dims(weight, 1) - gl.expand_dims(excess, 1) * k


__all__ = ["carriers", "projected"]

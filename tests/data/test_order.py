"""The sample order: permutations, rings and blends as pure functions."""

from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_patch.data.order import Blend, Permutation, Ring, derive

WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=7)


@given(n=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_a_permutation_visits_everything_once(n, key):
    order = Permutation(n, key)
    assert sorted(order[i] for i in range(n)) == list(range(n))


def test_permutations_look_random():
    """No fixed stride, no memory of the index, and keys give unrelated orders."""
    n = 4096
    a, b = ([Permutation(n, key)[i] for i in range(n)] for key in (1, 2))
    assert sum(x == y for x, y in zip(a, b, strict=True)) < 20
    assert len({(y - x) % n for x, y in pairwise(a)}) > n // 2
    mean = (n - 1) / 2
    variance = sum((x - mean) ** 2 for x in a) / n
    for one, other in ((a, list(range(n))), (a[1:], a[:-1]), (a, b)):
        pairs = zip(one, other, strict=True)
        covariance = sum((x - mean) * (y - mean) for x, y in pairs) / n
        assert abs(covariance / variance) < 0.06


def test_the_order_is_the_same_on_every_machine_and_version():
    """Known values: a change of them changes the data of every resumed run."""
    assert derive(1, "a") == 9221374186959825746
    order = Permutation(1000, derive("known"))
    assert [order[i] for i in range(6)] == [532, 440, 228, 203, 520, 914]
    ring = Ring(10_000, 64, derive("ring"))
    assert [ring.start(i) for i in (0, 1, 155, 156, 10**9)] == [7867, 6459, 4859, 7822, 4195]
    blend = Blend([0.5, 0.3, 0.2])
    assert [blend.locate(k)[0] for k in range(10)] == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]


@given(tokens=st.integers(3, 600), length=st.integers(1, 40), key=st.integers(0, 1000))
def test_an_epoch_covers_the_ring_with_disjoint_windows(tokens, length, key):
    if tokens <= length:
        return
    ring = Ring(tokens, length, key)
    for epoch in (0, 3):
        seen = [
            (start + i) % tokens
            for index in range(epoch * ring.windows, (epoch + 1) * ring.windows)
            for start in [ring.start(index)]
            for i in range(length)
        ]
        assert len(seen) == len(set(seen)) == tokens // length * length


def test_epochs_differ_in_order_and_in_windows():
    ring = Ring(10_000, 64, 7)
    epochs = [[ring.start(e * ring.windows + i) for i in range(ring.windows)] for e in range(4)]
    assert len({start % 64 for epoch in epochs for start in epoch[:1]}) > 1
    assert len({tuple(epoch) for epoch in epochs}) == 4


@given(weights=WEIGHTS, start=st.integers(0, 10**12))
def test_a_blend_deals_every_prefix_in_proportion(weights, start):
    blend = Blend(weights)
    total = sum(Fraction(repr(w)) for w in weights)
    before = blend.counts(start)
    for k in range(start, start + 50):
        dataset, index = blend.locate(k)
        assert index == before[dataset]
        before[dataset] += 1
        assert before == blend.counts(k + 1)
        for count, weight in zip(before, weights, strict=True):
            assert abs(count - (k + 1) * Fraction(repr(weight)) / total) < 2

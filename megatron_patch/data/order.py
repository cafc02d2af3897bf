"""Which tokens are sample k: pure functions of seed and position, with no state and no files.

A split of a dataset is a ring of T tokens. One epoch is T // S windows of S tokens, starting at an
offset drawn for the epoch (so windows differ between epochs), visited in the order of a
pseudo-random permutation. A blend deals samples to its datasets in fixed proportions. Everything is
computed per sample from integers, so nothing depends on how long a run is, how many ranks it has,
where it resumed, or on the random streams of NumPy or PyTorch.

Legend: S tokens of a sequence, T tokens of a split, k position in the run's order of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_ROUNDS = 8
_MASK = (1 << 64) - 1


def derive(*words: int | str) -> int:
    """A 64-bit key from a list of words: the only source of randomness here."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Permutation:
    """A pseudo-random permutation of range(n) in O(1) memory.

    A balanced Feistel network on the next even number of bits, walked along its cycle until the
    value is below n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). The domain
    has fewer than 4 n values, so fewer than four steps are expected.
    """

    def __init__(self, n: int, key: int) -> None:
        assert n > 0
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        self._keys = [derive(key, "round", i) for i in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.n
        value = self._encrypt(index)
        while value >= self.n:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half, value & self._low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._low)
        return (left << self._half) | right


class Ring:
    """The windows of one split of one dataset, epoch after epoch."""

    def __init__(self, tokens: int, length: int, key: int) -> None:
        assert tokens > length > 0
        self.tokens, self.length, self._key = tokens, length, key
        self.windows = tokens // length
        """Samples of one epoch."""
        self._epoch: tuple[int, int, Permutation] | None = None

    def start(self, index: int) -> int:
        """First token of sample ``index``; the sample goes on at 0 after the last token."""
        epoch, place = divmod(index, self.windows)
        cached = self._epoch  # one read: reader threads share this object
        if cached is None or cached[0] != epoch:
            shift = derive(self._key, "shift", epoch) % self.length
            order = Permutation(self.windows, derive(self._key, "order", epoch))
            self._epoch = cached = (epoch, shift, order)
        return (cached[1] + cached[2][place] * self.length) % self.tokens


@dataclass(frozen=True, slots=True)
class _Node:
    """Deals samples between two halves of a blend; ``share`` goes to the left one."""

    share: Fraction
    left: _Node | int
    right: _Node | int

    def lefts(self, k: int) -> int:
        """How many of the first k samples go left: k * share, rounded."""
        a, b = self.share.numerator, self.share.denominator
        return (2 * k * a + b) // (2 * b)


class Blend:
    """Deals samples to datasets so that any prefix is in proportion to the weights.

    A binary tree of roundings: each node's counts are within 1/2 of exact, so after k samples each
    dataset has its share of k within about 1 (exactly: sum over its path). Weights are taken as the
    decimal numbers they are written as.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        assert weights and all(w > 0 for w in weights)
        self._exact = [Fraction(repr(float(w))) for w in weights]
        self._root = self._build(0, len(weights))

    def locate(self, k: int) -> tuple[int, int]:
        """(dataset, how many samples it gave before) of sample ``k``."""
        node = self._root
        while isinstance(node, _Node):
            before = node.lefts(k)
            if node.lefts(k + 1) > before:
                node, k = node.left, before
            else:
                node, k = node.right, k - before
        return node, k

    def counts(self, k: int) -> list[int]:
        """How many of the first ``k`` samples each dataset gives."""
        counts = [0] * len(self._exact)
        todo: list[tuple[_Node | int, int]] = [(self._root, k)]
        while todo:
            node, k = todo.pop()
            if isinstance(node, _Node):
                lefts = node.lefts(k)
                todo += [(node.left, lefts), (node.right, k - lefts)]
            else:
                counts[node] = k
        return counts

    def shares(self) -> list[Fraction]:
        """Each dataset's share of the samples, exactly; blends with equal shares deal alike."""
        return [weight / sum(self._exact, Fraction()) for weight in self._exact]

    def _build(self, lo: int, hi: int) -> _Node | int:
        if hi - lo == 1:
            return lo
        mid = (lo + hi) // 2
        share = sum(self._exact[lo:mid], Fraction()) / sum(self._exact[lo:hi], Fraction())
        return _Node(share, self._build(lo, mid), self._build(mid, hi))


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), which mixes every bit with all."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)

"""The order of a run's training samples, and where a run is in it: samples per dataset.

A run that begins at step 0 deals sample k of its blend, counted from 0. One that starts from
another run's checkpoint deals from there on with its own blend and batch size, and every dataset
goes on after the samples that it has given already, whoever took them. A dataset is known by the
hash of its token file, its range of tokens and the length of a window: not by path, weight or place
in the blend, nor by the version that prepared it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_patch.data.order import Blend, derive
from megatron_patch.schema.training import batch_sizes


@dataclass(frozen=True, slots=True)
class Source:
    """The windows of ``length`` tokens in the tokens [first, first + tokens) of one file."""

    name: str
    """Of the file, for people."""
    sha256: str
    """Of the token file, by the dataset's manifest."""
    first: int
    tokens: int
    length: int
    key: int
    """What the order of the windows is drawn from (`order.Ring`)."""

    @property
    def identity(self) -> tuple[str, int, int, int]:
        """Equal for the same windows; their order may differ."""
        return self.sha256, self.first, self.tokens, self.length

    @property
    def windows(self) -> int:
        """Samples of one epoch."""
        return self.tokens // self.length


@dataclass(frozen=True, slots=True)
class Taken:
    """A source, and how many samples it has given: the next one is number ``samples``."""

    source: Source
    samples: int

    def describe(self) -> str:
        """For people."""
        epochs = self.samples / self.source.windows
        return f"{self.samples:,} samples taken ({epochs:.3g} epochs)"


@dataclass(frozen=True, slots=True)
class Position:
    """Where an order is between two global batches, as a checkpoint records it."""

    batch: int
    """The global batch to come."""
    began: int
    """The global batch at which this order began."""
    batch_size: int
    weights: tuple[float, ...]
    starts: tuple[int, ...]
    """Samples that each dataset had given before ``began``."""
    reading: tuple[Taken, ...]
    """The datasets of the blend, in its order."""
    others: tuple[Taken, ...]
    """What runs before this one took of datasets that this one does not read."""
    tokenizer: str
    """SHA-256 of the tokenizer, by the manifests."""
    rampup: tuple[int, ...] = ()
    """``training.batch_size_rampup``; empty: every batch has ``batch_size``."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for the checkpoint."""
        found = dict(json.loads(json.dumps(asdict(self))))  # tuples become lists
        if not self.rampup:
            del found["rampup"]  # which earlier versions do not know
        return found

    @classmethod
    def from_dict(cls, values: Any) -> Position:
        """Inverse of `as_dict`.

        Raises ValueError: it is not one.
        """
        try:
            found = dict(values)
            for name in ("reading", "others"):
                found[name] = tuple(
                    Taken(Source(**taken["source"]), _count(taken["samples"]))
                    for taken in found[name]
                )
            weights, starts = tuple(found["weights"]), tuple(map(_count, found["starts"]))
            rampup = tuple(map(_count, found.get("rampup", ())))
            made = cls(**found | {"weights": weights, "starts": starts, "rampup": rampup})
            counts = _count(made.batch), _count(made.began), _count(made.batch_size)
            if not len(made.reading) == len(made.weights) == len(made.starts) or not counts[2]:
                raise ValueError("its parts do not belong together")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a position in the data ({error}): {values!r:.300}") from None
        return made


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


@dataclass(frozen=True, slots=True)
class Order:
    """Which window of which dataset is sample k = first of its global batch + place in it."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    batch_size: int
    tokenizer: str = ""
    began: int = 0
    starts: tuple[int, ...] = ()
    """As in `Position`; empty: nothing was taken before."""
    others: tuple[Taken, ...] = ()
    rampup: tuple[int, ...] = ()
    blend: Blend = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", self.starts or (0,) * len(self.sources))
        object.__setattr__(self, "blend", Blend(self.weights))

    def locate(self, k: int) -> tuple[int, int]:
        """(dataset, number of the window in its order) of sample ``k``."""
        dataset, n = self.blend.locate(k - self._first_sample(self.began))
        return dataset, self.starts[dataset] + n

    def _first_sample(self, batch: int) -> int:
        return batch_sizes(self.batch_size, self.rampup).first_sample(batch)

    @property
    def inherited(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """What an order owes to the runs before it: where it began, starts and keys."""
        return self.began, self.starts, tuple(source.key for source in self.sources)

    def at(self, batch: int) -> Position:
        """The position before global batch ``batch``."""
        dealt = self.blend.counts(self._first_sample(batch) - self._first_sample(self.began))
        reading = tuple(
            Taken(source, start + n)
            for source, start, n in zip(self.sources, self.starts, dealt, strict=True)
        )
        return Position(
            batch, self.began, self.batch_size, self.weights, self.starts, reading, self.others,
            self.tokenizer, self.rampup,
        )  # fmt: skip

    def resumed(self, position: Position) -> Order:
        """The order of the run that recorded ``position``, whose configuration made this one.

        Raises ValueError: it read other datasets.
        """
        before = [taken.source for taken in position.reading]
        if [s.identity for s in before] != [s.identity for s in self.sources]:
            raise ValueError("the checkpoint's run read other datasets, ranges or windows")
        return self._with(before, position)

    def continued(self, position: Position, batch: int) -> Order:
        """This order, from global batch ``batch`` on, after all that ``position`` counts.

        Where nothing has changed it is the other run's own order, sample for sample.
        """
        pool = [*position.reading, *position.others]
        sources: list[Source] = []
        starts: list[int] = []
        for source in self.sources:
            taken = next((t for t in pool if t.source.identity == source.identity), None)
            if taken is not None:
                pool.remove(taken)
                sources.append(replace(source, key=taken.source.key))
            else:
                known = (t.source for t in (*position.reading, *position.others))
                sources.append(_distinct(source, [*sources, *known]))
            starts.append(0 if taken is None else taken.samples)
        same = (
            batch == position.batch
            and (self.batch_size, self.rampup) == (position.batch_size, position.rampup)
            and [(s.identity, s.key) for s in sources]
            == [(t.source.identity, t.source.key) for t in position.reading]  # which may be none
            and self.blend.shares() == Blend(position.weights).shares()
        )
        if same:
            return self._with(sources, position)
        return replace(
            self, sources=tuple(sources), began=batch, starts=tuple(starts), others=tuple(pool)
        )

    def _with(self, sources: Sequence[Source], position: Position) -> Order:
        named = zip(sources, self.sources, strict=True)
        return replace(
            self,
            sources=tuple(replace(source, name=own.name) for source, own in named),
            began=position.began,
            starts=position.starts,
            others=position.others,
        )

    def fates(self, position: Position) -> list[str]:
        """A line for every dataset: what ``position`` counts of it, and what this order does."""
        before, lines = [*position.reading, *position.others], []
        for source in self.sources:
            old = next((taken for taken in before if _same(taken.source, source)), None)
            fate = _anew(source, before) if old is None else f"{old.describe()}, continues there"
            lines.append(f"{source.name}: {fate}")
        return lines + [
            f"{taken.source.name}: {taken.describe()}, not read by this run"
            for taken in position.reading
            if not any(_same(taken.source, source) for source in self.sources)
        ]


def _same(one: Source, other: Source) -> bool:
    return (one.identity, one.key) == (other.identity, other.key)


def _distinct(source: Source, others: Iterable[Source]) -> Source:
    """``source`` in an order of its own, where a blend names the same dataset twice."""
    known = {(other.identity, other.key) for other in others}
    while (source.identity, source.key) in known:
        source = replace(source, key=derive("another order", source.key))
    return source


def _anew(source: Source, before: Iterable[Taken]) -> str:
    """Why a dataset starts at its first sample, and what is read again by that."""
    for old in before:
        was = old.source
        if was.sha256 == source.sha256:
            if was.identity == source.identity:
                return "named once more: starts at its first sample, in an order of its own"
            what = (
                f"windows of {was.length:,} tokens became {source.length:,}"
                if was.length != source.length
                else f"its training part was {was.tokens:,} tokens from {was.first:,} on and is "
                f"now {source.tokens:,} from {source.first:,} on"
            )
        elif was.name == source.name:
            what = "its token file is not the one that was read"
        else:
            continue
        tokens = old.samples * was.length
        return (
            f"{what}: starts at its first sample; what the {old.samples:,} samples taken hold "
            f"({tokens:,} tokens) is read again where it is still there"
        )
    return "new: starts at its first sample"

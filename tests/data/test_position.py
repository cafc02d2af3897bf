"""Samples per dataset over chains of runs that start from each other: none twice, none left out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import layout, run_config

from megatron_patch.data.loader import build_loaders
from megatron_patch.data.order import Ring
from megatron_patch.data.position import Order, Position, Source
from megatron_patch.faults.skips import Skips
from megatron_patch.schema.data import DatasetConfig

KNOWN = {name: (n, 7 * n + 40, 10) for n, name in enumerate("ABCD")}
"""Name -> (hash, tokens, length of a window): 4 to 6 windows an epoch."""


def source(name: str, key: int, *, length: int = 10, tokens: int | None = None) -> Source:
    number, known, _ = KNOWN[name]
    return Source(f"{name}.bin", f"sha of {number}", 5, tokens or known, length, key)


def order(*blend: tuple[str, float], batch_size: int = 8, seed: int = 1) -> Order:
    """Of a run that begins at step 0; the key depends on seed and place, as in the loader."""
    sources = tuple(source(name, 1000 * seed + n) for n, (name, _) in enumerate(blend))
    return Order(sources, tuple(weight for _, weight in blend), batch_size)


def read(made: Order, first: int, batches: int) -> list[tuple[Source, int]]:
    """What the batches consist of, with keys."""
    ks = range(first * made.batch_size, (first + batches) * made.batch_size)
    return [(made.sources[d], n) for d, n in map(made.locate, ks)]


@dataclass
class Leg:
    """One run of a chain."""

    blend: list[tuple[str, float]]
    batch_size: int
    seed: int
    batches: int
    resumed_after: int


LEGS = st.lists(
    st.builds(
        Leg,
        blend=st.lists(
            st.tuples(st.sampled_from("ABCD"), st.sampled_from([0.1, 0.5, 1.0, 3.0])),
            min_size=1, max_size=4, unique_by=lambda item: item[0],
        ),
        batch_size=st.integers(1, 9), seed=st.integers(1, 3), batches=st.integers(0, 6),
        resumed_after=st.integers(0, 6),
    ),
    min_size=2, max_size=6,
)  # fmt: skip


@given(LEGS)
def test_a_chain_of_runs_reads_every_window_once_an_epoch(legs):
    """Whatever batch sizes, blends, seeds and resumes in between."""
    seen: dict[tuple, list[int]] = defaultdict(list)
    keys: dict[tuple, set[int]] = defaultdict(set)
    position: Position | None = None
    batch = 0
    for leg in legs:
        plain = order(*leg.blend, batch_size=leg.batch_size, seed=leg.seed)
        made = plain if position is None else plain.continued(position, batch)
        until = min(leg.resumed_after, leg.batches)
        told = read(made, batch, until)
        saved = Position.from_dict(made.at(batch + until).as_dict())
        resumed = plain.resumed(saved)
        assert resumed == made
        told += read(resumed, batch + until, leg.batches - until)
        batch += leg.batches
        position = Position.from_dict(resumed.at(batch).as_dict())
        for found, n in told:
            seen[found.identity].append(n)
            keys[found.identity].add(found.key)
    for identity, numbers in seen.items():
        assert sorted(numbers) == list(range(len(numbers))), "each number once, no hole"
        (key,) = keys[identity]
        ring = Ring(identity[2], identity[3], key)
        epochs: dict[int, set[int]] = defaultdict(set)
        for n in numbers:
            start = ring.start(n)
            assert start not in epochs[n // ring.windows]
            epochs[n // ring.windows].add(start)
    counted = {t.source.identity: t.samples for t in (*position.reading, *position.others)}
    assert {i: n for i, n in counted.items() if n} == {i: len(n) for i, n in seen.items()}


A1 = [("A", 1.0)]
HALVES = [("A", 0.5), ("B", 0.5)]
CASES = {
    "a smaller batch": (A1, 8, A1, 4, {"A": 40}),
    "a larger batch": (A1, 8, A1, 16, {"A": 40}),
    "a dataset more": (A1, 8, HALVES, 8, {"A": 40, "B": 0}),
    "a dataset less": (HALVES, 8, [("B", 1.0)], 8, {"B": 20}),
    "the other way round": (HALVES, 8, HALVES[::-1], 8, {"A": 20, "B": 20}),
    "other weights": (HALVES, 8, [("A", 3.0), ("B", 1.0)], 8, {"A": 20, "B": 20}),
    "one for the other": (A1, 8, [("B", 1.0)], 8, {"B": 0}),
    "all at once": (HALVES, 6, [("C", 1.0), ("B", 2.0)], 5, {"C": 0, "B": 15}),
}
"""Blend and batch size of 5 batches, those of the run that starts then, samples it begins after."""


@pytest.mark.parametrize("case", CASES)
def test_every_dataset_goes_on_after_what_it_gave(case):
    before, size, after, new_size, expected = CASES[case]
    parent = order(*before, batch_size=size)
    child = order(*after, batch_size=new_size).continued(parent.at(5), 5)
    first: dict[str, int] = {}
    for found, n in read(child, 5, 4):
        first.setdefault(found.name[0], n)
        assert n >= first[found.name[0]]
    assert first == expected
    kept = {t.source.name[0]: t.samples for t in parent.at(5).reading}
    left = {t.source.name[0]: t.samples for t in child.others}
    assert left == {name: n for name, n in kept.items() if name not in expected}


def test_where_nothing_changed_it_is_the_same_order():
    """To the sample: the run on another layout is compared with this one's own continuation."""
    parent = order(*HALVES)
    child = order(("A", 2), ("B", 2)).continued(parent.at(7), 7)
    assert read(child, 7, 5) == read(parent, 7, 5) and child.inherited == parent.inherited
    grandchild = order(*HALVES).continued(child.at(9), 9)
    assert read(grandchild, 9, 3) == read(parent, 9, 3)
    other = order(*HALVES, batch_size=4).continued(parent.at(7), 7)
    assert other.inherited != parent.inherited


def test_batches_that_a_rewind_left_out_stay_out_and_count_once():
    skips = Skips().add(2, 2)
    parent = order(*A1)
    batches = [skips.batch(step) for step in range(1, 6)]
    assert batches == [0, 1, 4, 5, 6]
    taken = {n for batch in batches for _, n in read(parent, batch, 1)}
    child = order(*A1, batch_size=4).continued(parent.at(skips.batch(6)), skips.batch(6))
    later = {n for step in (6, 7, 8) for _, n in read(child, skips.batch(step), 1)}
    assert not taken & later and taken | later == set(range(16)) | set(range(32, 68))
    skips = skips.add(9, 1)
    again = [n for step in (8, 9) for _, n in read(child, skips.batch(step), 1)]
    assert again == list(range(68, 76)), "batch 9, windows 64 to 67, is left out"


def test_what_cannot_go_on_is_told():
    position = order(*HALVES, ("C", 1.0), batch_size=8).at(10)
    longer = source("A", 1, length=20)
    wider = source("B", 2, tokens=90)
    other = replace(source("C", 3), sha256="sha of another")
    new = source("D", 4)
    made = Order((longer, wider, other, new), (1, 1, 1, 1), 8).continued(position, 10)
    lines = made.fates(position)
    assert lines == [
        "A.bin: windows of 10 tokens became 20: starts at its first sample; what the 20 samples "
        "taken hold (200 tokens) is read again where it is still there",
        "B.bin: its training part was 47 tokens from 5 on and is now 90 from 5 on: starts at its "
        "first sample; what the 20 samples taken hold (200 tokens) is read again where it is still "
        "there",
        "C.bin: its token file is not the one that was read: starts at its first sample; what the "
        "40 samples taken hold (400 tokens) is read again where it is still there",
        "D.bin: new: starts at its first sample",
        "A.bin: 20 samples taken (5 epochs), not read by this run",
        "B.bin: 20 samples taken (5 epochs), not read by this run",
        "C.bin: 40 samples taken (8 epochs), not read by this run",
    ]
    assert made.starts == (0, 0, 0, 0)
    back = order(*HALVES, ("C", 1.0)).continued(made.at(12), 12)
    assert back.starts == (20, 20, 40), "a dataset that comes back goes on"


def test_a_dataset_named_twice_is_read_in_two_orders():
    twice = order(("A", 1.0), ("A", 1.0))
    child = twice.continued(order(("B", 1.0), ("A", 1.0)).at(3), 3)
    assert child.starts == (12, 0) and len({s.key for s in child.sources}) == 2
    assert "named once more" in child.fates(order(("B", 1.0), ("A", 1.0)).at(3))[1]
    back = twice.continued(twice.at(5), 5)
    assert back.inherited == twice.inherited


@pytest.mark.parametrize(
    "change",
    [
        {"batch": -1},
        {"batch_size": 0},
        {"starts": []},
        {"reading": 3},
        {"began": True},
        {"more": 1},
    ],
)
def test_a_record_that_is_none_is_refused(change):
    values = order(*HALVES).at(3).as_dict()
    assert Position.from_dict(values) == order(*HALVES).at(3)
    with pytest.raises(ValueError, match="not a position in the data"):
        Position.from_dict(values | change)
    with pytest.raises(ValueError, match="other datasets"):
        order(*A1).resumed(Position.from_dict(values))


# ---------------------------------------------------------------------- with token files


def windows(loaders: list, first: int, batches: int) -> list[tuple[str, int]]:
    return [
        (str(found["file"]), int(found["window"]))
        for batch in range(first, first + batches)
        for found in loaders[0].samples("train", batch)
    ]


def test_token_files_are_known_by_content_and_ranks_agree(corpora, tmp_path):
    """Moved, renamed, at another place of the blend, over two ranks, resumed."""
    a, b = corpora
    parent = build_loaders(run_config(a, global_batch_size=8), layout())
    plain = parent.fingerprint
    position = Position.from_dict(parent.position(5))
    moved = tmp_path / "moved"
    for ending in (".bin", ".idx", ".manifest.json"):
        Path(f"{moved}{ending}").symlink_to(f"{a}{ending}")
    blend = (DatasetConfig(path=str(b)), DatasetConfig(path=str(moved), weight=3.0))
    ranks = [
        build_loaders(run_config(*blend, global_batch_size=4), layout(rank, 2)) for rank in range(2)
    ]
    one = build_loaders(run_config(*blend, global_batch_size=4), layout())
    fresh = one.fingerprint
    for loaders in (one, *ranks):
        told = loaders.start_from(position, 5)
    assert told == [
        f"{b.name}.bin: new: starts at its first sample",
        f"moved.bin: {position.reading[0].describe()}, continues there",
    ]
    assert parent.fingerprint == plain
    assert len({x.fingerprint for x in (one, *ranks)}) == 1 and one.fingerprint != fresh
    assert sorted(n for name, n in windows([one], 5, 4) if name == "moved.bin") == list(
        range(40, 52)
    )
    for step in (5, 6):
        rows = [loaders.batch("train", step, m)["tokens"] for m in range(2) for loaders in ranks]
        whole = [one.batch("train", step, m)["tokens"] for m in range(4)]
        assert all((x == y).all() for x, y in zip(rows, whole, strict=True))
    resumed = build_loaders(run_config(*blend, global_batch_size=4), layout())
    resumed.resume(one.position(7))
    assert resumed.fingerprint == one.fingerprint
    assert windows([resumed], 7, 3) == windows([one], 7, 3)
    resumed.resume(None)  # of an earlier version: nothing to take over


def test_the_same_blend_keeps_the_fingerprint(corpora):
    parent = build_loaders(run_config(*corpora), layout())
    child = build_loaders(run_config(*corpora), layout())
    child.start_from(Position.from_dict(parent.position(3)), 3)
    assert child.fingerprint == parent.fingerprint
    assert windows([child], 3, 2) == windows([parent], 3, 2)

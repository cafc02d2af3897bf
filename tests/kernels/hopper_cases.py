"""Problems for `test_hopper_protocol`, and which products a kernel should have added up."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace as Space
from typing import Any, NamedTuple

import torch
from hopper_language import Sources, simulate
from hopper_protocol import Pointer, Run, Tile

from stable_attention.hopper import backward, forward, key_gradients, launch, query_gradient, wide
from stable_attention.hopper.plan import Plan, reach, segment
from stable_attention.hopper.rows import places_kernel
from stable_attention.hopper.shapes import FORWARD, TILES
from stable_attention.hopper.tiles import FIELDS, TILE
from stable_attention.problem import Problem

PROGRAMS = 3


def described(name: str, x: Any) -> Any:
    """A kernel's argument as the simulation takes it."""
    if hasattr(x, "block_shape"):
        nbytes = x.base.element_size() * torch.Size(x.block_shape).numel()
        block = Space(shape=x.block_shape, nbytes=nbytes)
        name = name.removesuffix("_desc")
        return Space(name=name, dtype="bfloat16", layout=None, block_type=block)
    if isinstance(x, torch.Tensor):
        numbers = x.flatten().tolist() if x.dtype == torch.int32 else None
        return Pointer(name.removesuffix("_ptr"), numbers)
    return x


def problem(d: int, dv: int, sq: int, sk: int, **other: Any) -> Problem:
    given: dict[str, Any] = {
        "heads": 2, "kv_heads": 2, "batch": 1, "tq": sq, "tk": sk, "stabilizer": "compensated",
    } | other  # fmt: skip
    return Problem(dtype=torch.bfloat16, d=d, dv=dv, sq=sq, sk=sk, scale=1.0, **given)


class Sequence(NamedTuple):
    """entry: of the batch, as columns. q, k: its first tokens. first: its first query tile."""

    entry: int
    q: int
    sq: int
    k: int
    sk: int
    first: int


@dataclass
class Case:
    """A problem, its tensors, and the tiles that its products are of."""

    p: Problem
    low: bool = True
    lengths: tuple[tuple[int, int], ...] = ()
    """Of packed sequences: queries and keys."""
    parts: int = 1
    """Of the query heads of a key/value head, each of which has its own sums of dK and dV."""
    segment: int = 0
    """Blocks of the forward pass that tensor cores accumulate; 0: what `launch` says."""

    def __post_init__(self) -> None:
        p = self.p
        self.plan = replace(Plan.of(p), parts=self.parts)
        entries = () if p.varlen else (p.batch,)
        rows_q, rows_k = (p.tq, p.tk) if p.varlen else (p.sq, p.sk)
        new = lambda s, h, d: torch.empty(*entries, s, h, d, dtype=p.dtype)  # noqa: E731
        self.q, self.out = new(rows_q, p.heads, p.d), new(rows_q, p.heads, p.dv)
        self.k, self.v = new(rows_k, p.kv_heads, p.d), new(rows_k, p.kv_heads, p.dv)
        self.sequences = [Sequence(b, 0, p.sq, 0, p.sk, 0) for b in range(p.batch)]
        if p.varlen:
            self.sequences = []
            at_q = at_k = first = 0
            for sq, sk in self.lengths:
                most = self.plan.backward_tiles
                self.sequences.append(Sequence(0, at_q, sq, at_k, sk, first if sq else most - 1))
                at_q, at_k, first = at_q + sq, at_k + sk, first - (-sq // TILES[p.d][0])
        self.counter = torch.zeros(4, dtype=torch.int32)
        self.tiles = self.plan.entries * p.heads * self.plan.backward_tiles
        self.rows = torch.empty(self.tiles, TILES[p.d][0])
        self.lse = torch.empty(*entries, p.heads, rows_q)

    def places(self, kernel: str) -> torch.Tensor | None:
        """The table of tiles, whose kernel sets the counter too."""
        p = self.p
        if not p.varlen:
            return None
        of_keys = kernel in ("backward", "key_gradients")
        most = self.plan.backward_tiles if of_keys else self.plan.query_tiles
        bm, bn = TILES[p.d] if of_keys else (TILE.value, TILE.value)
        table = torch.zeros(1 + of_keys, most, FIELDS.value, dtype=torch.int32)
        q, k = (
            torch.tensor([0, *n], dtype=torch.int32).cumsum(0).to(torch.int32)
            for n in zip(*self.lengths, strict=True)
        )
        places_kernel[(p.batch, 1 + of_keys)](
            q, k, q, k, table, self.counter, p.batch, p.sq, p.sk, p.tq, p.tk, most, BM=bm, BN=bn
        )  # fmt: skip
        return table[int(of_keys)]

    def arguments(self, kernel: str) -> tuple[Any, dict[str, Any]]:
        q, k, v, out, c = self.q, self.k, self.v, self.out, self.counter
        places = self.places(kernel)
        if kernel == "key_gradients":
            function = key_gradients.key_gradients_kernel
            shift = torch.cat([self.rows] * self.p.planes, 1)
            made = wide.key_arguments(
                self.plan, q, k, v, out, k, v, shift, self.rows, c, places
            )  # fmt: skip
        elif kernel == "query_gradient":
            function = query_gradient.query_kernel
            planes = self.p.planes > 1
            lse = torch.stack([self.lse] * 2) if planes else self.lse
            target = self.lse if planes else None
            made = wide.query_arguments(
                self.plan, q, k, v, out, q, lse, self.lse, target, c, places
            )  # fmt: skip
        elif kernel == "forward":
            function = forward.forward_kernel
            low = torch.empty_like(out) if self.low else None
            away = FORWARD[self.p.d, self.p.dv].total_away and (self.segment or segment(self.p))
            total = torch.empty(1) if away else None
            made = launch._forward_arguments(
                self.plan, q, k, v, out, low, self.lse, None, None, None, None, c, places, total
            )  # fmt: skip
        else:
            function = backward.backward_kernel
            sums = torch.empty(self.tiles * self.rows.shape[1], self.p.d)
            partial = torch.empty(1) if self.parts > 1 else None
            turns = torch.zeros(self.tiles, dtype=torch.int32)
            excess = rank = None
            if self.p.planes > 1:
                excess, rank = self.rows, self.rows
            made = launch._backward_arguments(
                self.plan, q, k, v, out, k, v, None, self.rows, self.rows, sums, excess, rank,
                turns, c, places, partial,
            )  # fmt: skip
        names = list(inspect.signature(function.fn).parameters)
        given = dict(zip(names, made[1], strict=False)) | made[2]
        if self.segment and kernel == "forward":
            given["SEGMENT"] = self.segment
        return function, {name: described(name, given[name]) for name in names}

    def run(self, kernel: str, seed: int, sources: Sources) -> None:
        function, given = self.arguments(kernel)
        run = simulate(sources, kernel, function.fn.__name__, given, programs=PROGRAMS, seed=seed)
        # The backward pass sets it before each run.
        assert kernel == "backward" or given["counter"].data[0] == 0, "it ends as it began"
        CHECKS[kernel](self, run)
        assert {key[0] for key in run.written} <= {"lse"}, "what nobody asked for"

    def column(self, x: torch.Tensor, s: Sequence, head: int) -> int:
        return head * x.stride(-2) + (s.entry and s.entry * x.stride(0))

    def of(self, name: str, row: int, rows: int, s: Sequence, head: int) -> frozenset[Tile]:
        """Tiles of 64 rows, in parts of their columns as shared memory has them."""
        x = {"q": self.q, "k": self.k, "v": self.v, "do": self.out}[name]
        columns = FORWARD[self.p.d, self.p.dv].columns if name in "qk" else x.shape[-1]
        first, row = self.column(x, s, head), row + (s.q if name in ("q", "do") else s.k)
        return frozenset(
            Tile(name, r, first + c)
            for r in range(row, row + rows, 64)
            for c in range(0, x.shape[-1], columns)
        )

    def sees(self, s: Sequence, row: int, rows: int, key: int, keys: int) -> bool:
        """Whether any of these queries sees any of these keys."""
        left, right = reach(self.p)
        return any(
            max(key, i + s.sk - s.sq - left)
            <= min(min(key + keys, s.sk) - 1, i + s.sk - s.sq + right)
            for i in range(row, min(row + rows, s.sq))
        )

    def heads(self) -> Iterator[tuple[Sequence, int, int]]:
        """Sequences, their heads, and the key/value heads of these."""
        group = self.p.heads // self.p.kv_heads
        return ((s, h, h // group) for s in self.sequences for h in range(self.p.heads))

    def row(self, s: Sequence, h: int, m: int) -> int:
        """Of a query tile's numbers, and its place among sums of dQ."""
        return (s.entry * self.p.heads + h) * self.plan.backward_tiles + s.first + m


def check_keys(case: Case, run: Run, *, bm: int, bn: int, times: int, out: int) -> None:
    """dK and dV of 64 keys: each query tile that sees their key tile, of each query head."""
    group = case.p.heads // case.p.kv_heads // case.parts
    items = case.plan.entries * case.p.kv_heads * case.parts * case.plan.key_tiles
    for s, head, hk in case.heads():
        for key in range(0, -(-s.sk // bn) * bn, 64) if head % group == 0 else ():
            n = key // bn * bn
            tiles = range(-(-s.sq // bm))
            seeing = [m for m in tiles if case.sees(s, m * bm, bm, n, bn)] or [0]
            wanted: dict[str, Counter[Any]] = {"dv": Counter(), "dk": Counter()}
            for h in range(head, head + group):
                for m in seeing:
                    row = case.row(s, h, m)
                    of = case.of("k", key, 64, s, hk) | {Tile("shift", row, 0)}
                    of |= case.of("q", m * bm, bm, s, h) | case.of("do", m * bm, bm, s, h)
                    wanted["dv"][of] = times
                    of |= case.of("v", key, 64, s, hk) | {Tile("delta", row, 0)}
                    wanted["dk"][of] = times
            item = (s.entry * case.p.heads + head) // group * case.plan.key_tiles + n // bn
            for name, x, tables in (("dk", case.k, 0), ("dv", case.v, 1)):
                at = (tables * items + item) * bn + key % bn
                first = case.column(x, s, hk)
                places: list[Any] = [("part", at * case.p.d)]
                if case.parts == 1:
                    columns = range(first, first + x.shape[-1], out)
                    places = [Tile(name, s.k + key, column) for column in columns]
                for place in places:
                    found = run.written.pop(place)
                    assert [Counter(y.terms) for y in found] == [wanted[name]], place


def check_key_gradients(case: Case, run: Run) -> None:
    chunks = 64 // wide.KEY_TILES[case.p.d, case.p.dv].queries
    check_keys(case, run, bm=64, bn=64, times=chunks, out=64)


def check_backward(case: Case, run: Run) -> None:
    """dK, dV, and the additions to each half of a dQ tile, in the order of their turns."""
    p, (bm, bn) = case.p, TILES[case.p.d]
    check_keys(case, run, bm=bm, bn=bn, times=1, out=p.d)
    last_first = reach(p)[1] == 0 or p.varlen
    for s, h, hk in case.heads():
        for m in range(-(-s.sq // bm)):
            row = case.row(s, h, m)
            with_row = case.of("q", m * bm, bm, s, h) | case.of("do", m * bm, bm, s, h)
            with_row |= {Tile("shift", row, 0), Tile("delta", row, 0)}
            tiles = [n for n in range(-(-s.sk // bn)) if case.sees(s, m * bm, bm, n * bn, bn)]
            wanted = [
                with_row | case.of("k", n * bn, bn, s, hk) | case.of("v", n * bn, bn, s, hk)
                for n in (reversed(tiles) if last_first else tiles)
            ]
            for down, column in ((0, 0), (64, 0) if bm == 128 else (0, p.d // 2)):
                found = run.written.pop(Tile("sum", row * bm + down, column), [])
                assert [list(x.terms) for x in found] == [[w] for w in wanted], (s, h, m)
            if p.planes > 1:
                found = run.written.pop(Tile("excess", row, 0), [])
                assert [x.whole() for x in found] == wanted, (s, h, m)
                for first in range(row * bm, row * bm + bm, 32):
                    followed = [x.whole() for x in run.followed.get(("rank", first), [])]
                    assert set(followed) >= set(wanted), (s, h, m)


def check_query_gradient(case: Case, run: Run) -> None:
    """dQ of 64 queries: blocks that they see, and of those that only their tile sees some."""
    p = case.p
    for s, h, hk in case.heads():
        for row in range(0, -(-s.sq // 128) * 128, 64):
            with_row = case.of("q", row, 64, s, h) | case.of("do", row, 64, s, h)
            at = case.column(case.q, s, h) + (s.q + row) * case.q.stride(-3)
            needed = rows_of_ds(case, s, h, hk, row)
            for found in (pieces := run.written.pop(("dq", at))):
                assert found.of >= needed, (s, h, row)
                terms = Counter(
                    frozenset(t for t in term if isinstance(t, Tile)) for term in found.terms
                )
                for key in range(0, max(s.sk, 1), 64):
                    keys = case.of("k", key, 64, s, hk) | case.of("v", key, 64, s, hk)
                    times = terms.pop(with_row | keys, 0)
                    assert times == 1 or (times == 0 and not case.sees(s, row, 64, key, 64))
                assert not terms, (s, h, row)
            assert len(pieces) == p.d // FORWARD[p.d, p.dv].columns
            if needed:
                where = ("delta", numbers_of(case, s, h))
                deltas = [x.whole() for x in run.written.get(where, [])]
                assert any(x >= needed - {key_of(case, s, hk)} for x in deltas), (s, h, row)
        if p.planes > 1 and s.sq:
            assert len(run.written.pop(("delta", numbers_of(case, s, h)))) == -(-s.sq // 128) * 2


def numbers_of(case: Case, s: Sequence, h: int) -> int:
    """Where LSE and delta of a sequence's queries are."""
    return h * case.lse.stride(-2) + (s.entry and s.entry * case.lse.stride(0)) + s.q


def key_of(case: Case, s: Sequence, hk: int) -> tuple[str, int]:
    """The keys of a sequence in memory."""
    return "key", case.column(case.k, s, hk) + s.k * case.k.stride(-3)


def rows_of_ds(case: Case, s: Sequence, h: int, hk: int, row: int) -> frozenset[Any]:
    """What dQ of 64 queries is put right with: all blocks that they see, and numbers of rows."""
    if case.p.planes == 1:
        return frozenset()
    found = case.of("q", row, 64, s, h) | case.of("do", row, 64, s, h)
    for key in range(0, s.sk, 64):
        if case.sees(s, row, 64, key, 64):
            found |= case.of("k", key, 64, s, hk) | case.of("v", key, 64, s, hk)
    at = numbers_of(case, s, h)
    found |= {("lse", at), ("lse", at + case.lse.numel()), ("target", at), ("delta", at)}
    return found | {key_of(case, s, hk)}


def check_forward(case: Case, run: Run) -> None:
    """O of 64 queries: each block of V twice, its halves, with weights of this block of K."""
    p, tile = case.p, FORWARD[case.p.d, case.p.dv]
    for s, h, hk in case.heads():
        for row in range(0, -(-s.sq // 128) * 128, 64):
            first = case.column(case.out, s, h)
            for column in range(first, first + p.dv, min(tile.out, p.dv)):
                (found,) = run.written.pop(Tile("o", s.q + row, column))
                values: Counter[int] = Counter()
                for term in found.terms:
                    by = {x: {t for t in term if t.tensor == x} for x in "qkv"}
                    values.update(t.row - s.k for t in by["v"])
                    # Shifts are made of the scores before: of blocks to the right.
                    block = min(t.row - s.k for t in by["k"]) // tile.bn
                    assert all((t.row - s.k) // tile.bn == block for t in by["v"])
                    assert by["q"] == case.of("q", row, 64, s, h) and len(by["v"]) <= 1
                    assert by["k"] <= case.of("k", 0, -(-max(s.sk, 1) // 128) * 128, s, hk)
                for n in range(0, s.sk, tile.bn):
                    needed = case.sees(s, row // 128 * 128, 128, n, tile.bn)
                    assert not needed or n in values, (row, n)
                assert set(values.values()) == {2 if tile.bn == 64 else 1}, values
                if case.low:
                    (low,) = run.written.pop(Tile("low", s.q + row, column))
                    assert low.whole() >= found.whole()


CHECKS: dict[str, Callable[[Case, Run], None]] = {
    "key_gradients": check_key_gradients,
    "query_gradient": check_query_gradient,
    "backward": check_backward,
    "forward": check_forward,
}

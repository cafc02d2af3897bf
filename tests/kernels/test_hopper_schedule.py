"""Work items of the sm_90 kernels, without a GPU: source of `hopper.tiles` on Python numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from types import FunctionType, SimpleNamespace

import pytest
import torch

from stable_attention.hopper import plan, tiles
from stable_attention.hopper.rows import places_kernel
from stable_attention.problem import UNLIMITED, Problem

BM, BN = 64, 128
GL = SimpleNamespace(
    maximum=max, minimum=min, where=lambda condition, a, b: a if condition else b, constexpr=int
)


def on_numbers(name: str) -> FunctionType:
    """A function of `tiles` whose tensors are integers."""
    space = {"gl": GL, "TILE": 128, "keys_of": lambda *a: on_numbers("keys_of")(*a)}
    return FunctionType(getattr(tiles, name).fn.__code__, space)


def random_band(rng: random.Random) -> tuple[int, int, int, int]:
    sq, sk = rng.choice([1, 64, 65, 300, 1000]), rng.choice([1, 127, 128, 129, 500, 1000])
    left, right = (rng.choice([0, 1, 5, 100, 300, plan.FAR]) for _ in range(2))
    if rng.random() < 0.3:  # of chunks, whose diagonal lies elsewhere
        moved = rng.choice([-2000, -130, -1, 1, 130, 2000])
        left = left if left == plan.FAR else left - moved
        right = right if right == plan.FAR else right + moved
    return sq, sk, left, right


def seen(m: int, n: int, sq: int, sk: int, left: int, right: int, rows: int) -> bool:
    """Whether a query of tile m sees a key of tile n."""
    queries = range(m * rows, min(m * rows + rows, sq))
    keys = range(n * BN, min(n * BN + BN, sk))
    return any(
        max(keys[0], i + sk - sq - left) <= min(keys[-1], i + sk - sq + right) for i in queries
    )


def test_ranges_and_turns_of_a_band() -> None:
    """Both passes visit the tiles that the band crosses; additions to dQ have turns 0, 1, ..."""
    rng = random.Random(0)
    for _ in range(200):
        sq, sk, _, right = band = random_band(rng)
        turns: dict[int, list[int]] = {m: [] for m in range(-(-sq // BM))}
        for n in reversed(range(-(-sk // BN))):
            first, count = on_numbers("query_tiles_of")(n, 0, *band, BM, BN, False, True)
            visited = set(range(first, first + count))
            assert visited == {m for m in turns if seen(m, n, *band, BM)}, (band, n)
            for m in visited:
                turns[m].append(on_numbers("turn_of")(m, n, sq, sk, right, BM, BN, False, True))
        assert all(x == list(range(len(x))) for x in turns.values()), band
        for m in range(-(-sq // 128)):
            last, blocks = on_numbers("key_blocks_of")(m, 0, *band, BN, False, True)
            wanted = {n for n in range(-(-sk // BN)) if seen(m, n, *band, 128)}
            assert wanted <= set(range(last - blocks + 1, last + 1)), band
            assert blocks == max(1, len(wanted)), band


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("group", [1, 2])
def test_programs_that_take_turns_finish_in_the_same_order(causal: bool, group: int) -> None:
    """Items as started in any number of programs, which advance at random; nobody waits forever."""
    heads, sq, sk = 3, 300, 300
    right = 0 if causal else plan.FAR
    band = (sq, sk, plan.FAR, right)
    key_tiles, query_tiles = -(-sk // BN), -(-sq // BM)
    orders = set()
    for seed in range(8):
        rng = random.Random(seed)
        waiting = list(range(heads * key_tiles))
        added: dict[tuple[int, int], list[int]] = {}
        running: list[list[tuple[int, int, int]]] = [[] for _ in range(rng.choice([1, 2, 5, 9]))]
        while waiting or any(running):
            moved = False
            for steps in rng.sample(running, len(running)):
                if not steps and waiting:
                    item = waiting.pop(0)
                    n, head = on_numbers("item_at")(item, key_tiles, 3, True)
                    first, count = on_numbers("query_tiles_of")(n, 0, *band, BM, BN, False, True)
                    steps += [
                        (head * group + g, m, n)
                        for g in range(group)
                        for m in range(first, first + count)
                    ]
                    moved = True
                elif steps:
                    h, m, n = steps[0]
                    turn = on_numbers("turn_of")(m, n, sq, sk, right, BM, BN, False, True)
                    if len(added.setdefault((h, m), [])) == turn:
                        added[h, m].append(n)
                        steps.pop(0)
                        moved = True
            assert moved, "a program waits for an item that nobody has"
        assert len(added) == heads * group * query_tiles
        orders.add(str(sorted(added.items())))
    assert len(orders) == 1


def test_bounds_of_chunks_are_those_of_their_positions() -> None:
    rng = random.Random(2)
    for _ in range(300):
        sq, sk, at_q, at_k = (rng.choice([1, 2, 5, 9]) for _ in range(4))
        left, right = rng.choice([UNLIMITED, 0, 3, 20]), rng.choice([UNLIMITED, 0, 2, 20])
        asked = Problem(
            dtype=torch.bfloat16, batch=1, sq=sq, sk=sk, heads=1, kv_heads=1, d=64, dv=64, tq=sq,
            tk=sk, scale=1.0, window_left=left, window_right=right, chunked=True,
            pos_q=at_q * rng.choice([1, 2**27]), pos_k=at_k * rng.choice([1, 2**27]),
        )  # fmt: skip
        (to_left, to_right), masked = plan.mask(asked)
        assert min(to_left, to_right) >= -plan.FAR
        for i in range(sq):
            for j in range(sk):
                far = asked.pos_k + j - asked.pos_q - i
                wanted = (left == UNLIMITED or far >= -left) and (
                    right == UNLIMITED or far <= right
                )
                found = j <= i if masked["CAUSAL"] else True
                if masked["BAND"]:
                    found = i + sk - sq - to_left <= j <= i + sk - sq + to_right
                assert found == wanted, (asked, i, j)


def test_places_of_packed_sequences() -> None:
    """Tables of tiles, with sequences without queries or keys."""
    rng = random.Random(1)
    for batch in (1, 3, 17):
        lens_q = [rng.choice([0, 1, 64, 65, 300]) for _ in range(batch)]
        lens_k = [rng.choice([0, 1, 128, 129, 300]) for _ in range(batch)]
        cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lens_q, lens_k))
        tq, tk = int(cu_q[-1]) + 3, int(cu_k[-1]) + 2
        most = -(-max(tq, tk) // BM) + batch
        places = torch.full((2, most, tiles.FIELDS.value), -7, dtype=torch.int32)
        counter = torch.full((4,), -1, dtype=torch.int32)
        places_kernel[(batch, 2)](
            cu_q, cu_k, cu_q, cu_k, places, counter, batch, max(lens_q), max(lens_k), tq, tk, most,
            BM=BM, BN=BN,
        )  # fmt: skip
        queries: list[list[int]] = []
        keys: list[list[int]] = []
        for b, (nq, nk) in enumerate(zip(lens_q, lens_k, strict=True)):
            first = len(queries)
            own = [int(cu_q[b]), nq, int(cu_k[b]), nk]
            queries += [[n, *own, first] for n in range(-(-nq // BM))]
            keys += [[n, *own, first if nq else most - 1] for n in range(-(-nk // BN))]
        assert counter[:3].tolist() == [0, len(queries), len(keys)]
        assert places[0, : len(queries), :6].tolist() == queries
        assert places[1, : len(keys), :6].tolist() == keys
        assert 0 not in lens_q or len(queries) < most, "rows of no sequence"


def test_parts_of_query_heads_do_not_depend_on_the_batch() -> None:
    one = Problem(
        dtype=torch.bfloat16, batch=1, sq=4096, sk=4096, heads=64, kv_heads=8, d=128, dv=128,
        tq=4096, tk=4096, scale=1.0, window_right=0,
    )  # fmt: skip
    assert plan.splits(one) == plan.splits(replace(one, batch=8, tq=32768, tk=32768)) == 4
    assert plan.splits(replace(one, kv_heads=64)) == 1
    assert plan.splits(replace(one, window_right=UNLIMITED)) == 1

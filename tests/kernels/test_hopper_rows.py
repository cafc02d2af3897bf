"""`hopper.rows` in the interpreter: dK of keys that have nearly all of rows, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_cases import Case, problem

from stable_attention.hopper import launch
from stable_attention.hopper.plan import reach
from stable_attention.hopper.rows import MARKED, saturated_kernel
from stable_attention.hopper.shapes import TILES

CASES: dict[str, tuple[dict[str, Any], tuple[tuple[int, int], ...]]] = {
    "causal, batch, groups": (
        {"d": 64, "sq": 300, "sk": 300, "batch": 2, "heads": 4, "window_right": 0}, ()
    ),
    "more rows than one look": ({"d": 64, "sq": 1300, "sk": 150}, ()),
    "window": (
        {"d": 128, "sq": 200, "sk": 400, "window_left": 90, "window_right": 5}, ()
    ),
    "later queries see no key": ({"d": 128, "sq": 300, "sk": 100, "window_right": 0}, ()),
    "packed": (
        {"d": 128, "batch": 5, "sq": 333, "sk": 333, "tq": 538, "tk": 580, "heads": 4,
         "layout": "thd", "window_right": 0},
        ((5, 40), (0, 7), (200, 200), (0, 0), (333, 333)),
    ),
}  # fmt: skip


def noted(case: Case, gen: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(weights, keys, marks) as `sum_kernel` leaves them: few rows name a key that they see."""
    p, bm, (left, right) = case.p, TILES[case.p.d][0], reach(case.p)
    of_key = torch.full((case.tiles * bm,), -1, dtype=torch.int32)
    weight = torch.randn(case.tiles * bm, generator=gen)
    blocks = -(-(p.tk if p.varlen else p.sk) // MARKED.value) + 1
    marks = torch.zeros(case.plan.entries * p.kv_heads, blocks, dtype=torch.int32)
    for s, h, hk in case.heads():
        for i in range(0, s.sq, 3):
            low = max(0, i + s.sk - s.sq - left)
            high = min(s.sk - 1, i + s.sk - s.sq + right)
            # No key of the tile from 128 on, in which sequences of that length go on.
            seen = [j for j in (low, high, (low + high) // 2) if low <= j <= high]
            seen = [j for j in seen if not 128 <= j < 256]
            if seen:
                j = seen[i % len(seen)]
                of_key[case.row(s, h, 0) * bm + i] = j
                marks[s.entry * p.kv_heads + hk, (s.k + j) // MARKED.value] = 1
    weight[of_key < 0] = torch.nan
    return weight.view(-1, bm), of_key.view(-1, bm), marks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_dk_loses_what_rows_name_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    options, lengths = CASES[name]
    options = {"kv_heads": 2, "stabilizer": "compensated_projected"} | options
    case = Case(problem(dv=options["d"], **options), lengths=lengths)
    p, bm, gen = case.p, TILES[case.p.d][0], torch.Generator().manual_seed(0)
    weight, of_key, marks = noted(case, gen)
    q = torch.randn(case.q.shape, generator=gen).to(dtype)
    dk = torch.randn(*case.k.shape[:-1], 2 * p.d, generator=gen).to(dtype)[..., : p.d]
    wanted, before = dk.double(), dk.clone()
    for s, h, hk in case.heads():
        first = case.row(s, h, 0) * bm
        keys = of_key.flatten()[first : first + s.sq].long()
        rows = (keys >= 0).nonzero()[:, 0]
        share = weight.flatten()[first + rows].bfloat16().double()[:, None]
        queries, to = (x if p.varlen else x[s.entry] for x in (q, wanted))
        share = share * queries[s.q + rows, h].bfloat16().double()
        to[:, hk].index_add_(0, s.k + keys[rows], share, alpha=-p.scale)
    table = case.places("backward")
    made = launch._saturated_arguments(
        case.plan, dk, q, weight, of_key, marks, None if table is None else case.counter, table
    )
    saturated_kernel[made[0]](*made[1], **made[2])
    changed = wanted != before.double()
    assert changed.any() and torch.equal(dk[~changed], before[~changed])
    assert torch.allclose(dk.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)

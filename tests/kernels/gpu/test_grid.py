"""A sample of the GPU grid; benchmarks/kernel_grid.py runs all of it on several processes."""

from __future__ import annotations

import pytest
from error_rule import check_case
from grid import grid_groups, large_groups, random_groups

pytestmark = pytest.mark.gpu

GROUPS = {
    "grid": grid_groups(),
    "large": large_groups(),
    "random": random_groups(seed=0, cases=2000),
}


def test_the_grid_is_as_large_as_promised() -> None:
    assert sum(map(len, GROUPS["grid"])) >= 2000
    assert sum(map(len, GROUPS["random"])) == 2000


@pytest.mark.parametrize("part", GROUPS)
@pytest.mark.parametrize("nth", range(8))
def test_sample(part: str, nth: int) -> None:
    groups = GROUPS[part]
    for case in groups[(nth * 53) % len(groups)]:
        check_case(case, "cuda").raise_if_bad()


@pytest.mark.slow
@pytest.mark.parametrize("part", GROUPS)
def test_everything(part: str) -> None:
    problems = []
    for group in GROUPS[part]:
        for case in group:
            found = check_case(case, "cuda").problems
            problems += [f"{case.repro()}\n    {p}" for p in found]
    assert not problems, "\n".join(problems)

"""The correctness grid: every case by the error rule, large ones also against the vendors' kernels.

A sample runs by default. The long version has one test a group, the cases of which share their
compiled kernels: ``pytest -m "gpu and slow" -n 15 tests/kernels/gpu/test_grid.py`` shares the GPU
among processes, because compiling is what takes the time.
"""

from __future__ import annotations

import os

import pytest
import vendors
from attention_cases import Case, make_inputs
from error_rule import check_case, run_ours
from grid import grid_groups, large_groups, random_groups

pytestmark = pytest.mark.gpu

PARTS = {
    "grid": grid_groups(),
    "large": large_groups(),
    "random": random_groups(seed=0, cases=2000),
}
ALL = [
    pytest.param(group, id=f"{part}-{n}", marks=pytest.mark.slow)
    for part, groups in PARTS.items()
    for n, group in enumerate(groups)
]
SAMPLE = [
    pytest.param(groups[n * 53 % len(groups)], id=f"sample-{part}-{n * 53 % len(groups)}")
    for part, groups in PARTS.items()
    for n in range(8)
]


def problems(case: Case) -> list[str]:
    """What is wrong with a case on the GPU."""
    found = check_case(case, "cuda").problems
    if not found and vendors.served(case):
        given = make_inputs(case, "cuda")
        found = vendors.problems(case, given, run_ours(case, given))
    if "CUDA error" in str(found) and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(3)  # the context is lost: pytest-xdist reports the test and starts a new process
    return found


def test_the_grid_is_as_large_as_promised() -> None:
    assert sum(map(len, PARTS["grid"])) >= 2000
    assert sum(map(len, PARTS["random"])) == 2000


@pytest.mark.parametrize("group", [*SAMPLE, *ALL])
def test_group(group: list[Case]) -> None:
    found = [f"{case.repro()}\n    {p}" for case in group for p in problems(case)]
    assert not found, "\n".join(found)

"""The gloo grid with the Triton kernels over NCCL, and what only GPUs can show.

    pytest -m gpu tests/context_parallel/test_gpu.py              # minutes

One GPU is enough for the emulated ranks. The others need two or more: processes start once, on all
GPUs, and play as groups of two, four and eight. test_gpu_lost.py kills ranks.
"""

from __future__ import annotations

import pytest
from cp_cases import FEATURES, Case
from cuda_devices import cuda_devices
from on_gpu import judge
from ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

SIZES = [n for n in (2, 4, 8) if n <= cuda_devices()]
MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")
SHAPE = {"backend": "stable_flash", "dtype": "bf16", "d": 64, "dv": 64, "b": 2}
WIDTHS = {
    "window": {"window": (150, 0)},
    "window of a chunk": {"window": (64, 0)},
    "two-sided window": {"causal": False, "window": (100, 30)},
    "sinks, window, dropout": {"sinks": True, "window": (200, 0), "dropout_p": 0.1},
    "MLA": {"d": 192, "dv": 128, "kv": 8},
    "12 heads on 3": {"h": 24, "kv": 3, "sinks": True},
    "fp16, int8 o_lo": {"dtype": "fp16", "o_lo": "int8"},
    "projected": {"stabilizer": "compensated_projected", "sinks": True},
}


ALL = {**FEATURES, **WIDTHS}


def modes(size: int) -> tuple[str, ...]:
    return MODES[: 4 if size > 2 else 3]


def cases(size: int) -> list[Case]:
    found = []
    for feature in ALL.values():
        for layout in ("sbhd", "thd"):
            for mode in modes(size):
                room = {"s": 64 * 2 * size, "h": 8, "kv": 4, "tail": 8 * size}
                lengths = (300, 0, 7, 129, 64 * size)
                settings = {**SHAPE, **room, "layout": layout, "lengths": lengths, **feature}
                found.append(Case(size=size, mode=mode, **settings))
    return list(dict.fromkeys(found))


def synchronization_cases(size: int) -> list[Case]:
    lengths = (64 * size, 100, 0, 31)
    return [
        Case(
            size=size, mode=mode, layout=layout, lengths=lengths, tail=0, **SHAPE, s=128 * size,
            h=8, kv=4, sinks=True, window=(90, 0),
        )
        for mode in modes(size)
        for layout in ("sbhd", "thd")
    ]  # fmt: skip


def graph_cases(size: int) -> list[Case]:
    return [
        Case(size=size, mode=mode, **SHAPE, s=128 * size, h=8, kv=4, dropout_p=0.1)
        for mode in modes(size)
    ]


def judged() -> dict[str, list[str]]:
    """What emulated ranks make of every case; afterwards every kernel is compiled."""
    every = [case for size in (2, 4, 8) for case in cases(size)]
    for size in SIZES:
        every += synchronization_cases(size) + graph_cases(size)
    return judge(every)


def right(given: list[Case]) -> list[Case]:
    """Those that emulated ranks get right: what fails there may hang the others here."""
    found = judged()
    return [case for case in given if not found[str(case)]]


@pytest.fixture(scope="module", autouse=True)
def started():
    """All ranks, which start while the kernels are compiled; None on one GPU."""
    if not SIZES:
        yield None
        return
    with Ranks(SIZES[-1], device="cuda") as some:
        yield some


@pytest.fixture
def ranks(started):
    if started is None:
        pytest.skip("needs two CUDA devices")
    return started


@pytest.mark.parametrize("size", [2, 4, 8])
def test_emulated_ranks_on_one_gpu(size):
    found = judged()
    wrong = [f"{case}: {text}" for case in cases(size) for text in found[str(case)]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("size", SIZES or [2])
def test_every_mode_feature_and_layout(ranks, size):
    grid = right(cases(size))
    assert len(grid) > len(cases(size)) // 2
    wrong = []
    for first in range(0, len(grid), 48):
        answers = ranks.play("judged", grid[first : first + 48])
        wrong += [text for answer in answers for text in answer]
    assert not wrong, "\n".join(wrong)


def test_the_same_bits_every_time(ranks):
    size = len(ranks.processes)
    for mode in modes(size):
        case = Case(size=size, mode=mode, **SHAPE, s=128 * size, h=8, kv=4, sinks=True)
        once, again = (ranks.play("attention", case) for _ in range(2))
        for one, two in zip(once, again, strict=True):
            assert all((one[name] == two[name]).all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("size", SIZES or [2])
def test_the_host_never_waits(ranks, size):
    """CUDA's own check: any synchronizing call between start and end raises."""
    for case in right(synchronization_cases(size)):
        ranks.play("no_sync", case)


@pytest.mark.parametrize("size", SIZES or [2])
def test_a_cuda_graph_replays(ranks, size):
    """Captured once outside of the first call, replayed on other inputs."""
    for case in right(graph_cases(size)):
        assert all(ranks.play("graph", case)), case

"""The gloo grid with the Triton kernels over NCCL, and what only GPUs can show.

Needs two GPUs or more; uses two, and four and eight where there are as many.
"""

from __future__ import annotations

import os

import pytest
from cp_cases import FEATURES, Case, collect, complaints, make_inputs, truth, uncut
from gpus import devices
from ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

SIZES = [n for n in (2, 4, 8) if n <= devices()]
MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")
SHAPE = {"backend": "stable_flash", "dtype": "bf16", "d": 64, "dv": 64, "b": 2}
WIDTHS = {
    "window": {"window": (150, 0)},
    "window of a chunk": {"window": (64, 0)},
    "two-sided window": {"causal": False, "window": (100, 30)},
    "sinks, window, dropout": {"sinks": True, "window": (200, 0), "dropout_p": 0.1},
    "MLA": {"d": 192, "dv": 128, "kv": 8},
    "12 heads on 3": {"h": 24, "kv": 3, "sinks": True},
    "fp16, int8 residual": {"dtype": "fp16", "residual": "int8"},
}


def cases(size: int) -> list[Case]:
    found = []
    for mode in MODES[: 4 if size > 2 else 3]:
        for layout in ("sbhd", "thd"):
            for feature in {**FEATURES, **WIDTHS}.values():
                room = {"s": 64 * 2 * size, "h": 8, "kv": 4, "tail": 8 * size}
                lengths = (300, 0, 7, 129, 64 * size)
                settings = {**SHAPE, **room, "layout": layout, "lengths": lengths, **feature}
                found.append(Case(size=size, mode=mode, **settings))
    return found


@pytest.fixture(scope="module", params=SIZES or [2])
def ranks(request):
    if not SIZES:
        pytest.skip("needs two CUDA devices")
    with Ranks(request.param, device="cuda") as some:
        yield some


def test_every_mode_feature_and_layout(ranks):
    size = len(ranks.processes)
    grid = cases(size)
    answers = ranks.play("many", grid)
    wrong = []
    for number, case in enumerate(grid):
        given = make_inputs(case, "cuda")
        whole = {name: x.cpu() for name, x in uncut(case, given).items()}
        found = collect(case, [answers[rank][number] for rank in range(size)])
        exact = {name: x.cpu() for name, x in truth(case, given).items()}
        wrong += [f"{case}: {text}" for text in complaints(case, found, exact, whole)]
    assert not wrong, "\n".join(wrong)


def test_the_same_bits_every_time(ranks):
    size = len(ranks.processes)
    for mode in MODES[: 4 if size > 2 else 3]:
        case = Case(size=size, mode=mode, **SHAPE, s=256 * size, h=8, kv=4, sinks=True)
        once, again = (ranks.play("attention", case) for _ in range(2))
        for one, two in zip(once, again, strict=True):
            assert all((one[name] == two[name]).all() for name in ("out", "dq", "dk", "dv"))


def test_the_host_never_waits(ranks):
    """CUDA's own check: any synchronizing call between start and end raises."""
    size = len(ranks.processes)
    for mode in MODES[: 4 if size > 2 else 3]:
        for layout in ("sbhd", "thd"):
            lengths = (64 * size, 100, 0, 31)
            ranks.play(
                "no_sync",
                Case(
                    size=size, mode=mode, layout=layout, lengths=lengths, tail=0, **SHAPE,
                    s=128 * size, h=8, kv=4, sinks=True, window=(90, 0),
                ),
            )  # fmt: skip


def test_a_cuda_graph_replays(ranks):
    """Captured once outside of the first call, replayed on other inputs."""
    size = len(ranks.processes)
    for mode in MODES[: 4 if size > 2 else 3]:
        case = Case(size=size, mode=mode, **SHAPE, s=128 * size, h=8, kv=4, dropout_p=0.1)
        assert all(ranks.play("graph", case))


def test_the_survivors_name_a_killed_rank(monkeypatch):
    """Under TORCH_NCCL_BLOCKING_WAIT=1, where it is an exception and not the watchdog's abort."""
    if not SIZES:
        pytest.skip("needs two CUDA devices")
    monkeypatch.setitem(os.environ, "TORCH_NCCL_BLOCKING_WAIT", "1")
    size, victim = SIZES[-1], SIZES[-1] - 1
    with Ranks(size, device="cuda", timeout=20) as ranks:
        case = Case(size=size, mode="p2p", **SHAPE, s=128 * size, h=8, kv=4)
        answers = ranks.play("die", case, victim, "killed", lost=victim)
    for text, seconds in answers[:victim]:
        assert f"rank {victim} (context-parallel rank {victim})" in text, text
        assert seconds < 40

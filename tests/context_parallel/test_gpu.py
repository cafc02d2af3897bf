"""The gloo grid with the Triton kernels over NCCL, and what only GPUs can show.

    pytest -m gpu tests/context_parallel/test_gpu.py -k "not rest"     # minutes; then -k rest

One GPU is enough for the emulated ranks. The others need two or more; they use two, and four and
eight where there are as many.
"""

from __future__ import annotations

import os
import time

import pytest
from cp_cases import FEATURES, Case, collect, complaints, make_inputs, truth, uncut
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
    "fp16, int8 residual": {"dtype": "fp16", "residual": "int8"},
    "projected": {"stabilizer": "compensated_projected", "sinks": True},
}


ALL = {**FEATURES, **WIDTHS}
CORE = (
    "causal", "full", "window", "two-sided window", "sinks, window, dropout", "MLA",
    "12 heads on 3", "bf16 wire",
)  # fmt: skip
SETS = {"core": CORE, "rest": tuple(name for name in ALL if name not in CORE)}


def modes(size: int) -> tuple[str, ...]:
    return MODES[: 4 if size > 2 else 3]


def cases(size: int, features: str) -> list[Case]:
    found = []
    for feature in (ALL[name] for name in SETS[features]):
        for layout in ("sbhd", "thd"):
            for mode in modes(size):
                room = {"s": 64 * 2 * size, "h": 8, "kv": 4, "tail": 8 * size}
                lengths = (300, 0, 7, 129, 64 * size)
                settings = {**SHAPE, **room, "layout": layout, "lengths": lengths, **feature}
                found.append(Case(size=size, mode=mode, **settings))
    return found


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


@pytest.mark.parametrize("features", SETS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_emulated_ranks_on_one_gpu(size, features):
    wrong = judge(cases(size, features))
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module", params=SIZES or [2])
def ranks(request):
    if not SIZES:
        pytest.skip("needs two CUDA devices")
    with Ranks(request.param, device="cuda") as some:
        yield some


@pytest.mark.parametrize("features", SETS)
def test_every_mode_feature_and_layout(ranks, features):
    size = len(ranks.processes)
    grid = cases(size, features)
    judge(grid)  # compiles; what is wrong there the emulated test says
    wrong = []
    for first in range(0, len(grid), 12):
        part = grid[first : first + 12]
        answers = ranks.play("many", part)
        for number, case in enumerate(part):
            given = make_inputs(case, "cuda")
            whole = {name: x.cpu() for name, x in uncut(case, given).items()}
            found = collect(case, [answers[rank][number] for rank in range(size)])
            exact = {name: x.cpu() for name, x in truth(case, given).items()}
            wrong += [f"{case}: {text}" for text in complaints(case, found, exact, whole)]
    assert not wrong, "\n".join(wrong)


def test_the_same_bits_every_time(ranks):
    size = len(ranks.processes)
    for mode in modes(size):
        case = Case(size=size, mode=mode, **SHAPE, s=256 * size, h=8, kv=4, sinks=True)
        once, again = (ranks.play("attention", case) for _ in range(2))
        for one, two in zip(once, again, strict=True):
            assert all((one[name] == two[name]).all() for name in ("out", "dq", "dk", "dv"))


def test_the_host_never_waits(ranks):
    """CUDA's own check: any synchronizing call between start and end raises."""
    given = synchronization_cases(len(ranks.processes))
    judge(given)
    for case in given:
        ranks.play("no_sync", case)


def test_a_cuda_graph_replays(ranks):
    """Captured once outside of the first call, replayed on other inputs."""
    given = graph_cases(len(ranks.processes))
    judge(given)
    for case in given:
        assert all(ranks.play("graph", case)), case


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


def test_a_killed_rank_is_named_before_nccls_watchdog_ends_the_others(monkeypatch, capfd):
    """NCCL's default: nothing is raised, and its own message has no rank in it."""
    if not SIZES:
        pytest.skip("needs two CUDA devices")
    monkeypatch.setitem(os.environ, "TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # it would wait a minute
    size, victim = SIZES[-1], SIZES[-1] - 1
    with Ranks(size, device="cuda", timeout=24) as ranks:
        case = Case(size=size, mode="p2p", **SHAPE, s=128 * size, h=8, kv=4)
        ranks.play("many", [case])
        begin = time.monotonic()
        for pipe in ranks._pipes:
            pipe.send(("die", (case, victim, "killed")))
        pairs = list(zip(ranks.processes, ranks._pipes, strict=True))
        others = [pair for rank, pair in enumerate(pairs) if rank != victim]
        while any(p.is_alive() and not q.poll() for p, q in others):
            assert time.monotonic() - begin < 120, "a survivor still waits"
            time.sleep(0.2)
    said = capfd.readouterr().err
    lines = [x for x in said.splitlines() if f"lost rank {victim} (context-parallel rank" in x]
    for rank in range(size - 1):
        assert any(f"Rank {rank} " in line for line in lines), said[-3000:]

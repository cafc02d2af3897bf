"""A rank that is killed, over NCCL: who says so, and when.

pytest -m gpu tests/context_parallel/test_gpu_lost.py         # two GPUs or more; a minute a test
"""

import os
import time

import pytest
from cp_cases import Case
from cuda_devices import cuda_devices
from on_gpu import judge
from ranks import Ranks

SIZE = max((n for n in (2, 4, 8) if n <= cuda_devices()), default=2)
CASE = Case(size=SIZE, mode="p2p", backend="stable_flash", dtype="bf16", d=64, dv=64, s=512, h=8)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(cuda_devices() < 2, reason="needs two CUDA devices"),
]


def test_the_survivors_name_a_killed_rank(monkeypatch):
    """Under TORCH_NCCL_BLOCKING_WAIT=1, where it is an exception and not the watchdog's abort."""
    monkeypatch.setitem(os.environ, "TORCH_NCCL_BLOCKING_WAIT", "1")
    size, victim = SIZE, SIZE - 1
    assert not judge([CASE])[str(CASE)]  # compiled: a compiler's time is not a rank's silence
    with Ranks(size, device="cuda", timeout=20) as ranks:
        answers = ranks.play("die", CASE, victim, "killed", lost=victim)
    for text, seconds in answers[:victim]:
        assert f"rank {victim} (context-parallel rank {victim})" in text, text
        assert seconds < 40


def test_a_killed_rank_is_named_before_nccls_watchdog_ends_the_others(monkeypatch, capfd):
    """NCCL's default: nothing is raised, and its own message has no rank in it."""
    monkeypatch.setitem(os.environ, "TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # it would wait a minute
    size, victim = SIZE, SIZE - 1
    assert not judge([CASE])[str(CASE)]  # compiled: a compiler's time is not a rank's silence
    with Ranks(size, device="cuda", timeout=24) as ranks:
        ranks.play("many", [CASE])
        begin = time.monotonic()
        for pipe in ranks.pipes:
            pipe.send(("die", (CASE, victim, "killed")))
        pairs = list(zip(ranks.processes, ranks.pipes, strict=True))
        others = [pair for rank, pair in enumerate(pairs) if rank != victim]
        while any(p.is_alive() and not q.poll() for p, q in others):
            assert time.monotonic() - begin < 120, "a survivor still waits"
            time.sleep(0.2)
    said = capfd.readouterr().err
    lines = [x for x in said.splitlines() if f"lost rank {victim} (context-parallel rank" in x]
    for rank in range(size - 1):
        assert any(f"Rank {rank} " in line for line in lines), said[-3000:]

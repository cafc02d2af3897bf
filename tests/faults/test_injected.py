"""Faults injected into real runs of 2 to 4 gloo ranks (8 steps, a checkpoint every 3).

Each case breaks a run, looks for what a user is told, for orphans and leaked shared memory, repairs
what a person would repair, gives the same command again, and compares weights, optimizer state,
random streams, metrics and the data of every step with an unbroken run, bit by bit. A sample runs
by default. ``FAULT_LAB_SLACK=1`` holds the limits in seconds of a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_lab import hooks
from fault_lab.play import CASES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
    "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT, ROOT / "kernels"))),
    "OMP_NUM_THREADS": "1",
    "FAULT_LAB_SLACK": os.environ.get("FAULT_LAB_SLACK", "10"),
}


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Plays a case by name in a process that forks ranks: it must not inherit threads."""
    folder = tmp_path_factory.mktemp("lab")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fault_lab.play", str(folder)], env=ENVIRONMENT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    def ask(name: str) -> Any:
        print(name, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, (folder / "log").read_text()[-3000:]
        return json.loads(answer)

    yield ask
    process.stdin.close()
    process.wait()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name",
    [pytest.param(case.name, marks=[] if case.quick else [pytest.mark.slow]) for case in CASES],
)
def test_fault(play, name):
    problems = play(name)
    if problems is None:
        pytest.skip("mounting is not permitted here")
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_sample_of_random_kills(tmp_path):
    """Two ranks, a few kills; the seed differs from that of the long run.

    Slow: `test_fault` kills at two places of a save in seconds.
    """
    answer = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "faults" / "soak.py"), "--state", str(tmp_path),
         "--kills", "6", "--minutes", "5", "--ranks", "2", "--seed", "7", "--out", str(tmp_path)],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=3000,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-3000:]
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["kills"] >= 6 and found["episodes_bitwise_equal"] == found["episodes"] >= 1


@pytest.mark.parametrize("place", hooks.PLACES)
def test_a_place_for_faults_is_there(place, monkeypatch):
    found = []

    def look(owner: Any, name: str, **unused: Any) -> None:
        found.append(getattr(owner, name))

    monkeypatch.setattr(hooks, "wrap", look)
    hooks.PLACES[place](lambda: None)
    assert found and all(map(callable, found))

"""The judge of injected faults calls a broken product broken."""

from __future__ import annotations

import base64
import copy
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from fault_lab import canaries
from fault_lab import case as judge
from fault_lab.lab import Outcome, compare, descendants

RESULT = {
    "ranks": {"0": {"weights": "a", "optimizer": "b", "random": "c"}},
    "data": {"0/1": ["d1"], "0/2": ["d2"]},
    "metrics": {"1": ["3.5", "1.0", "0.1"]},
    "finished": True,
}


def outcome(**changes: Any) -> Outcome:
    """A rank that was killed after step 5, of which step 3 was saved."""
    facts = {
        "code": 1, "ranks": {0: (1, "x")}, "output": "boom: Signal 9 (SIGKILL) received by PID 77",
        "seconds": 3.0, "after_fault": 0.5, "fault": "kill", "timed_out": False, "orphans": [],
        "shm": [], "done": 5, "began": 3,
    }  # fmt: skip
    return Outcome(**(facts | changes))


class FakeLab:
    """A run that came to ``found``."""

    found: dict[str, Any] = RESULT

    def __init__(self, folder: Path, **unused: Any) -> None:
        self.run_dir = folder

    def result(self) -> dict[str, Any]:
        return self.found


def verdict(
    monkeypatch: Any, folder: Path, first: Outcome, again: Outcome, **options: Any
) -> list[str]:
    """Problems of a case whose attempts end with ``first`` and ``again``."""
    outcomes = [first, again]
    monkeypatch.setattr(judge, "Lab", FakeLab)
    monkeypatch.setattr(judge.Scene, "play", lambda self, *a, **k: outcomes.pop(0))
    case = judge.Case(name="x", inject=lambda scene: scene.play(), says=r"Signal 9 \(SIGKILL\)",
                      **options)  # fmt: skip
    return judge.run_case(case, folder / "case", RESULT, mounts=True)


GOOD = outcome(code=0, began=3, done=8)


def test_a_fault_that_is_survived_is_no_problem(monkeypatch, tmp_path):
    assert verdict(monkeypatch, tmp_path, outcome(), GOOD) == []


BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "a silent end": ({"output": "nothing"}, {}, {}, "nobody said"),
    "a wrong exit code": ({"code": 0}, {}, {}, "exit code 0, expected 1"),
    "an orphan": ({"orphans": ["python"]}, {}, {}, "orphans"),
    "leaked shared memory": ({"shm": ["torch_1"]}, {}, {}, "left in /dev/shm"),
    "no end": ({"timed_out": True}, {}, {}, "did not end by itself"),
    "a slow end": ({"after_fault": 1e6}, {}, {}, "s to end"),
    "more lost than an interval": ({"done": 8}, {}, {}, "5 steps lost"),
    "a resume that fails": ({}, {"code": 1}, {}, "resume ended with 1"),
    "other weights": ({}, {}, {"weights": "z"}, "weights of rank 0"),
    "another random stream": ({}, {}, {"random": "z"}, "random of rank 0"),
    "an unfinished run": ({}, {}, {"finished": False}, "the run was not finished"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_broken_product_would_do_is_a_problem(monkeypatch, tmp_path, name):
    first, again, changed, expected = BROKEN[name]
    found = copy.deepcopy(RESULT)
    (found if "finished" in changed else found["ranks"]["0"]).update(changed)  # type: ignore
    monkeypatch.setattr(FakeLab, "found", found)
    end = outcome(**{"code": 0, "began": 3, "done": 8} | again)
    problems = verdict(monkeypatch, tmp_path, outcome(**first), end)
    assert any(expected in p for p in problems), problems


def test_a_hang_that_nobody_reports_is_a_problem(monkeypatch, tmp_path):
    (problem, _) = verdict(monkeypatch, tmp_path, outcome(), GOOD, found_within=60)
    assert "no hang was reported" in problem


def test_data_read_twice_differently_is_a_difference():
    found = copy.deepcopy(RESULT)
    found["data"]["0/2"].append("other")  # type: ignore
    assert [d[:21] for d in compare(RESULT, found)] == ["data of rank/step 0/2"]
    del found["data"]["0/2"]  # type: ignore
    assert list(compare(RESULT, found))


def test_a_process_that_lives_on_is_seen():
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert child.pid in [pid for pid, _ in descendants()]
    finally:
        child.kill()
    end = time.monotonic() + 300
    while child.pid in [pid for pid, _ in descendants()]:
        assert time.monotonic() < end


def test_a_secret_that_is_there_is_found(tmp_path):
    """As written, and in base64 at any alignment; the user's own file is left out."""
    secret = canaries.canary(3)
    (tmp_path / "own").write_text(secret)
    (tmp_path / "plain").write_text(f"key={secret}\n")
    for shift in range(3):
        text = base64.b64encode(b"x" * shift + secret.encode() + b"tail").decode()
        (tmp_path / f"encoded{shift}").write_text(text)
    (tmp_path / "innocent").write_text(canaries.canary(4))
    found = canaries.hunt(tmp_path, {"here": secret}, {tmp_path / "own"})
    assert found == {"here": ["encoded0", "encoded1", "encoded2", "plain"]}

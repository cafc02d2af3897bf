"""The laboratory of faults judges rightly: it must fail what a broken product would do."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fault_table
import fault_tables
from fault_lab import case as judge
from fault_lab.lab import Outcome, compare, descendants


def outcome(**changes: Any) -> Outcome:
    facts: dict[str, Any] = {
        "code": 1, "ranks": {0: (1, "x")}, "output": "boom: Signal 9 (SIGKILL) received by PID 77",
        "seconds": 3.0, "after_fault": 0.5, "fault": "kill", "timed_out": False, "orphans": [],
        "shm": [], "done": 5, "began": 3,
    }  # fmt: skip
    return Outcome(**(facts | changes))


RESULT = {
    "ranks": {"0": {"weights": "a", "optimizer": "b", "random": "c"}},
    "data": {"0/1": ["d1"], "0/2": ["d2"]},
    "metrics": {"1": ["3.5", "1.0", "0.1"]},
    "finished": True,
}


class FakeLab:
    """Attempts that end as told; the last result is what the run came to."""

    def __init__(self, outcomes: list[Outcome], result: dict[str, Any], folder: Path) -> None:
        self.outcomes, self.found, self.run_dir = outcomes, result, folder

    def result(self) -> dict[str, Any]:
        return self.found


def verdict(monkeypatch: Any, tmp_path: Path, first: Outcome, again: Outcome,
            found: dict[str, Any], **options: Any) -> dict[str, Any]:  # fmt: skip
    """Row of a case whose attempts end with ``first`` and ``again``."""
    outcomes = [first, again]
    monkeypatch.setattr(judge, "Lab", lambda folder, **k: FakeLab(outcomes, found, tmp_path))
    monkeypatch.setattr(judge.Scene, "play", lambda self, *a, **k: outcomes.pop(0))
    case = judge.Case(name="x", group="killed", inject=lambda scene: scene.play(),
                      says=r"Signal 9 \(SIGKILL\)", **options)  # fmt: skip
    return judge.run_case(case, tmp_path / "case", RESULT, mounts=True)


GOOD = outcome(code=0, began=3, done=8)


def test_a_fault_that_is_survived_is_ok(monkeypatch: Any, tmp_path: Path) -> None:
    row = verdict(monkeypatch, tmp_path, outcome(), GOOD, RESULT)
    assert row["status"] == "ok" and row["lost"] == 2 and row["bitwise"]
    assert row["seen"] == "boom: Signal 9 (SIGKILL) received by PID N"


BROKEN = {
    "a silent end": ({"output": "nothing"}, {}, {}, "nobody said"),
    "a wrong exit code": ({"code": 0}, {}, {}, "exit code 0, expected 1"),
    "an orphan": ({"orphans": ["python"]}, {}, {}, "orphans"),
    "leaked shared memory": ({"shm": ["torch_1"]}, {}, {}, "left in /dev/shm"),
    "no end": ({"timed_out": True}, {}, {}, "did not end by itself"),
    "a slow end": ({"after_fault": 61.0}, {}, {}, "it took 61 s"),
    "more lost than an interval": ({"done": 8}, {}, {}, "5 steps lost"),
    "a resume that fails": ({}, {"code": 1}, {}, "resume ended with 1"),
    "other weights": ({}, {}, {"weights": "z"}, "weights of rank 0"),
    "another random stream": ({}, {}, {"random": "z"}, "random of rank 0"),
    "an unfinished run": ({}, {}, {"finished": False}, "the run was not finished"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_broken_product_would_do_is_failed(
    monkeypatch: Any, tmp_path: Path, name: str
) -> None:
    first, again, changed, expected = BROKEN[name]
    found = copy.deepcopy(RESULT)
    for key, value in changed.items():
        if key == "finished":
            found[key] = value
        else:
            found["ranks"]["0"][key] = value
    end = outcome(**{"code": 0, "began": 3, "done": 8} | again)
    row = verdict(monkeypatch, tmp_path, outcome(**first), end, found)
    assert row["status"] == "failed" and any(expected in p for p in row["problems"]), row


def test_a_hang_that_nobody_reports_is_failed(monkeypatch: Any, tmp_path: Path) -> None:
    row = verdict(monkeypatch, tmp_path, outcome(), GOOD, RESULT, found_within=60)
    assert row["status"] == "failed" and "no hang was reported" in row["problems"][0]


def test_a_fault_known_to_go_unseen_is_not_called_ok(monkeypatch: Any, tmp_path: Path) -> None:
    found = copy.deepcopy(RESULT)
    found["ranks"]["0"]["weights"] = "z"
    row = verdict(monkeypatch, tmp_path, outcome(code=0), GOOD, found, code=0, after="undetected")
    assert row["status"] == "unseen" and not row["bitwise"]


def test_data_read_twice_differently_is_a_difference() -> None:
    found = copy.deepcopy(RESULT)
    found["data"]["0/2"].append("other")
    assert [d[:21] for d in compare(RESULT, found)] == ["data of rank/step 0/2"]
    del found["data"]["0/2"]
    assert list(compare(RESULT, found))


def test_a_process_that_lives_on_is_seen() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert child.pid in [pid for pid, _ in descendants()]
    finally:
        child.kill()
    end = time.monotonic() + 300
    while child.pid in [pid for pid, _ in descendants()]:
        assert time.monotonic() < end


def test_there_are_more_than_forty_kinds() -> None:
    cases = fault_table.select(None)
    assert len(cases) >= 40 and {c.group for c in cases} == set(fault_tables.GROUPS)
    assert len({fault_table.slug(c.name) for c in cases}) == len(cases)


def test_the_table_says_what_failed_and_what_is_not_seen() -> None:
    row = {"name": "a | b", "group": "killed", "status": "failed", "problems": ["exit code 0"],
           "after": "resume", "note": "", "code": 1, "rank_codes": [1], "seconds": 0.5, "lost": 2,
           "bitwise": True, "seen": "x | y", "orphans": 0, "shm": 0, "commit": "c1"}  # fmt: skip
    rows = [row, row | {"status": "unseen", "note": "a wrong number"}, row | {"status": "ok"}]
    head = {"machine": {"cpu": "x"}, "versions": {}, "commit": "c", "utc": "2026-01-01T"}
    text = fault_tables.fault_table(head | {"cases": rows, "steps": 8, "interval": 3})
    assert "**fails: exit code 0**" in text and "**not stopped**: a wrong number" in text
    assert "resumed, 2 steps again, same bits" in text and "`x \\| y`" in text
    assert "1 end as they must, 1 change numbers without being stopped, 1 fail" in text

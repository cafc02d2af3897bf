"""Results of `benchmarks/gpt2_throughput.py` that were made in several goes."""

from __future__ import annotations

import json
from pathlib import Path

import benchmark_scripts
import pytest

RESULT = {
    "commit": "c" * 40,
    "machine": {"gpu": "x"},
    "micro_batch": 32,
    "steps": 28,
    "utc": "2026-11-24T07:45:37Z",
}


def write(path: Path, system: str, **changes: object) -> Path:
    row = {"system": system, "gpus": 1, "tokens_per_s": 1.0}
    path.write_text(json.dumps(RESULT | {"runs": [row]} | changes))
    return path


def test_runs_stand_in_the_order_they_were_made(tmp_path: Path) -> None:
    script = benchmark_scripts.load("gpt2_throughput")
    first = write(tmp_path / "a.json", "a")
    second = write(tmp_path / "b.json", "b", utc="2026-11-24T07:48:15Z")
    joined = script.join([first, second])
    assert [run["system"] for run in joined["runs"]] == ["a", "b"]
    assert joined["utc"] == RESULT["utc"] and joined["machine"] == RESULT["machine"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 30}, "steps is 30"),
        ({"machine": {"gpu": "y"}}, "machine is"),
        ({"utc": "2026-11-25T00:00:00Z"}, "another day"),
        ({"micro_batch": 4}, "micro_batch is 4"),
        ({"runs": {"none-s1": {}}}, "not a result of this script"),
    ],
)
def test_what_cannot_stand_beside_each_other(tmp_path: Path, changes: dict, said: str) -> None:
    script = benchmark_scripts.load("gpt2_throughput")
    paths = [write(tmp_path / "a.json", "a"), write(tmp_path / "b.json", "b", **changes)]
    with pytest.raises(SystemExit, match=said):
        script.join(paths)

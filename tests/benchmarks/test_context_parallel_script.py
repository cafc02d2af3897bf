"""`benchmarks/context_parallel.py`: its plan and arithmetic; slow: itself on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import benchmark_scripts
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> Any:
    return benchmark_scripts.load("context_parallel")


def test_the_plan(bench):
    args = Namespace(lengths=[8192, 131072], ranks=[1, 2, 4, 8], problem=bench.Problem())
    plan = list(bench.cells(args, 4))
    assert len({cell.key for cell in plan}) == len(plan)
    assert [plan[0].system, plan[1].system] == ["kernel", "kernel, every GPU"]
    assert plan[1].tokens == plan[0].tokens and plan[1].ranks == 4
    assert plan[2].key == "p2p, 4 ranks, 131072 tokens, causal"
    assert {cell.ranks for cell in plan} == {1, 2, 4}
    hierarchical = [cell.ranks for cell in plan if cell.system == "a2a+p2p"]
    assert set(hierarchical) == {4}  # two levels of at least two
    # Every parallel cell has the one-GPU kernel with its share of the work beside it.
    for cell in (cell for cell in plan if cell.system != "kernel, every GPU"):
        alone = bench.same_work(cell.tokens, cell.ranks, bench.BLOCK)
        assert any(c.system == "kernel" and c.tokens == alone for c in plan)
        work = cell.tokens**2 / cell.ranks
        assert abs(alone**2 - work) / work < 0.02
    odd = bench.Problem(heads=6)
    assert "a2a" not in bench._systems(4, odd)


def record(bench: Any, folder: Path) -> Any:
    args = Namespace(problem=bench.Problem(), smoke=False)
    return bench.Record(folder, args)


@pytest.fixture(autouse=True)
def no_stored_result(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.machine, "RESULTS", tmp_path / "docs")


def test_a_result_is_continued_and_a_cell_that_killed_the_run_is_not_tried_again(bench, tmp_path):
    first, second, third = (bench.Cell("p2p", 2, tokens) for tokens in (1, 2, 3))
    old = record(bench, tmp_path)
    old.put(first, {"total_ms": 1.0})
    old.put(second, {"running": True})  # and then the run was killed
    new = record(bench, tmp_path)
    assert [new.done(cell) for cell in (first, second, third)] == [True, True, False]
    assert "error" in new.content["cells"][second.key]
    path = tmp_path / "context_parallel.json"
    stored = json.loads(path.read_text())["speed"]
    for changes, continued in (
        ({"problem": {}}, False),
        ({"commit": "another"}, True),  # of the same sources
        ({"sources": "others"}, False),
    ):
        path.write_text(json.dumps({"speed": stored | changes}))
        assert record(bench, tmp_path).done(first) == continued


def test_no_cell_is_begun_that_cannot_end_in_time(bench):
    problem = bench.Problem()
    short, long = (bench.Cell("p2p", 4, tokens) for tokens in (8192, 524288))
    assert bench.seconds_needed(short, problem) < 10
    assert 40 < bench.seconds_needed(long, problem) < 90
    more = bench.Cell("p2p", 2, 524288)
    assert bench.seconds_needed(more, problem) > 1.8 * bench.seconds_needed(long, problem)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_system_computes_the_attention_of_the_whole_sequence(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", str(ROOT / "benchmarks" / "context_parallel.py")]
    command += ["--smoke", "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    result = json.loads((tmp_path / "context_parallel.json").read_text())["smoke"]
    assert result["complete"] and result["cells"]

# ruff: noqa: E402  (the scripts are plain modules of a folder that joins the path first)
"""The scripts that measure the kernels on a GPU, proven where there is none.

Plumbing only, with small problems in the interpreter: that a bug is reported with a line that
repeats it, that dead and hung processes cost one case each, that runs resume, that goals and
verdicts follow from the figures.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from attention_cases import Case
from planted_bugs import copy_package

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import kernel_all
import kernel_checks
import kernel_grid
import kernel_peers
from kernel_workers import Pool

HEAD = {
    "machine": {"cpu": "x86_64", "gpu": "a GPU"},
    "versions": {"torch": "2", "triton": "3"},
    "commit": "0123456789abcdef",
    "utc": "2026-01-02T03:04:05Z",
}


def run_script(name: str, *arguments: str, library: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_planted_bug_is_reported_with_a_line_that_repeats_it(tmp_path: Path) -> None:
    """The grid on a copy of the library with one bug; its reproduction; a resumed run."""
    copy_package(tmp_path / "bad", None)
    file = tmp_path / "bad" / "stable_attention" / "ops.py"
    right, wrong = "return result.out, result.lse", "return result.out * 1.016, result.lse"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, wrong))
    grid = ["--device", "cpu", "--parts", "small", "--limit", "1", "--workers", "0"]
    grid += ["--out", str(tmp_path)]
    done = run_script("benchmarks/kernel_grid.py", *grid, library=tmp_path / "bad")
    result = json.loads((tmp_path / "kernel_grid.json").read_text())
    assert done.returncode == 1 and result["failures"], done.stdout + done.stderr
    assert result["complete"] and result["parts"]["small"]["run"] == 1
    repro = result["failures"][0]["repro"]
    assert repro in done.stdout
    script, line = repro.split(" ", 3)[2], repro.split('"')[1]
    assert run_script(script, line, library=tmp_path / "bad").returncode == 1
    again = run_script("benchmarks/kernel_grid.py", *grid, library=tmp_path / "bad")
    assert "1 cases done before; 0 groups to go" in again.stdout, again.stdout + again.stderr
    assert again.returncode == 1


def _body(pipe: Any, device: str, stop: float) -> None:
    """A worker that dies at case 3 and hangs at case 5."""
    while (task := pipe.recv()) is not None:
        part, group = task
        for case in group:
            pipe.send(("start", str(case)))
            if case == 3:
                os._exit(9)
            if case == 5:
                time.sleep(60)
            pipe.send(("record", {"part": part, "case": str(case), "problems": []}))
        pipe.send(("idle", ""))


def test_dead_and_hung_workers_cost_one_case_each() -> None:
    records: list[dict[str, Any]] = []
    pool = Pool(mp.get_context("fork"), "cpu", time.monotonic() + 60, records.append)
    pool.body, pool.patience = _body, 2.0
    pool.run([("grid", [1, 2, 3, 4]), ("grid", [5, 6]), ("grid", [7])], workers=2)
    assert sorted(r["case"] for r in records) == list("1234567")
    problems = {r["case"]: r["problems"] for r in records if r["problems"]}
    assert problems["3"] == ["the worker died with exit code 9"]
    assert problems["5"] == ["no answer in 2 s"] and set(problems) == {"3", "5"}
    assert pool.crashes == 2


def test_states_of_other_kernels_are_not_resumed(tmp_path: Path) -> None:
    head = HEAD | {"kernels": "a", "rules": "r"}
    case = {"part": "grid", "case": "sq=1", "problems": [], "ratios": {}}
    path = tmp_path / kernel_grid.STATE
    path.write_text(json.dumps(head) + "\n" + json.dumps(case) + "\n" + '{"part": "gr')
    assert kernel_grid.read_state(path, head) == [case]
    for change in ({"kernels": "b"}, {"rules": "s"}, {"versions": {"torch": "2.1", "triton": "3"}}):
        assert kernel_grid.read_state(path, head | change) == []
    assert kernel_grid.read_state(tmp_path / "none", head) == []
    group = [Case(sq=1), Case(sq=2)]
    left = kernel_grid.without([("grid", group), ("grid", group[:1])], {("grid", "sq=1")})
    assert left == [("grid", group[1:])]


def test_vendor_rule() -> None:
    """Ours at most 1.02x the better one's; a peer's NaN is no excuse and no yardstick."""
    rms = {"SDPA-flash": 2.0, "SDPA-cuDNN": 1.0}
    for ours, over in ((0.5, 0), (1.02, 0), (1.03, 1), (float("nan"), 1)):
        record = {"case": "", "peers": {"out": rms | {"ours": ours}}}
        assert len(kernel_peers.over_peers(record)) == over
    nan = {"SDPA-flash": 1.0, "SDPA-cuDNN": float("nan"), "ours": 1.5}
    assert kernel_peers.over_peers({"case": "", "peers": {"dq": nan}})
    square = {"sq": 1024, "sk": 1024, "d": 64, "hq": 8}
    assert kernel_peers.served(Case(**square)) and kernel_peers.served(Case(**square, causal=1))
    assert not kernel_peers.served(Case(**square, sinks="learned"))
    assert not kernel_peers.served(Case(**square | {"sk": 512}, causal=1))
    assert not kernel_peers.served(Case(d=64))


def test_checks_record_every_outcome_also_of_a_run_that_is_cut(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'PYTHONPATH=kernels python x'\n"
        "def test_skipped(): pytest.skip('needs two GPUs')\n"
        "def test_deadly(): os._exit(7)\n"
    )
    arguments = ["--out", str(tmp_path), "--folder", str(tmp_path), "--processes", "1"]
    assert kernel_checks.main([*arguments, "--minutes", "5"]) == 1
    result = json.loads((tmp_path / "kernel_checks.json").read_text())
    assert result["files"] == {"test_some": {"passed": 1, "failed": 1, "skipped": 1}}
    assert not result["complete"]
    assert "PYTHONPATH=kernels" in next(
        x["why"] for x in result["not_passed"] if x["outcome"] == "failed"
    )


SCRIPT = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--minutes", type=float)
parser.add_argument("--resume", type=pathlib.Path)
args = parser.parse_args()
path = args.out / "{name}.json"
before = args.resume and (args.resume / path.name).exists() or path.exists()
path.write_text(json.dumps({head} | {{"complete": bool(before)}}))
"""


def test_all_measurements_resume_until_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of a step that needs two; the third does nothing."""
    script = tmp_path / "step.py"
    script.write_text(SCRIPT.format(head=HEAD, name="x"))
    step = kernel_all.Step(script=str(script), result="x", share=1.0)
    monkeypatch.setattr(kernel_all, "STEPS", {"one": step})
    monkeypatch.setattr(kernel_all, "describe_kernels", lambda: HEAD)
    first, second = tmp_path / "first", tmp_path / "second"
    common = ["--minutes", "3", "--only", "one"]
    assert kernel_all.main(["--out", str(first), *common]) == 1
    again = ["--out", str(second), "--resume", str(first), *common]
    assert kernel_all.main(again) == 0
    assert kernel_all.main(again) == 0
    endings = json.loads((second / "kernel_all.json").read_text())["steps"]
    assert endings == {"one": {"ended": "complete before"}}
    with pytest.raises(SystemExit):
        kernel_all.main(["--only", "two"])

"""`benchmarks/plan.py`: its cases plan and fit, and its arithmetic."""

import argparse
import json
from pathlib import Path

import benchmark_scripts
import pytest

plan_memory = benchmark_scripts.load("plan")
ARGUMENTS = argparse.Namespace(
    device="cuda", backend="stable_flash", dataset="data/x", gpu="h200", work="runs/x", out=None
)
CP2 = next(case for case in plan_memory.CASES if case.name == "llama_8b_8_layers CP2")


@pytest.mark.parametrize("case", plan_memory.CASES, ids=[case.name for case in plan_memory.CASES])
def test_every_case_passes_the_checks_and_fits_an_h200(case):
    sets = plan_memory.overrides(case, ARGUMENTS, Path("runs/x"))
    stages, block = plan_memory.planned(sets, case.ranks, "h200")
    assert block * len(stages) == case.ranks
    assert max(stage.total for stage in stages) < 139 * 2**30


def test_off_names_errors_and_large_differences():
    def row(ratio, allocated=1):
        rank = {"stage": 0, "allocated": allocated, "ratio": ratio}
        return {"model": "m", "layout": str(ratio), "by_rank": [rank]}

    broken = {"model": "m", "layout": "x", "error": "out of memory"}
    found = plan_memory.off([row(1.05), row(0.85), row(1.2), row(None), broken])
    assert found == ["m 0.85", "m 1.2", "m x"]


def test_a_stage_is_judged_by_its_fullest_rank():
    """Of ranks that are given different numbers of tokens, memory must suffice for one."""
    ranks = [
        {"stage": stage, "allocated": size, "ratio": 100 / size}
        for stage, size in ((0, 80), (0, 95), (0, 70), (1, 120))
    ]
    assert plan_memory.machine.fullest(ranks) == [ranks[1], ranks[3]]
    case = {"model": "m", "layout": "EP3"}
    assert plan_memory.off([case | {"by_rank": ranks[:3]}]) == []
    assert plan_memory.off([case | {"by_rank": ranks}]) == ["m EP3"]


def test_peaks_are_held_against_another_plan(tmp_path, capsys):
    """``--replan``: what was measured stays, what is planned is this tree's."""
    row = {"model": CP2.model, "layout": CP2.layout, "ranks": 2}
    row["by_rank"] = [{"stage": 0, "planned": 1, "ratio": 1.0, "allocated": 10, "reserved": 11}] * 2
    row["by_rank"] = [r | {"used": 12} for r in row["by_rank"]]
    broken = {"model": "moe", "layout": "EP2", "ranks": 2, "error": "no"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"memory": {"commit": "then", "cases": [row, broken]}}))
    assert plan_memory.main(["--replan", "--out", str(tmp_path)]) == 1
    found = json.loads(path.read_text())["memory"]
    stages, _ = plan_memory.planned(
        plan_memory.overrides(CP2, ARGUMENTS, Path("runs/x")), 2, "h200"
    )
    rank = found["cases"][0]["by_rank"][1]
    assert (rank["allocated"], rank["reserved"], rank["used"]) == (10, 11, 12)
    assert rank["ratio"] == rank["planned"] / 10 == stages[0].allocated / 10
    assert found["commit"] == "then" and found["planned_at"] != "then"
    assert found["off"] == [CP2.name, "moe EP2"] and CP2.name in capsys.readouterr().out


def test_a_run_is_measured_rank_by_rank(tmp_path, monkeypatch):
    """With a stand-in for torchrun that writes what two ranks would have."""

    def torchrun(command, *, env, **_):
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1"
        folder = Path(command[command.index("--worker") + 1])
        for rank in range(2):
            size = 10**9 + rank
            found = {"allocated": size, "reserved": size, "used": size}
            (folder / f"{rank}.json").write_text(json.dumps(found))
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(plan_memory.machine.subprocess, "run", torchrun)
    args = argparse.Namespace(**vars(ARGUMENTS) | {"work": str(tmp_path)})
    case = plan_memory.Case("llama_1b", "PP2", 2, {plan_memory.PP: 2})
    row = plan_memory.measure(case, args)
    assert [r["stage"] for r in row["by_rank"]] == [0, 1]
    assert [r["allocated"] for r in row["by_rank"]] == [10**9, 10**9 + 1]
    assert row["by_rank"][0]["ratio"] == row["by_rank"][0]["planned"] / 10**9


def test_an_error_is_what_the_ranks_said():
    """torchrun's own traceback comes last, and says nothing."""
    said = 'Traceback (most recent call last):\n  File "x"\nOSError: disk full\n'
    torchrun = (
        "Traceback (most recent call last):\n  in main\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nexitcode: 1\n"
    )
    assert plan_memory.machine.why(said + torchrun) == said
    assert plan_memory.machine.why("killed") == "killed"

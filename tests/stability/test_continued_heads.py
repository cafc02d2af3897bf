"""`benchmarks/continued_heads.py`: which heads stop in runs that continue another one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_scripts
import numpy as np
import pytest

from megatron_patch.stability import record
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer

L, H = 2, 3
FIRST, SECOND, SATURATED = (1, 2), (0, 1), (1, 0)
FORK, EVENT = 2000, 2900
Logits = Callable[[int], dict[tuple[int, int], float]]


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark_scripts.load("continued_heads")


def growing(first: float, second: float, third: float = 1.0) -> Logits:
    """From 500, 100 and 5,000 at the fork, by these factors in every 800 steps."""

    def at(step: int) -> dict[tuple[int, int], float]:
        part = (step - FORK) / 800
        return {
            FIRST: 500 * first**part,
            SECOND: 100 * second**part,
            SATURATED: 5000 * third**part,
        }

    return at


PLAIN = growing(64.0, 36.0, 1.5)


def write(folder: Path, logits: Logits, steps: range) -> None:
    meta = record.make_meta(layers=L, heads=H, interval=50, rule=Rule(), attention="a/none")
    writer = Writer(folder, meta, start_step=0)
    for step in steps:
        heads = {name: np.full((L, H), 0.5, np.float32) for name in HEAD_METRICS}
        heads["max_logit"][:] = 20.0
        for head, value in logits(step).items():
            heads["max_logit"][head] = value
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.3}
        writer.write(step, scalars=scalars, layers={}, heads=heads)
    writer.close()


def facts(cell: str, *, steps: int, event: int | None = None, **more: Any) -> dict[str, Any]:
    origin = None if cell == "base" else {"base": "base-s1", "event": EVENT, "step": FORK}
    found = {"run": f"{cell}-s1", "cell": cell, "seed": 1, "steps": steps, "state": "finished"}
    return found | {
        "origin": origin, "variant": "plain", "first_large_gradient": event, **more,
    }  # fmt: skip


CELLS: dict[str, tuple[Logits, int]] = {
    "control": (PLAIN, 3100),
    "stops": (growing(1.2, 0.5, 3.0), 2950),
    "slows": (growing(1.0, 5.0), 2950),
    "goes": (growing(1.0, 7.0), 2950),
    "cut": (growing(1.0, 1.0), 2450),
    "k_centered": (growing(9.0, 9.0), 2750),
}


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """A base whose saturated head is first above 1,000, and cells that continue it from 2,000."""
    out = tmp_path / "experiment"
    write(out / "runs" / "base-s1", PLAIN, range(50, 3001, 50))
    runs = [facts("base", steps=3000, event=EVENT)]
    for cell, (logits, end) in CELLS.items():
        write(out / "runs" / f"{cell}-s1", logits, range(FORK + 50, end + 1, 50))
        variant = cell if cell == "k_centered" else "plain"
        runs.append(facts(cell, steps=end, event=3000 if cell == "control" else None)
                    | {"variant": variant})  # fmt: skip
    runs.append(facts("waiting", steps=0) | {"origin": None})
    runs.append(facts("elsewhere", steps=2950) | {"seed": 2, "run": "elsewhere-s2"})
    runs.append(facts("stops", steps=2100) | {"run": "stops-s1.attempt_1", "repeat_of": "stops-s1"})
    (out / "results").mkdir()
    (out / "results" / "verdicts.json").write_text(json.dumps({"runs": runs}))
    return out


def call(script: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["continued_heads.py", "--out", str(out), *arguments])
    assert script.main() == 0
    return json.loads((out / "continued_heads.json").read_text())


def test_the_rule(
    script: Any, experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = call(script, monkeypatch, tmp_path, str(experiment))["runs"]
    assert {*runs} == {f"{cell}-s1" for cell in CELLS}
    assert {name.removesuffix("-s1"): run["verdict"] for name, run in runs.items()} == {
        "control": "goes on", "stops": "stops", "slows": "slows", "goes": "goes on",
        "cut": "untold", "k_centered": "goes on",
    }  # fmt: skip
    control = runs["control-s1"]
    assert [(h["layer"], h["head"]) for h in control["heads"]] == [SATURATED, FIRST, SECOND]
    # The base's event comes before the control's own; the median of three records is one back.
    assert control["judged_at"] == EVENT and control["first_large_gradient"] == 3000
    assert control["heads"][1]["growth"] == pytest.approx(64 ** (850 / 800))
    assert control["heads"][1]["logit"]["1000"] == pytest.approx(500 * 64 ** (1000 / 800))
    # A head that the control hardly moves does not count, whatever becomes of it.
    stops = runs["stops-s1"]["heads"]
    assert stops[0]["growth"] > 2 > stops[0]["control"] and stops[0]["verdict"] == ""
    assert [h["verdict"] for h in stops[1:]] == ["stops", "stops"]
    assert stops[1]["logit"]["0"] == 500 and stops[1]["logit"]["1000"] is None
    assert runs["k_centered-s1"]["judged_at"] == 2750
    assert runs["cut-s1"]["judged_at"] is None


def test_what_telemetry_cannot_see_is_not_told(
    script: Any, experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = call(script, monkeypatch, tmp_path, str(experiment))["runs"]
    of = [runs[name]["heads"][0] for name in ("control-s1", "k_centered-s1")]
    assert [head["growth_noise"] for head in of] == [0.5, None]
    assert [head["error_to_signal"] for head in of] == [0.25, None]


def test_without_records_of_the_control_nothing_is_told(
    script: Any, experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started and failed at once, or its records are elsewhere."""
    shutil.rmtree(experiment / "runs" / "control-s1")
    runs = call(script, monkeypatch, tmp_path, str(experiment))["runs"]
    assert {*runs} == {f"{cell}-s1" for cell in CELLS if cell != "control"}
    assert {run["verdict"] for run in runs.values()} == {"untold"}
    assert runs["stops-s1"]["heads"][1]["logit"]["0"] == 500


def test_heads_are_filled_up_from_the_end(script: Any, tmp_path: Path) -> None:
    write(tmp_path, lambda step: {FIRST: float(step), SECOND: 90.0 if step > 100 else 3.0},
          range(50, 1101, 50))  # fmt: skip
    heads = script.first_heads(record.read(tmp_path))
    assert heads[:2] == [(FIRST, 1050), (SECOND, None)] and len({head for head, _ in heads}) == 3


@pytest.mark.parametrize(
    ("mine", "control", "verdict"),
    [
        (1.25, 2.0, "stops"),
        (1.3, 2.0, "slows"),
        (1.42, 2.0, "goes on"),
        (0.1, 1.9, ""),
        (float("inf"), float("inf"), "goes on"),
        (3.0, float("inf"), "slows"),
    ],
)
def test_a_head(script: Any, mine: float, control: float, verdict: str) -> None:
    assert script.head_verdict(mine, control) == verdict


def test_the_table_says_so(
    script: Any, experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call(script, monkeypatch, tmp_path, str(experiment))
    lines = benchmark_scripts.load("continued_table").rendered(result).splitlines()
    assert len(lines) == 4 + 3 * len(CELLS)
    assert lines[4].startswith("| control-s1 | 2,000 | 1.0 | 5,000 | 5,675 |")
    assert lines[4].endswith("1.54x | 0.5 | 0.25 | 0.5 to 0.5 | 0.5 to 0.5 | 3,000 | goes on |")
    for head in (head for run in result["runs"].values() for head in run["heads"]):
        head["common"] = [None, None]  # an earlier version's records
    lines = benchmark_scripts.load("continued_table").rendered(result).splitlines()
    assert lines[4].endswith("1.54x | 0.5 | 0.25 | 0.5 to 0.5 | 3,000 | goes on |")
    assert "(does not count)" in lines[4] and lines[5].startswith("|  |  | 1.2 | 500 |")
    assert lines[7].endswith("| not by 2,950 | stops |")
    kept = str(tmp_path / "continued_heads.json")
    again = call(script, monkeypatch, tmp_path, str(experiment), "--keep", kept)
    assert "commit" not in again["runs"]["control-s1"]


def test_what_is_refused(
    script: Any, experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = experiment / "results" / "verdicts.json"
    whole = json.loads(path.read_text())["runs"]
    moved = [run | {"first_large_gradient": 2850} if run["cell"] == "base" else run
             for run in whole]  # fmt: skip
    for runs, told in (
        (None, "has no results: megatron-patch experiment results"),
        ([run for run in whole if run["cell"] != "control"], "has no cell control"),
        (moved, "control-s1 continues a run with its event at 2,900"),
        ([run for run in whole if not run["origin"]], "has no run that continues another one"),
    ):
        path.write_text("" if runs is None else json.dumps({"runs": runs}))
        with pytest.raises(SystemExit):
            call(script, monkeypatch, tmp_path, str(experiment))
        assert told in capsys.readouterr().err

"""`benchmarks/coverage_table.py`: what was made of the experiment, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import benchmark_scripts
import pytest

RULE = {"grad_norm": 1.0, "from_step": 2000}
NOTHING = {"state": "waiting", "steps": 0, "first_large_gradient": None, "exploded_at": None}
TO_ITS_END = {"state": "finished", "steps": 15000}


def made(**row: Any) -> dict[str, Any]:
    return NOTHING | {"state": "paused"} | row


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`stability_tables` with the protocols as they are, and results of the test alone."""
    found = benchmark_scripts.load("stability_tables")
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "configs").symlink_to(found.ROOT / "configs")
    monkeypatch.setattr(found, "ROOT", tmp_path)
    monkeypatch.setattr(found.coverage_table, "ROOT", tmp_path)
    return found


def write(tables: Any, name: str, rows: dict[str, dict[str, Any]], *, print_of: str = "p") -> None:
    """Results of a protocol: ``rows`` by run, of which those that it does not ask for come first.

    An attempt that does not count must not be taken for being the first.
    """
    asked = [run.id for run in tables._experiment(name).runs]
    others = [run for run in rows if run not in asked]
    runs = [
        {"run": run, "seed": int(run.partition("-s")[2][0])} | rows.get(run, NOTHING)
        for run in (*others, *asked)
    ]
    prints = {str(seed): print_of for seed in (1, 2, 3)}
    result = {"runs": runs, "fingerprints": prints, "explosion": RULE}
    path = tables.ROOT / "docs" / "results" / f"stability_{name}.json"
    path.write_text(json.dumps(result))


def shown(tables: Any) -> tuple[dict[str, list[str]], str]:
    """Entries by cell, and the sentence below them."""
    file, render, _ = tables.tables()["stability-coverage"]
    assert file == ""
    text = render({})
    head, _, *rows = text.partition("\n\n")[0].splitlines()
    assert head.split(" | ")[1:] == [
        "FP32, seed 1", "FP32, seed 2", "FP32, seed 3", "continued, seed 1", "continued, seed 2",
        "BF16, seed 1", "BF16, seed 2", "BF16, seed 3 |",
    ]  # fmt: skip
    lines = [row.strip("| ").split(" | ") for row in rows]
    return {cell: entries for cell, *entries in lines}, text.partition("\n\n")[2]


def test_nothing_was_made_yet(tables: Any) -> None:
    """Lines of all protocols, each cell once; what none asks for is told from what is missing."""
    cells, counts = shown(tables)
    assert [*cells] == [
        "`none` (`control`)", "`compensated` (`both`)", "`low_order_o`", "`consistent_sum`",
        "`fp32_o`", "`fp32_o_consistent_sum`", "`dynamic_max_2`", "`dynamic_max_7`",
        "`k_centered`", "`v_centered`", "`qk_norm`", "`weight_decay`", "`fp32_attention`",
        "`sdpa_cudnn`", "`sdpa_flash`", "`paper_bf16`",
    ]  # fmt: skip
    no = "missing"
    assert cells["`none` (`control`)"] == [no] * 8
    assert cells["`low_order_o`"] == [no, no, "-", no, no, no, no, "-"]
    assert cells["`qk_norm`"] == cells["`paper_bf16`"] == [no, no, "-", "-", "-", no, no, "-"]
    assert counts == (
        "Runs from step 0 that were made, at least in part: stream in FP32, 0 of the 26 that "
        "`attribution` asks for, 0 of the 34 in the table; stream in BF16, 0 of the 26 that "
        "`attribution_bf16_residual` asks for, 0 of the 34 in the table."
    )


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (NOTHING, "missing"),
        (made(state="refused"), "missing (refused)"),
        (made(state="exploded", steps=7211, first_large_gradient=6300, exploded_at=6700),
         "lost at 6,700"),
        (made(**TO_ITS_END), "flat to 15,000"),
        (made(steps=5856), "flat to 5,856, cut"),
        (made(steps=5571, state="waiting"), "flat to 5,571, unfinished"),
        (made(steps=5571, state="stopped by its guard"), "flat to 5,571, stopped by its guard"),
        (made(**TO_ITS_END, incomplete="at 1 of 2"), "flat to 15,000, records incomplete"),
        (made(steps=8497, first_large_gradient=7100), "norm above 1 from 7,100, cut at 8,497"),
        (made(**TO_ITS_END, first_large_gradient=7100), "norm above 1 from 7,100, to 15,000"),
        (made(steps=8497, first_large_gradient=7100, state="waiting"),
         "norm above 1 from 7,100, to 8,497, unfinished"),
        (made(steps=1999), "to 1,999, cut"),  # before the first window that counts
    ],
)  # fmt: skip
def test_what_became_of_a_run(row: dict[str, Any], told: str) -> None:
    assert benchmark_scripts.load("coverage_table").entry(row, RULE) == told


def test_attempts_and_runs_made_for_another_protocol(tables: Any) -> None:
    lost = made(state="exploded", steps=7211, first_large_gradient=6300, exploded_at=6700)
    repeated = made(state="repeated", steps=9234)
    write(tables, "baselines", {
        "none-s1": lost,
        "none-s3": made(steps=3000),
        "compensated-s1": made(**TO_ITS_END),
        "fp32_attention-s1": made(steps=4851),
        "sdpa_flash-s2.replaced_1": repeated,
        "sdpa_flash-s2.attempt_1": repeated,
        "sdpa_flash-s2": made(steps=2100),
        "sdpa_cudnn-s2": repeated,
        "none-s2": lost | {"state": "paused"},  # cut after its loss was lost
    })  # fmt: skip
    write(tables, "attribution", {
        "low_order_o-s1": made(steps=5300),
        "fp32_attention-s1": made(steps=6000),  # by both: the one that went further
        "dynamic_max_2-s1.attempt_1": repeated,
    })  # fmt: skip
    write(tables, "baselines_bf16_residual", {"compensated-s2": made(steps=5571, state="waiting")})
    cells, counts = shown(tables)
    assert cells["`none` (`control`)"][:3] == ["lost at 6,700"] * 2 + ["flat to 3,000, cut"]
    assert cells["`compensated` (`both`)"][0] == "flat to 15,000"
    assert cells["`compensated` (`both`)"][5:] == [
        "missing",
        "flat to 5,571, unfinished",
        "missing",
    ]
    assert cells["`fp32_attention`"][0] == "flat to 6,000, cut"
    assert cells["`sdpa_flash`"][:2] == ["missing", "flat to 2,100, cut"]
    assert cells["`dynamic_max_2`"][0] == cells["`sdpa_cudnn`"][1] == "missing"
    # Of seed 3 attribution asks nothing; its own run of fp32_attention is no run of baselines.
    assert "FP32, 5 of the 26 that `attribution` asks for (3 as runs of `baselines`, 3 to" in counts
    assert "), 7 of the 34 in the table; stream in BF16, " in counts
    # Never run, but what it asks for was: there are no batches of its own to differ from.
    assert counts.endswith(
        "BF16, 1 of the 26 that `attribution_bf16_residual` asks for (1 as runs of "
        "`baselines_bf16_residual`, 0 to the end or until the loss was lost), 1 of the 34 in the "
        "table."
    )


def test_runs_on_other_batches_are_not_counted_as_those_of_the_baselines(tables: Any) -> None:
    write(tables, "baselines", {"none-s1": made(**TO_ITS_END)})
    write(tables, "attribution", {"low_order_o-s1": made(steps=5300)}, print_of="q")
    cells, counts = shown(tables)
    assert cells["`none` (`control`)"][0] == "flat to 15,000"
    assert "1 of the 26 that `attribution` asks for (0 to the end" in counts


def test_continued_runs_are_judged_by_their_heads(tables: Any) -> None:
    write(tables, "attribution_continued", {
        "base-s1": made(**TO_ITS_END),
        "control-s1": made(**TO_ITS_END),
        "compensated-s1": made(**TO_ITS_END),
        "k_centered-s1": made(steps=6400),  # cut, but after the step at which it is judged
        "weight_decay-s1": made(steps=5982),
        "weight_decay-s2": made(steps=5982, state="waiting"),
        "v_centered-s1": made(**TO_ITS_END),
        "fp32_o-s1": made(**TO_ITS_END),
        "fp32_o-s2": made(steps=5600),
        "low_order_o-s1.attempt_1": made(state="repeated"),
    })  # fmt: skip
    verdicts = {
        "control-s1": "goes on", "compensated-s1": "stops", "k_centered-s1": "slows",
        "weight_decay-s1": "untold", "v_centered-s1": "untold", "weight_decay-s2": "untold",
        "low_order_o-s1": "stops",
    }  # fmt: skip
    runs = {run: {"verdict": verdict} for run, verdict in verdicts.items()}
    path = tables.ROOT / "docs" / "results" / "continued_heads.json"
    path.write_text(json.dumps({"runs": runs}))
    cells, _ = shown(tables)
    told = {cell: entries[3:5] for cell, entries in cells.items()}
    assert told["`none` (`control`)"] == ["goes on", "missing"]
    assert told["`compensated` (`both`)"] == ["stops", "missing"]
    assert told["`k_centered`"] == ["slows", "missing"]
    assert told["`weight_decay`"] == ["cut", "unfinished"]
    assert told["`v_centered`"] == ["untold", "missing"]
    assert told["`fp32_o`"] == ["not judged", "cut"]
    assert told["`low_order_o`"] == ["missing", "missing"]
    assert cells["`none` (`control`)"][0] == "missing"  # base is no cell that is compared
    path.unlink()
    assert shown(tables)[0]["`compensated` (`both`)"][3] == "not judged"


def test_one_name_for_two_things_is_two_lines(tables: Any) -> None:
    """A cell is what it computes: one of the same name that computes another thing stands apart."""
    coverage = tables.coverage_table

    def asked(run: Any, name: str) -> str:
        return tables._asked(run, name) + ("!" if name == "attribution_continued" else "")

    known = coverage.Protocols(experiment=tables._experiment, asked=asked, controls=tables.controls)
    lines = coverage.rendered(known)({}).splitlines()
    apart = [line for line in lines if line.startswith("| `fp32_o`")]
    assert apart == [
        "| `fp32_o` | missing | missing | - | - | - | missing | missing | - |",
        "| `fp32_o` of `attribution_continued` | - | - | - | missing | missing | - | - | - |",
    ]

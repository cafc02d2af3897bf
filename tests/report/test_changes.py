"""The table of verdicts: the beginning, the end, and what matters between."""

from __future__ import annotations

import math

import numpy as np
import pytest
from report_pages import make_run, said, write_records

from megatron_patch.report.report import changes
from megatron_patch.stability import record


def _alternating(step: int, scalars: dict[str, float], heads: dict[str, np.ndarray]) -> None:
    """watch at every second record, danger in one, and a switch of the guard after another."""
    heads["max_logit"][0, 0] = 2000 if step % 100 == 0 else 1
    scalars["loss_mean"] = math.nan if step == 1550 else 3.0
    scalars["switched"] = 2051.0 if step >= 2050 else 0.0


def test_of_many_changes_the_beginning_the_end_and_the_turns_are_shown(tmp_path):
    steps = list(range(50, 3001, 50))
    run = make_run(tmp_path / "run", losses=[3.0])
    write_records(run, steps, _alternating)
    rows, count = changes(record.read(run))
    assert count == 61
    assert [(row.step, row.what) for row in rows] == [
        *[(f"{s}", "watch" if s % 100 == 0 else "ok") for s in range(50, 301, 50)],
        ("...", ""),
        ("1,550", "danger"),
        ("...", ""),
        ("2,051", "switch"),
        ("...", ""),
        *[(f"{s:,}", "watch" if s % 100 == 0 else "ok") for s in range(2750, 3001, 50)],
    ]
    assert [row.reason for row in rows if row.step == "..."] == [
        "24 changes from step 350 to step 1,500 are left out",
        "10 changes from step 1,600 to step 2,050 are left out",
        "13 changes from step 2,100 to step 2,700 are left out",
    ]
    text = said(run)
    assert "(14 of 61 changes)" in text and "24 changes from step 350" in text


@pytest.mark.parametrize("count", [1, 12, 13])
def test_few_changes_are_all_shown(tmp_path, count):
    """Of thirteen one would be left out, whose place the line about it would take."""
    write_records(tmp_path, list(range(50, 50 * count + 1, 50)), _alternating)
    rows, total = changes(record.read(tmp_path))
    assert len(rows) == total == count and not [row for row in rows if row.step == "..."]


def test_other_attention_after_a_resume_is_a_switch(tmp_path):
    write_records(tmp_path, [50, 100])
    telemetry = record.read(tmp_path)
    telemetry.meta["earlier"] = [[70, "sdpa_flash/"]]
    (row,) = [row for row in changes(telemetry)[0] if row.what == "switch"]
    assert row.step == "70" and "resumed with a/none in place of sdpa_flash/" in row.reason

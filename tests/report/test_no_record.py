"""A stability panel with nothing to show says why."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from report_pages import FLAT, make_run, said, write_records


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (0, "at multiples of that, and metrics.csv has no step."),
        (1, "and metrics.csv has step 1 alone."),
        (17, "and metrics.csv has steps 1 to 17."),
        (60, "and metrics.csv has steps 1 to 60. That of step 50 is lost"),
    ],
)
def test_why_there_is_no_record(tmp_path: Path, steps: int, expected: str) -> None:
    run = make_run(tmp_path / "run", losses=FLAT[:steps])
    write_records(run, [])
    text = said(run)
    why = "holds no record: one is made every 50 steps (stability.interval), "
    assert why in text and expected in text
    assert ("is lost" in text) == (steps == 60)


def test_a_run_that_goes_on_has_no_record_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", losses=FLAT[:60])
    write_records(run, [])
    with (run / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        text = said(run)
    assert "holds no record yet: one is made every 50 steps" in text and "is lost" not in text


@pytest.mark.parametrize("interval", [None, 0, "x"])
def test_an_interval_that_is_none_is_not_told(tmp_path: Path, interval: Any) -> None:
    run = make_run(tmp_path / "run", losses=FLAT[:17])
    write_records(run, [])
    file = run / "stability" / "meta.json"
    file.write_text(
        file.read_text().replace('"interval": 50', f'"interval": {json.dumps(interval)}')
    )
    assert "holds no record; metrics.csv has steps 1 to 17." in said(run)


@pytest.mark.parametrize(
    ("enabled", "expected"),
    [
        ("true", "though stability.enabled is true: it begins before the first step, and metrics"),
        ("false", "This run recorded no stability telemetry (stability.enabled)."),
    ],
)
def test_telemetry_that_never_began(tmp_path: Path, enabled: str, expected: str) -> None:
    run = make_run(tmp_path / "run", losses=[])
    (run / "config.yaml").write_text(f"stability:\n  enabled: {enabled}\n")
    assert expected in said(run)

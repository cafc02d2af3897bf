"""A stability panel with nothing to show says why."""

import fcntl

import pytest
from report_pages import FLAT, make_run, said, write_records


@pytest.mark.parametrize(
    ("steps", "expected"), [(0, "metrics.csv has no step."), (17, "metrics.csv has steps 1 to 17.")]
)
def test_why_there_is_no_record(tmp_path, steps, expected):
    run = make_run(tmp_path / "run", losses=FLAT[:steps])
    write_records(run, [])
    text = said(run)
    assert "holds no record: one is made every 50 steps (stability.interval)" in text
    assert expected in text


def test_a_run_that_goes_on_has_no_record_yet(tmp_path):
    run = make_run(tmp_path / "run", losses=FLAT[:60])
    write_records(run, [])
    with (run / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "holds no record yet: one is made every 50 steps" in said(run)


@pytest.mark.parametrize(("enabled", "expected"), [
    ("true", "though stability.enabled is true: it begins before the first step, and metrics"),
    ("false", "This run recorded no stability telemetry (stability.enabled)."),
])  # fmt: skip
def test_telemetry_that_never_began(tmp_path, enabled, expected):
    run = make_run(tmp_path / "run", losses=[])
    (run / "config.yaml").write_text(f"stability:\n  enabled: {enabled}\n")
    assert expected in said(run)

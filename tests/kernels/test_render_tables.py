"""Generated tables: from results of the benchmark scripts into the marked places of a page."""

from __future__ import annotations

import json
from pathlib import Path

import benchmark_scripts
import pytest

ROOT = Path(__file__).resolve().parents[2]
render_tables = benchmark_scripts.load("render_tables")

HEAD = {
    "machine": {"cpu": "x86_64", "gpu": "a GPU"},
    "versions": {"torch": "2", "triton": "3"},
    "commit": "0123456789abcdef+changes",
    "utc": "2026-01-02T03:04:05Z",
}
CELL = {
    "rms": 1e-4, "mean": -2e-6, "t": -3.2, "coherence": 0.5, "dq_error": 0.25, "kappa": 7.0,
    "top_probability": 0.5, "repeated_max": 1.0, "two_round_to_one": 1.0, "dead_zone": 0.0,
}  # fmt: skip


def page(name: str) -> str:
    return f"a\n<!-- {name}:begin -->\nold\n<!-- {name}:end -->\nb\n"


def test_missing_results_name_the_command(tmp_path: Path) -> None:
    text = render_tables.fill(page("delta-rms"), tmp_path)
    assert "old" not in text and "delta_regimes.py" in text
    assert text.startswith("a\n") and text.endswith("b\n")


def test_delta_tables(tmp_path: Path) -> None:
    gate = {"regime": "one", "n": 512, "what": "rms", "value": 2e-4, "limit": 1e-4, "ok": False}
    cells = {"gauss": {"512": {"compensated": CELL}}, "one": {"512": {"none": {"error": "x"}}}}
    cells["one"]["512"]["compensated"] = CELL
    result = HEAD | {"cells": cells, "gates": [gate], "complete": False}
    (tmp_path / "delta_regimes.json").write_text(json.dumps(result))
    rms = render_tables.fill(page("delta-rms"), tmp_path)
    assert rms.index("| one, 512 | 1.0e-04 | - |") < rms.index("| gauss, 512 |")
    assert "-2.0e-06 (-3, 0.50)" in render_tables.fill(page("delta-mean"), tmp_path)
    gates = render_tables.fill(page("delta-gates"), tmp_path)
    assert "0 of 1 gates hold" in gates and "0123456789ab+changes" in gates
    assert "stopped before its end" in gates
    assert "| one | 7 |" in render_tables.fill(page("delta-inputs"), tmp_path)


def test_filling_twice_changes_nothing(tmp_path: Path) -> None:
    for page_name in render_tables.PAGES:
        once = render_tables.fill((ROOT / page_name).read_text(), tmp_path)
        assert render_tables.fill(once, tmp_path) == once


def test_a_marker_without_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no"):
        render_tables.fill("<!-- delta-rms:begin -->", tmp_path)


def test_pages_agree_with_their_results() -> None:
    for page_name in render_tables.PAGES:
        text = (ROOT / page_name).read_text()
        assert render_tables.fill(text) == text, "run: python benchmarks/render_tables.py"

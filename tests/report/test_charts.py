"""Charts: what is drawn of awkward values, and several runs in one PNG."""

from __future__ import annotations

import base64
import csv
import math
from pathlib import Path

import numpy as np
import pytest
from report_pages import FLAT, make_run, write_telemetry

from megatron_patch.report import charts, report
from megatron_patch.report.charts import Series, draw_png, heat_map, line_chart
from megatron_patch.report.collect import ReportError, collect, read_metrics

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def undrawn() -> None:
    """Here pictures are drawn."""


def drawn(image: str) -> bytes:
    head, _, data = image.partition(",")
    assert head == "data:image/png;base64"
    return base64.b64decode(data)


@pytest.mark.parametrize(("values", "log", "words"), [
    ([0.0], False, "x: 0 at step 1, lowest 0 at step 1, highest 0 at step 1, last 0 at step 1"),
    ([0, -1, 5], True, "x: 5 at step 3, lowest 5"),
    ([1e-9, 3, 1e9], True, "x: 1.0e-09 at step 1, lowest 1.0e-09 at step 1, highest 1.0e+09"),
    ([1e308, -1e308, 5], False, "x: 5 at step 3, lowest 5"),
    ([3, math.nan, 2, math.inf], False, "last 2 at step 3"),
])  # fmt: skip
def test_lines_of_awkward_values(values, log, words):
    series = [Series("x", range(1, len(values) + 1), values)]
    chart = line_chart(series, title="T", unit="u", log=log)
    assert words in chart.words and drawn(chart.image)[:8] == PNG


def test_what_has_no_value_has_no_picture():
    nothing = line_chart([Series("x", [1, 2], [math.nan, math.inf])], title="T", unit="u")
    assert (nothing.words, nothing.image) == ("nothing was recorded", "")
    assert not heat_map(np.full((2, 2), math.nan), title="T").image
    assert not heat_map(np.zeros((2, 2)), title="T", log=True).image


def test_maps_of_awkward_values():
    values = np.array([[0.5, math.nan], [math.inf, -3.0]])
    found = heat_map(values, title="T")
    assert found.words == ("2 x 2 values from -3 to 0.5; the largest is at layer 0, head 0")
    for log in (False, True):
        assert drawn(heat_map(np.ones((1, 1)), title="T", log=log).image)[:8] == PNG
    over_time = heat_map(np.arange(6.0).reshape(2, 3), title="T", log=True, steps=[50, 100, 150])
    assert over_time.words.endswith("largest is at layer 1, step 150")


def test_the_page_of_a_large_model_stays_small(tmp_path):
    run = make_run(tmp_path / "run", losses=FLAT)
    write_telemetry(run, layers=40, heads=40, records=8)
    assert len(report.render(collect(run))) < 2_000_000


def write_run(folder: Path, elapsed: list[float], losses: list[float | str]) -> Path:
    folder.mkdir()
    with (folder / "metrics.csv").open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(("step", "loss", "elapsed_seconds", "tokens_per_s", "eval_loss", "extra"))
        for i, (seconds, loss) in enumerate(zip(elapsed, losses, strict=True)):
            rows.writerow((i + 1, loss, seconds, 100, 4.0 if i else "", ""))
    return folder


def test_runs_are_overlaid(tmp_path):
    a = write_run(tmp_path / "a", [1, 2, 3], [5, "nan", 4])
    b = write_run(tmp_path / "$b_{", [1], ["?"])
    draw_png([a, b / "metrics.csv"], tmp_path / "new" / "runs.png")
    found = (tmp_path / "new" / "runs.png").read_bytes()
    assert found[:8] == PNG and len(found) > 5000


def test_restarts(tmp_path):
    table = read_metrics(write_run(tmp_path / "a", [1, 2, 0.5, 3], [5] * 4) / "metrics.csv")
    assert charts.restarts(table) == [3.0]


@pytest.mark.parametrize("content", [None, "", "step,loss\n", "time,value\n1,2\n"])
def test_what_is_no_run_is_told(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(ReportError, match=r"metrics\.csv"):
        draw_png([tmp_path], tmp_path / "out.png")


def test_rows_that_were_repeated_count_once(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(
        b"step,attempt,loss\n1,1,9\n2,1,8\n3,1,7\n2,2,6\n\0\0\0003,2,5\n4,2,4\xff\n5,2"
    )
    table = read_metrics(path)
    assert table["step"] == [1, 2, 3, 4] and table["loss"][:3] == [9, 6, 5]
    assert math.isnan(table["loss"][3]) and list(table) == ["step", "loss"]

"""Telemetry files: readers that come early, late or after a crash find what was written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_patch.stability import record
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Rule

L, H = 3, 4


def meta(attention: str = "stable_flash/none") -> dict:
    return record.make_meta(layers=L, heads=H, interval=10, rule=Rule(), attention=attention)


def heads(value: float) -> dict[str, np.ndarray]:
    return {
        name: np.full((L, H), value + i, np.float32)
        for i, name in enumerate(list(HEAD_METRICS)[:-2])
    }


def write(folder: Path, steps: list[int], *, start: int = 0, value: float = 0.0) -> record.Writer:
    writer = record.Writer(folder, meta(), start_step=start)
    for step in steps:
        scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3 + value, "grad_norm_max": 0.5}
        layers = {"grad_norm": np.arange(L, dtype=np.float32) + step}
        writer.write(step, scalars=scalars, layers=layers, heads=heads(step + value))
    return writer


def test_read_while_writing(tmp_path: Path) -> None:
    writer = write(tmp_path, [10, 20, 30])
    found = record.read(tmp_path)  # the writer is still open
    assert found.steps.tolist() == [10, 20, 30]
    assert found.heads["max_logit"].shape == (3, L, H) and found.heads["max_logit"][1, 2, 3] == 20
    assert np.isnan(found.heads["wk_norm"]).all()
    assert found.layers["grad_norm"][2].tolist() == [30, 31, 32]
    assert found.scalars["grad_norm_max"].tolist() == [0.5] * 3
    assert math.isnan(found.scalars["lr"][0])
    writer.close()


def test_a_torn_record_is_ignored_and_cut_off(tmp_path: Path) -> None:
    write(tmp_path, [10, 20]).close()
    file = tmp_path / "stability" / "records.bin"
    whole = file.read_bytes()
    for cut in (1, 7, len(whole) // 2 - 1):
        file.write_bytes(whole[:-cut])
        assert record.read(tmp_path).steps.tolist() == [10]
    write(tmp_path, [20, 30], start=10).close()
    assert record.read(tmp_path).steps.tolist() == [10, 20, 30]


def test_a_resume_sets_repeated_steps_aside(tmp_path: Path) -> None:
    write(tmp_path, [10, 20, 30, 40]).close()
    writer = write(tmp_path, [30, 40], start=20, value=0.5)
    assert writer.abandoned == 2 and writer.attention_before == "stable_flash/none"
    writer.close()
    found = record.read(tmp_path)
    assert found.steps.tolist() == [10, 20, 30, 40]
    assert found.heads["max_logit"][:, 0, 0].tolist() == [10, 20, 30.5, 40.5]
    size = record.record_dtype(meta()).itemsize
    assert (tmp_path / "stability" / "abandoned.bin").stat().st_size == 2 * size
    rows = (tmp_path / "stability" / "layers.csv").read_text().splitlines()
    assert [int(r.split(",")[0]) for r in rows[1:]] == [
        s for s in (10, 20, 30, 40) for _ in range(L)
    ]


def test_records_of_another_shape_are_kept_beside(tmp_path: Path) -> None:
    write(tmp_path, [10]).close()
    other = record.make_meta(layers=L + 1, heads=H, interval=10, rule=Rule(), attention="a/b")
    record.Writer(tmp_path, other, start_step=10).close()
    assert len(record.read(tmp_path).steps) == 0
    assert (tmp_path / "stability" / "records.until_10.bin").exists()


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        record.read(tmp_path)
    write(tmp_path, [10]).close()
    file = tmp_path / "stability" / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        record.read(tmp_path)


def test_points_name_the_worst_head() -> None:
    mean, kappa = np.full((L, H), 1e-3, np.float32), np.full((L, H), 5, np.float32)
    mean[1, 2], kappa[1, 2] = -2e-3, 100
    kappa[2, 3] = np.nan
    scalars = {"loss_mean": 3.0, "grad_norm_mean": 0.3, "grad_norm_max": 0.5}
    point = record.make_point(
        step=10, scalars=scalars, heads={"used_error_mean": mean, "kappa": kappa}
    )
    assert (point.layer, point.head) == (1, 2)
    assert point.bias_to_signal == pytest.approx(0.2)


def test_verdicts_repeat_what_the_run_said(tmp_path: Path) -> None:
    writer = record.Writer(tmp_path, meta(), start_step=0)
    for i in range(20):
        norm = 0.3 if i < 12 else 0.3 * 1.2 ** (i - 11)
        scalars = {"loss_mean": 3.0, "grad_norm_mean": norm, "grad_norm_max": norm}
        writer.write(10 * (i + 1), scalars=scalars, layers={}, heads=heads(0.0))
    writer.close()
    verdicts = record.read(tmp_path).verdicts(Rule(head_signal=math.inf))
    assert verdicts[0][1].level == "ok" and verdicts[-1][1].level == "danger"


def test_worst_heads() -> None:
    values = np.array([[1.0, -3.0, 2.0], [0.5, 0.1, np.nan], [np.nan] * 3], np.float32)
    assert record.worst("delta_error_mean", values)[:2].tolist() == [-3.0, 0.5]
    assert record.worst("entropy", np.abs(values))[:2].tolist() == pytest.approx([1.0, 0.1])
    assert np.isnan(record.worst("kappa", values)[2])

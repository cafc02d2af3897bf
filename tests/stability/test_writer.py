"""The files of the telemetry: written while they are read, resumed, of another version, killed."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import KINDS, disk
from telemetry_records import EVERY, H, L, add, meta, write

from megatron_patch.stability import record
from megatron_patch.stability.look_back import history_from_parent
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer


def test_read_while_writing(tmp_path):
    writer = write(tmp_path, [10, 20, 30])
    found = record.read(tmp_path)  # the writer is still open
    assert found.steps.tolist() == [10, 20, 30]
    assert found.heads["max_logit"].shape == (3, L, H) and found.heads["max_logit"][1, 2, 3] == 20
    assert np.isnan(found.heads["wk_norm"]).all()
    assert found.layers["grad_norm"][2].tolist() == [30, 31, 32]
    assert found.scalars["grad_norm_max"].tolist() == [0.5] * 3
    assert math.isnan(found.scalars["lr"][0])
    writer.close()


def test_a_torn_record_is_ignored_and_cut_off(tmp_path):
    write(tmp_path, [10, 20]).close()
    file = tmp_path / "stability" / "records.bin"
    whole = file.read_bytes()
    for cut in (1, 7, len(whole) // 2 - 1):
        file.write_bytes(whole[:-cut])
        assert record.read(tmp_path).steps.tolist() == [10]
    write(tmp_path, [20, 30], start=10).close()
    assert record.read(tmp_path).steps.tolist() == [10, 20, 30]


def test_zeros_at_the_end_are_no_records(tmp_path):
    """As a file system leaves them where power was lost; steps ascend, or nothing is found."""
    write(tmp_path, [10, 20, 30, 40]).close()
    file = tmp_path / "stability" / "records.bin"
    whole = file.read_bytes()
    file.write_bytes(whole + bytes(len(whole)) + bytes(9))
    assert record.read(tmp_path).steps.tolist() == [10, 20, 30, 40]
    write(tmp_path, [40, 50], start=35).close()
    assert record.read(tmp_path).steps.tolist() == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_records_whose_description_cannot_be_read_are_left_alone(text, tmp_path):
    write(tmp_path, [10, 20]).close()
    folder = tmp_path / "stability"
    (folder / "meta.json").write_bytes(text)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(record.RecordsError, match=r"meta\.json: does not describe"):
        write(tmp_path, [30], start=20)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize(("keeps", "end"), [(0.0, 0), (0.5, 20), (1.0, None), (None, 0)])
def test_records_that_were_lost_are_logged(keeps, end, tmp_path):
    write(tmp_path, [10, 20, 30, 40]).close()
    file = tmp_path / "stability" / "records.bin"
    if keeps is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: int(keeps * file.stat().st_size)])
    writer = write(tmp_path, [], start=43)
    writer.close()
    for own in (False, True):
        lines = writer.messages(own=own)
        assert len(lines) == (bool(end) or (own and end == 0))
        assert all(line.startswith("warning: stability/records.bin ") for line in lines)
    folder = tmp_path / "new"
    for start in (43, 9):  # telemetry was off before, or the run begins here; before a record
        writer = write(folder, [], start=start)
        writer.close()
        assert writer.messages(own=True) == []


def test_another_rule_than_before_is_told(tmp_path):
    """Earlier steps are judged by it, too: an alarm of theirs may be there no more."""
    write(tmp_path, [10, 20]).close()
    file = tmp_path / "stability" / "meta.json"
    told = json.loads(file.read_text())
    told["rule"] |= {"danger_error": 1.5, "gone": 3}
    del told["rule"]["watch_logit"]
    file.write_text(json.dumps(told))
    with pytest.raises(ValueError, match="rule is of another version"):
        _ = record.read(tmp_path).rule
    for logged in (
        ["watch_logit 1000.0 (not there)", "danger_error 0.1 (1.5)", "gone not there (3)"],
        [],
    ):
        writer = write(tmp_path, [], start=20)
        writer.close()
        lines = [line for line in writer.messages(own=True) if "another rule" in line]
        assert len(lines) == bool(logged) and all(text in lines[0] for text in logged)


def test_a_resume_repeats_steps_and_cuts_nothing_off(tmp_path):
    write(tmp_path, [10, 20, 30, 40]).close()
    file = tmp_path / "stability" / "records.bin"
    before = file.read_bytes()
    writer = write(tmp_path, [], start=20)
    assert writer.meta["earlier"] == [] and writer.meta["attempts"] == [[0, 0], [4, 20]]
    assert record.read(tmp_path).steps.tolist() == [10, 20]  # already
    for step in (30, 40):
        add(writer, step, value=0.5)
    writer.close()
    assert file.read_bytes().startswith(before) and len(file.read_bytes()) == 6 * len(before) // 4
    found = record.read(tmp_path)
    assert found.steps.tolist() == [10, 20, 30, 40]
    assert found.heads["max_logit"][:, 0, 0].tolist() == [10, 20, 30.5, 40.5]
    assert record.read(tmp_path, after=20).steps.tolist() == [30, 40]
    # With another interval nothing of the first attempts is left between the records.
    write(tmp_path, [75], start=25).close()
    assert record.read(tmp_path).steps.tolist() == [10, 20, 75]
    # An attempt without a record, and one that goes on from its checkpoint.
    write(tmp_path, [], start=15).close()
    write(tmp_path, [90], start=80).close()
    assert record.read(tmp_path).steps.tolist() == [10, 90]
    write(tmp_path, [10]).close()  # begun anew
    assert record.read(tmp_path).steps.tolist() == [10]


def test_who_begins_last_in_a_directory_has_its_records(tmp_path, caplog):
    """Those of two models, or of a process that was given up and lived on, were mixed."""
    first = write(tmp_path, [10, 20])
    second = write(tmp_path, [20], start=10)
    for step in (30, 40):
        add(first, step)
        add(second, step)
    first.close()
    second.close()
    assert record.read(tmp_path).steps.tolist() == [10, 20, 30, 40]
    size = record.record_dtype(meta()).itemsize
    assert (tmp_path / "stability" / "records.bin").stat().st_size == 5 * size
    assert caplog.text.count("another monitor has begun to record here") == 1


def test_records_of_another_model_are_refused(tmp_path):
    write(tmp_path, [10]).close()
    other = record.make_meta(layers=L + 1, heads=H, interval=10, rule=Rule(), attention="a/b")
    with pytest.raises(record.RecordsError, match=r"3 layers of 4 heads.*move .* away") as raised:
        Writer(tmp_path, other, start_step=10)
    assert raised.value.exit_code == 2 and record.read(tmp_path).steps.tolist() == [10]


def format_1(folder: Path) -> None:
    """Records as versions up to 40e17f9 kept them, of a run that looks back on another one."""
    described = {key: value for key, value in meta().items() if key != "attempts"} | {"format": 1}
    described["earlier"] = []
    (folder / "stability").mkdir(parents=True)
    (folder / "stability" / "meta.json").write_text(json.dumps(described))
    for name, steps in (("before.bin", (1, 2, 3)), ("records.bin", (10, 20, 30))):
        data = np.zeros(len(steps), record.record_dtype(described))
        data["step"] = steps
        (folder / "stability" / name).write_bytes(data.tobytes())
    (folder / "stability" / "layers.csv").write_text("step,layer\n")


def test_records_of_the_version_before_are_read_and_continued(tmp_path):
    format_1(tmp_path)
    for steps in ([10, 20, 30], [10, 20, 40]):
        found = record.read(tmp_path)
        assert found.steps.tolist() == steps
        assert found.before is not None and found.before["step"].tolist() == [1, 2, 3]
        assert [p.step for p in found.history().points] == [1, 2, 3, *steps]
        assert [p.step for p in found.points()] == steps
        write(tmp_path, [40], start=20).close()
    assert found.meta["format"] == record.FORMAT


def test_records_without_the_newest_columns_are_read_and_continued(tmp_path):
    """Of the version before, whose rule knew the growth of the gradient norm, too."""
    writer = Writer(tmp_path, meta() | record.OLDER, start_step=0)
    add(writer, 10)
    writer.close()
    file = tmp_path / "stability" / "meta.json"
    described = json.loads(file.read_text())
    described["rule"] |= {"danger_growth": 1.3, "norm_needs_head": True}
    file.write_text(json.dumps(described))
    write(tmp_path, [20], start=10).close()
    found = record.read(tmp_path)
    assert found.steps.tolist() == [10, 20] and "dk_sum" not in found.heads
    assert found.heads["max_logit"][:, 2, 3].tolist() == [10, 20] and found.rule == EVERY
    # A run that starts from it has the column, and nothing in it.
    _, records = history_from_parent(tmp_path, meta(), step=20, steps=100)
    assert records.dtype == record.record_dtype(meta())
    at = list(HEAD_METRICS).index("dk_sum")
    assert np.isnan(records["heads"][:, at]).all() and records["heads"][1, 0, 2, 3] == 20


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 99}, "format 99"),
        ({"head_metrics": [n for n in HEAD_METRICS if n != "kappa"]}, "no kappa"),
        ({"scalars": [*record.SCALARS, "unheard_of"]}, "an unknown 'unheard_of'"),
        ({"layer_metrics": None}, "no grad_norm"),
    ],
)
def test_records_of_other_versions_are_refused(change, text, tmp_path):
    write(tmp_path, [10]).close()
    file = tmp_path / "stability" / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    before = {one.name: one.read_bytes() for one in file.parent.iterdir()}
    for use in (lambda: record.read(tmp_path), lambda: write(tmp_path, [20], start=10)):
        with pytest.raises(record.RecordsError, match=text + r".*move .*stability away"):
            use()
    assert {one.name: one.read_bytes() for one in file.parent.iterdir()} == before


def test_killed_before_the_records_of_the_parent_count(tmp_path, monkeypatch):
    """They are in the file, and meta.json does not know them."""
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, [10, 20, 30]).close()
    for killed in (True, False):
        writer = write(second, [], start=30)
        _, records = history_from_parent(first, writer.meta, step=30, steps=15)
        with monkeypatch.context() as patch:
            if killed:
                patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
                with pytest.raises(OSError, match="full"):
                    writer.begin_with(records, parent={"run": "first", "step": 30})
            else:
                writer.begin_with(records, parent={"run": "first", "step": 30})
        writer.close()
    found = record.read(second)
    assert found.before is not None and found.before["step"].tolist() == [20, 30]
    assert len(found.steps) == 0


def long_run(folder: Path, described: dict[str, Any], count: int = 300) -> int:
    """Records of many heads, all zero; bytes of one."""
    data = np.zeros(count, record.record_dtype(described))
    data["step"] = range(10, 10 * count + 10, 10)
    (folder / "stability").mkdir()
    (folder / "stability" / "records.bin").write_bytes(data.tobytes())
    (folder / "stability" / "meta.json").write_text(json.dumps(described))
    return data.itemsize


@pytest.mark.parametrize("repeated", [False, True])
def test_a_resume_does_not_hold_the_whole_run_in_memory(repeated, tmp_path):
    """After weeks of a large model it is tens of gigabytes."""
    described = record.make_meta(layers=16, heads=64, interval=10, rule=Rule(), attention="a/b")
    size = long_run(tmp_path, described)
    if repeated:
        Writer(tmp_path, described, start_step=2990).close()
    tracemalloc.start()
    writer = Writer(tmp_path, described, start_step=2980)
    history = record.read(tmp_path, after=2900).history(after=2900)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    writer.close()
    assert [p.step for p in history.points] == [*range(2910, 2990, 10)]
    assert peak < 40 * size
    assert record.read(tmp_path).steps.tolist() == [*range(10, 2990, 10)]


@pytest.mark.parametrize("seed", range(12))
def test_the_end_of_a_run_is_judged_as_in_the_whole_of_it(seed, tmp_path):
    """Switches of the guard, other attention, a run before: wherever the records are cut."""
    rng = np.random.default_rng(seed)
    steps, switched = [*range(10, 410, 10)], 0
    changes = sorted(rng.choice(steps, rng.integers(0, 3), replace=False).tolist())
    described = meta() | {"earlier": [[until, f"a/{until}"] for until in changes]}
    data = np.zeros(len(steps), record.record_dtype(described))
    at = described["scalars"].index("switched")
    for row, step in zip(data, steps, strict=True):
        if rng.random() < 0.08:
            switched = int(rng.choice([0, step, step + 1, step - 30, step + 55]))
        row["step"], row["scalars"] = step, rng.random(len(row["scalars"]))
        row["scalars"][at], row["heads"] = switched, rng.random(row["heads"].shape)
    cut = int(rng.integers(0, 20)) if seed % 2 else 0
    whole = record.Telemetry(described, (data[cut:],), data[:cut] if cut else None)
    for after in (0, 5, *rng.choice(steps, 8).tolist(), 400):
        expected, found = (t.history(after=after) for t in (whole, whole.since(after)))
        assert repr(found.points) == repr(expected.points)  # NaN is NaN
        if found.points:
            assert found.compensated == expected.compensated


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        record.read(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_costs_whole_records(kind, tmp_path):
    with disk(tmp_path / "disk", kind) as small:
        writer = write(small.folder, [10, 20])
        with small.full():
            for step in range(30, 630, 10):
                add(writer, step)
            steps = record.read(small.folder).steps.tolist()
            assert steps == sorted(steps) and len(steps) < 62
        add(writer, 630)
        writer.close()
        assert record.read(small.folder).steps.tolist() == [*steps, 630]
        # A resume goes on behind the gap, and the rule judges what there is.
        write(small.folder, [640], start=630).close()
        found = record.read(small.folder)
        assert found.steps.tolist() == [*steps, 630, 640]
        assert len(found.history(Rule()).points) == len(steps) + 2
        del found  # it maps the file


def test_an_attempt_on_a_full_disk_begins_when_there_is_room(tmp_path):
    """Nothing is added before: the steps would not ascend."""
    with disk(tmp_path / "disk", "limit") as small:
        write(small.folder, [10, 20, 30]).close()
        with small.full():
            writer = write(small.folder, [20], start=10)
            assert not writer.begun
            assert record.read(small.folder).steps.tolist() == [10, 20, 30]
            assert record.read(small.folder).until(10).steps.tolist() == [10]
        add(writer, 30, value=0.5)
        writer.close()
    found = record.read(small.folder)
    assert found.steps.tolist() == [10, 30] and found.heads["max_logit"][1, 0, 0] == 30.5


def test_a_new_run_on_a_full_disk(tmp_path):
    with disk(tmp_path / "disk", "limit") as small:
        with small.full():
            writer = write(small.folder, [10])
        with pytest.raises(FileNotFoundError):
            record.read(small.folder)
        add(writer, 20)
        writer.close()
    assert record.read(small.folder).steps.tolist() == [20]

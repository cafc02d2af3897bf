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
from telemetry_records import H, L, add, meta, write

from megatron_patch.runtime.growing import DamagedError
from megatron_patch.stability import record
from megatron_patch.stability.lookback import look_back
from megatron_patch.stability.names import HEAD_METRICS
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer


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


def test_zeros_at_the_end_are_no_records_and_are_cut_off(tmp_path: Path) -> None:
    """As a file system leaves them where power was lost; steps ascend, or nothing is found."""
    write(tmp_path, [10, 20, 30, 40]).close()
    file = tmp_path / "stability" / "records.bin"
    whole = file.read_bytes()
    file.write_bytes(whole + bytes(len(whole)) + bytes(9))
    assert record.read(tmp_path).steps.tolist() == [10, 20, 30, 40]
    writer = write(tmp_path, [40, 50], start=35)
    writer.close()
    assert writer.abandoned == 1
    assert record.read(tmp_path).steps.tolist() == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_records_whose_description_cannot_be_read_are_left_alone(
    text: bytes, tmp_path: Path
) -> None:
    write(tmp_path, [10, 20]).close()
    folder = tmp_path / "stability"
    (folder / "meta.json").write_bytes(text)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(DamagedError, match=r"meta\.json: does not describe"):
        write(tmp_path, [30], start=20)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "keeps", "end"),
    [
        ("records.bin", 0.0, 0),
        ("records.bin", 0.5, 20),
        ("layers.csv", 0.0, 0),
        ("records.bin", 1.0, None),
        ("records.bin", None, 0),
        ("layers.csv", None, 0),
    ],
)
def test_records_that_were_lost_are_told(
    name: str, keeps: float | None, end: int | None, tmp_path: Path
) -> None:
    write(tmp_path, [10, 20, 30, 40]).close()
    file = tmp_path / "stability" / name
    if keeps is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: int(keeps * file.stat().st_size)])
    writer = write(tmp_path, [], start=43)
    writer.close()
    assert writer.gaps == ({} if end is None else {f"stability/{name}": end})
    for own in (False, True):
        told = writer.notes(own=own)
        assert len(told) == (bool(end) or (own and end == 0))
        assert all(line.startswith(f"warning: stability/{name} ") for line in told)
    folder = tmp_path / "new"
    writer = write(folder, [], start=43)  # telemetry was off before, or the run begins here
    writer.close()
    assert writer.gaps == {}
    writer = write(folder, [], start=9)  # before the first record
    writer.close()
    assert writer.gaps == {}


def test_another_rule_than_before_is_told(tmp_path: Path) -> None:
    """Earlier steps are judged by it, too: an alarm of theirs may be there no more."""
    write(tmp_path, [10, 20]).close()
    file = tmp_path / "stability" / "meta.json"
    told = json.loads(file.read_text())
    del told["rule"]["norm_needs_head"]
    told["rule"] |= {"danger_growth": 1.5, "gone": 3}
    file.write_text(json.dumps(told))
    for said in (
        ["norm_needs_head False (not there)", "danger_growth 1.3 (1.5)", "gone not there (3)"],
        [],
    ):
        writer = write(tmp_path, [], start=20)
        writer.close()
        lines = [line for line in writer.notes(own=True) if "another rule" in line]
        assert len(lines) == bool(said) and all(text in lines[0] for text in said)


def test_a_resume_sets_repeated_steps_aside(tmp_path: Path) -> None:
    write(tmp_path, [10, 20, 30, 40]).close()
    writer = write(tmp_path, [30, 40], start=20, value=0.5)
    assert writer.abandoned == 2 and writer.meta["earlier"] == []
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
    Writer(tmp_path, other, start_step=10).close()
    assert len(record.read(tmp_path).steps) == 0
    assert (tmp_path / "stability" / "records.until_10.bin").exists()


OLD = [n for n in HEAD_METRICS if n != "kappa"]


def earlier_version(folder: Path) -> bytes:
    """Records of steps 10, 20, 30 without a metric of this version; what records.bin holds."""
    old = meta() | {"head_metrics": OLD}
    data = np.zeros(3, record.record_dtype(old))
    data["step"], data["scalars"][:, 0] = (10, 20, 30), (1.0, 2.0, 3.0)
    data["heads"][:] = np.arange(len(OLD))[:, None, None]
    (folder / "stability").mkdir(parents=True)
    (folder / "stability" / "records.bin").write_bytes(data.tobytes() + b"torn")
    past = np.zeros(9, data.dtype)  # long enough to hold records of another layout
    past["step"] = range(1, 10)
    (folder / "stability" / "before.bin").write_bytes(past.tobytes())
    (folder / "stability" / "meta.json").write_text(json.dumps(old))
    rows = "step,layer,gone,max_logit,worst_head\n"
    rows += "".join(f"{s},0,g{s},{s}.5,2\n" for s in (10, 20, 30))
    (folder / "stability" / "layers.csv").write_text(rows)
    return data.tobytes() + b"torn"


def test_records_of_an_earlier_version_are_continued(tmp_path: Path) -> None:
    """A metric more is no reason to forget a run of weeks, nor what its early warning looks at."""
    data = earlier_version(tmp_path)
    before = record.read(tmp_path)
    assert "kappa" not in before.heads and before.steps.tolist() == [10, 20, 30]
    writer = write(tmp_path, [30], start=20, value=0.5)
    assert writer.abandoned == 1 and writer.set_aside is None
    writer.close()
    found = record.read(tmp_path)
    assert found.steps.tolist() == [10, 20, 30]
    assert found.scalars["loss_mean"][:2].tolist() == [1.0, 2.0]
    assert np.isnan(found.heads["kappa"][:2]).all() and np.isfinite(found.heads["kappa"][2]).all()
    for i, name in enumerate(OLD):
        assert (found.heads[name][:2] == i).all(), name
    assert found.before is not None and found.before["step"].tolist() == [*range(1, 10)]
    folder = tmp_path / "stability"
    table = (folder / "layers.csv").read_text().splitlines()
    assert len(table) == 3 + L and len({line.count(",") for line in table}) == 1
    told = dict(zip(table[0].split(","), table[1].split(","), strict=True))
    assert (told["step"], told["max_logit"]) == ("10", "10.5")
    assert (told["kappa"], told["worst_head"], told["gone"]) == ("", "2", "g10")
    first = dict(zip(table[0].split(","), table[3].split(","), strict=True))
    assert (first["step"], first["layer"], first["max_logit"]) == ("30", "0", "30.5")
    assert first["gone"] == "" and "does not know gone" in writer.notes(own=True)[0]
    aside = sorted(p.name for p in folder.glob("*until_20*"))
    assert aside == ["before.until_20.bin", "meta.until_20.json", "records.until_20.bin"]
    assert (folder / aside[2]).read_bytes() == data  # whole, as they were


def test_killed_while_it_takes_over_an_earlier_version(tmp_path: Path) -> None:
    """At any rename: no file is ever read as what it is not, and none is lost."""
    replace = os.replace
    for allowed in range(20):
        folder, left = tmp_path / str(allowed), iter(range(allowed))
        data = earlier_version(folder)

        def until(a: Any, b: Any, left: Any = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            replace(a, b)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", until)
            try:
                write(folder, [], start=20).close()
            except KeyboardInterrupt:
                done = False
            else:
                done = True
        write(folder, [], start=20).close()
        found = record.read(folder)
        assert found.steps.tolist() in ([10, 20], [])
        assert found.scalars["loss_mean"].tolist() == [1.0, 2.0][: len(found.steps)]
        assert found.before is None or found.before["step"].tolist() == [*range(1, 10)]
        assert (folder / "stability" / "records.until_20.bin").read_bytes() == data
        if done:
            break
    assert done and allowed > 4


def test_looking_back_on_an_earlier_version(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    earlier_version(first)
    (first / "stability" / "before.bin").unlink()
    write(second, []).close()
    look_back(second, first, step=30, steps=100)
    assert [p.step for p in record.read(second).history().points] == [10, 20, 30]
    # What a later version measured has no place here.
    later = meta() | {"head_metrics": [*OLD, "unheard_of"]}
    (first / "stability" / "meta.json").write_text(json.dumps(later))
    with pytest.raises(ValueError, match="no place for"):
        look_back(second, first, step=30, steps=100)
    writer = write(first, [], start=30)
    writer.close()
    assert writer.set_aside == "records.until_30.bin"


def long_run(folder: Path, described: dict[str, Any], count: int = 300) -> int:
    """Records of many heads, all zero; bytes of one."""
    data = np.zeros(count, record.record_dtype(described))
    data["step"] = range(10, 10 * count + 10, 10)
    (folder / "stability").mkdir()
    (folder / "stability" / "records.bin").write_bytes(data.tobytes())
    (folder / "stability" / "meta.json").write_text(json.dumps(described))
    return data.itemsize


@pytest.mark.parametrize("missing", [0, 1])
def test_a_resume_does_not_hold_the_whole_run_in_memory(missing: int, tmp_path: Path) -> None:
    """After weeks of a large model it is tens of gigabytes. ``missing`` metrics: rewritten."""
    described = record.make_meta(layers=16, heads=64, interval=10, rule=Rule(), attention="a/b")
    names = described["head_metrics"]
    size = long_run(tmp_path, described | {"head_metrics": names[: len(names) - missing]})
    tracemalloc.start()
    writer = Writer(tmp_path, described, start_step=2980)
    history = record.read(tmp_path).since(2900).history(after=2900)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    writer.close()
    assert writer.abandoned == 2 and [p.step for p in history.points] == [*range(2910, 2990, 10)]
    assert peak < (150 if missing else 40) * size
    assert record.read(tmp_path).steps.tolist() == [*range(10, 2990, 10)]
    assert (tmp_path / "stability" / "abandoned.bin").stat().st_size == 2 * (
        record.record_dtype(described).itemsize
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_end_of_a_run_is_judged_as_in_the_whole_of_it(seed: int, tmp_path: Path) -> None:
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
    whole = record.Telemetry(described, data[cut:], data[:cut] if cut else None)
    for after in (0, 5, *rng.choice(steps, 8).tolist(), 400):
        expected, found = (t.history(after=after) for t in (whole, whole.since(after)))
        assert repr(found.points) == repr(expected.points)  # NaN is NaN
        if found.points:
            assert found.compensated == expected.compensated


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        record.read(tmp_path)
    write(tmp_path, [10]).close()
    file = tmp_path / "stability" / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        record.read(tmp_path)


def layers_told(folder: Path) -> list[tuple[int, int]]:
    """(step, layer) of layers.csv, whose rows are all whole."""
    header, *lines = (folder / "stability" / "layers.csv").read_text().splitlines()
    assert {line.count(",") for line in lines} <= {header.count(",")}
    return [(int(a), int(b)) for a, b in (line.split(",")[:2] for line in lines)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_costs_whole_records(kind: str, tmp_path: Path) -> None:
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
        told = layers_told(small.folder)
        assert told == sorted(told) and told[-L:] == [(630, layer) for layer in range(L)]
        assert len(told) % L == 0
        # A resume goes on behind the gap, and the rule judges what there is.
        write(small.folder, [640], start=630).close()
        found = record.read(small.folder)
        assert found.steps.tolist() == [*steps, 630, 640]
        assert len(found.history(Rule()).points) == len(steps) + 2
        del found  # it maps the file


def test_a_resume_on_a_full_disk_takes_over_when_there_is_room(tmp_path: Path) -> None:
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
    size = record.record_dtype(meta()).itemsize
    assert (small.folder / "stability" / "abandoned.bin").stat().st_size == 2 * size
    assert layers_told(small.folder) == [(s, layer) for s in (10, 30) for layer in range(L)]


def test_a_new_run_on_a_full_disk(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "limit") as small:
        with small.full():
            writer = write(small.folder, [10])
        with pytest.raises(FileNotFoundError):
            record.read(small.folder)
        add(writer, 20)
        writer.close()
    assert record.read(small.folder).steps.tolist() == [20]

"""Append-only records: over full disks, torn ends, attempts and versions."""

from __future__ import annotations

import csv
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disk import KINDS, Disk, disk, room_for

from megatron_patch.runtime.files import write_whole
from megatron_patch.runtime.records import (
    AppendOnlyFile,
    DamagedError,
    StepCsv,
    append_line,
    gap,
    parse_rows,
    read_rows,
)


@pytest.fixture(params=KINDS)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "disk", request.param) as found:
        yield found


@pytest.mark.parametrize("room", [0, 1, 6, 11])
def test_a_torn_record_is_taken_back(room, tmp_path):
    logged: list[str] = []
    file = AppendOnlyFile(tmp_path / "x.log", report=logged.append)
    assert file.append(b"first line\n")
    with room_for(file.path, room):
        assert not file.append(b"second line\n")
        assert file.path.read_bytes() == b"first line\n"
        assert not file.append(b"third line is longer\n")
    assert file.append(b"fourth line\n")
    file.close()
    assert file.path.read_bytes() == b"first line\nfourth line\n"
    assert len(logged) == 2 and logged[0].startswith("x.log: cannot be written ([Errno 27]")
    assert logged[1] == "x.log: written again; records that are missing: 2"


def test_records_on_a_full_disk(small):
    """Enough of them to fill the last page of a file system, too."""
    logged: list[str] = []
    path = small.folder / "t.csv"
    table = StepCsv(path, ["value"])
    table.best_effort._report = logged.append
    binary = AppendOnlyFile(small.folder / "r.bin", size=48)
    took = {"t": [0], "r": [0]}
    assert table.append_rows({"step": 0, "value": "x"}) and binary.append(bytes([0]) * 48)
    with small.full():
        for step in range(1, 200):
            took["t"] += [step] * table.append_rows({"step": step, "value": "y" * 50})
            took["r"] += [step] * binary.append(bytes([step]) * 48)
        with path.open(newline="") as lines:
            assert [int(row["step"]) for row in csv.DictReader(lines)] == took["t"]
        binary.close()
        assert list(binary.path.read_bytes()[::48]) == took["r"]
        assert 199 not in took["t"] + took["r"]
    took["t"] += [200] * table.append_rows({"step": 200, "value": "z"})
    took["r"] += [201] * binary.append(bytes([201]) * 48)
    table.close()
    binary.close()
    with path.open(newline="") as lines:
        rows = [(int(row["step"]), len(row["value"])) for row in csv.DictReader(lines)]
    assert [step for step, _ in rows] == took["t"] and rows[-1] == (200, 1)
    assert logged[1:] == [f"t.csv: written again; records that are missing: {202 - len(rows) - 1}"]
    assert list(binary.path.read_bytes()[::48]) == took["r"] and took["r"][-1] == 201


def test_what_cannot_be_taken_back_at_once_is_when_the_file_is_opened(tmp_path, monkeypatch):
    file = AppendOnlyFile(tmp_path / "x.bin", size=4)
    assert file.append(b"aaaa")

    def fail(handle: int, length: int) -> None:
        raise OSError(errno.EIO, "the server is gone")

    with room_for(file.path, 2), monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        assert not file.append(b"bbbb") and file.path.read_bytes() == b"aaaabb"
        assert not file.append(b"cccc")
    assert file.append(b"dddd") and file.path.read_bytes() == b"aaaadddd"


def test_what_a_server_has_lost_is_not_counted_on(tmp_path):
    """It took records and kept a part of them; the error came with the next one."""
    file = AppendOnlyFile(tmp_path / "x.bin", size=4)
    assert file.append(b"aaaa") and file.append(b"bbbb")
    with room_for(file.path, 0):
        assert not file.append(b"cccc")
    os.truncate(file.path, 6)
    assert file.append(b"dddd") and file.path.read_bytes() == b"aaaadddd"


def test_an_error_at_closing_is_logged_and_not_raised(tmp_path, monkeypatch):
    logged: list[str] = []
    file = AppendOnlyFile(tmp_path / "x", report=logged.append)
    assert file.append(b"a\n")
    real = os.close

    def close(handle: int) -> None:
        real(handle)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        file.close()
    assert ["Disk quota" in logged[0], logged[1]] == [
        True, "x: not written to the end; records that are missing: 1"]  # fmt: skip


def test_a_line_that_a_kill_left_unfinished_swallows_nothing(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"one\ntw")
    file = AppendOnlyFile(path)
    assert file.append(b"three\n")
    file.close()
    assert path.read_bytes() == b"one\ntw\nthree\n"
    path.write_bytes(b"one\ntw")
    for line in ("three", "four"):
        append_line(path, line)
    assert path.read_bytes() == b"one\ntw\nthree\nfour\n"
    with room_for(path, 3), pytest.raises(OSError, match="File too large"):
        append_line(path, "five")
    append_line(path, "six")
    assert path.read_bytes().splitlines()[-2:] == [b"fiv", b"six"]


def attempt(path: Path, *steps: int, columns: tuple[str, ...] = ("value",)) -> StepCsv:
    """An attempt that writes these steps."""
    table = StepCsv(path, columns)
    for step in steps:
        assert table.append_rows({"step": step} | dict.fromkeys(columns, f"{step},{table.attempt}"))
    table.close()
    return table


def rows_of(path: Path) -> list[tuple[str, ...]]:
    return [tuple(row.values()) for row in read_rows(path)]


def test_attempts_append_and_the_newest_row_of_a_step_counts(tmp_path):
    path = tmp_path / "m.csv"
    attempt(path, 10, 20, 30, 40)
    before = path.read_bytes()
    assert before.startswith(b"step,attempt,value\r\n10,1,")
    second = attempt(path, 30)
    assert path.read_bytes().startswith(before) and second.steps == [10, 20, 30, 40]
    # Nothing of the first attempt is left behind the newest row: its 40 is another story.
    assert rows_of(path) == [("10", "1", "10,1"), ("20", "1", "20,1"), ("30", "2", "30,2")]
    # Another interval, and no row at all in between.
    attempt(path)
    third = attempt(path, 25, 50)
    assert (third.attempt, third.steps) == (3, [10, 20, 30])
    assert [row[:2] for row in rows_of(path)] == [
        ("10", "1"),
        ("20", "1"),
        ("25", "3"),
        ("50", "3"),
    ]
    assert sorted(os.listdir(tmp_path)) == ["m.csv"]


@pytest.mark.parametrize("torn", [b"4", b"40,2", b'41,1,"x\r', b"\0" * 30])
def test_a_torn_row_is_cut_off_and_never_read(torn, tmp_path):
    path = tmp_path / "m.csv"
    attempt(path, 10, 20)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [row[0] for row in rows_of(path)] == ["10", "20"]
    attempt(path, 30)
    assert path.read_bytes().startswith(whole + b"30,2,")


@pytest.mark.parametrize(("line", "steps"), [
    ("3,1,x\n", "123"),
    ("\0" * 3 + "3,1,x\n", "123"),  # lost blocks before a whole row
    ("3,1,x\0\n", "12"),
    ("3,1\n", "12"),
    ("3,1,x,y\n", "12"),
    ('3,1,"x\n', "12"),  # its quotation mark swallows no other row
    ("x,1,x\n", "12"),
    ("3.0,1,x\n", "12"),
    ("3,1," + "x" * 200_000 + "\n", "12"),  # the csv module refuses it
    ("2,2,x\n", "12"),
    ("1,2,x\n", "1"),
])  # fmt: skip
def test_which_rows_are_read(line, steps):
    found = parse_rows(["step,attempt,value\n", "1,1,a\n", "2,1,b\n", line, "3,1,torn"])
    assert "".join(row["step"] for row in found) == steps
    assert parse_rows([]) == [] and parse_rows(["time,value\n", "1,2\n"]) == []


OLD = b'step,gone,value\r\n1,g,\xff\r\n2,g\r\n3,g,"c,{""a"": 1}"\r\n4,g'


def test_a_table_of_another_version_is_continued(tmp_path):
    """One without attempts, as versions up to 40e17f9 wrote; it gets its columns once."""
    path = tmp_path / "m.csv"
    path.write_bytes(OLD)
    found = attempt(path, 3, 4, columns=("value", "new"))
    assert found.columns == ["step", "gone", "value", "attempt", "new"]
    assert (found.added, found.unknown, found.steps) == (["attempt", "new"], ["gone"], [1, 2, 3])
    content = path.read_bytes().splitlines()
    assert content[:4] == [b"step,gone,value,attempt,new", b"1,g,\xff,0,", b"2,g",
                           b'3,g,"c,{""a"": 1}",0,']  # fmt: skip
    assert [tuple(row.values())[2:] for row in read_rows(path)[1:]] == [
        ("3,1", "1", "3,1"), ("4,1", "1", "4,1")]  # fmt: skip
    before = path.read_bytes()
    again = attempt(path, 5, columns=("value", "new"))
    assert (again.added, again.attempt) == ([], 2) and path.read_bytes().startswith(before)


def test_killed_while_a_table_gets_its_columns(tmp_path, monkeypatch):
    path = tmp_path / "m.csv"
    path.write_bytes(OLD)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            StepCsv(path, ["value", "new"])
    assert path.read_bytes() == OLD.removesuffix(b"4,g")
    attempt(path, 4, columns=("value", "new"))
    assert [row["step"] for row in read_rows(path)] == ["1", "3", "4"]


def test_a_table_is_continued_when_there_is_room(tmp_path):
    """Until it has its columns no row is added."""
    path = tmp_path / "m.csv"
    path.write_bytes(b"step,value\r\n1,a\r\n")
    with room_for(path, 2):
        table = StepCsv(path, ["value"])
        assert not table.begun and not table.append_rows({"step": 2})
    assert table.append_rows({"step": 3}) and table.begun
    table.close()
    assert path.read_bytes().splitlines() == [b"step,value,attempt", b"1,a,0", b"3,,1"]


ROWS = b"1,2\n2,3\n"


@pytest.mark.parametrize("content", [
    b"step,val\xffe\n" + ROWS,
    b"%%%,,,\n" + ROWS,
    b"stepx,value\n" + ROWS,
    b"step,\n" + ROWS,
    b"step,value,value\n" + ROWS,
    b"step,val\rue\n" + ROWS,
    b"\xef\xbb\xbfstep,value\n" + ROWS,
    b"\n" + ROWS,
    ROWS,  # the line is gone
    b"1,2",
    b"step\n" + ROWS,  # fewer names than cells
])  # fmt: skip
def test_what_is_no_line_of_columns_is_refused(content, tmp_path):
    """The table is left as it is: written anew, a column would lose its name and all its values."""
    path = tmp_path / "m.csv"
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"m\.csv: (its first )?line.*move it away") as raised:
        StepCsv(path, ["value"])
    assert raised.value.exit_code == 2
    assert path.read_bytes() == content and os.listdir(tmp_path) == ["m.csv"]


@pytest.mark.parametrize("content", ["", "st", "step,attempt,value"])
def test_killed_before_the_header_was_whole(content, tmp_path):
    path = tmp_path / "m.csv"
    write_whole(path, content)
    attempt(path)
    assert path.read_text().split() == ["step,attempt,value"]


@pytest.mark.parametrize(("content", "step"), [
    (b"1,1,2\n2,1,3\n", None),
    (b"1,1,2\n2,1,3\n3,\0\0\0\n6,1,7\n", 2),
    (b"1\0,1,2\n", 0),
    (b"", None),
])  # fmt: skip
def test_zeros_in_the_middle_are_found(content, step, tmp_path):
    path = tmp_path / "m.csv"
    path.write_bytes(b"step,attempt,value\n" + content)
    assert attempt(path).zeros_after == step


def test_a_table_of_nothing_but_zeros_begins_anew(tmp_path):
    """A node that loses power in the first minute leaves one, and the run must go on."""
    path = tmp_path / "m.csv"
    path.write_bytes(bytes(5000))
    assert attempt(path, 7).zeros_after == 0
    assert [row["step"] for row in read_rows(path)] == ["7"]


@pytest.mark.parametrize(("steps", "start", "apart", "end"), [
    ([1, 2, 3, 4], 4, 1, None),
    ([1, 2, 3, 4], 3, 1, None),
    ([1, 2, 3], 7, 1, 3),
    ([10, 20, 30], 39, 1, None),  # saved between two rows
    ([10, 20, 30], 45, 1, 30),
    ([10, 20, 30, 90], 45, 1, 30),
    ([10, 20, 21], 29, 1, None),  # an evaluation between two rows
    ([10], 15, 1, None),
    ([], 5, 1, 0),
    ([], 90, 100, None),  # perhaps it never came to a row
    ([1, 2, 3], 90, 100, None),
])  # fmt: skip
def test_rows_that_were_lost_are_logged(steps, start, apart, end):
    for own in (False, True):
        line = gap("m.csv", steps, start, apart=apart, own=own)
        assert (line is not None) == (bool(end) or (own and end == 0))
        assert line is None or (f"ends at step {end}" if end else "has nothing") in line

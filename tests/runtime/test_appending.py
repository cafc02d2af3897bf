"""Records on a disk that gets full: the caller goes on, and no part of a record stays."""

from __future__ import annotations

import csv
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disk import KINDS, Disk, disk, room_for

from megatron_patch.runtime.appending import Appended, Table, append_line


@pytest.fixture(params=KINDS)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "disk", request.param) as found:
        yield found


@pytest.mark.parametrize("room", [0, 1, 6, 11])
def test_a_torn_record_is_taken_back(room: int, tmp_path: Path) -> None:
    told: list[str] = []
    file = Appended(tmp_path / "x.log", tell=told.append)
    assert file.append(b"first line\n")
    with room_for(file.path, room):
        assert not file.append(b"second line\n")
        assert file.path.read_bytes() == b"first line\n"
        assert not file.append(b"third line is longer\n")
    assert file.append(b"fourth line\n")
    file.close()
    assert file.path.read_bytes() == b"first line\nfourth line\n"
    assert len(told) == 2 and told[0].startswith("x.log: cannot be written ([Errno 27]")
    assert told[1] == "x.log: written again; records that are missing: 2"


def test_records_on_a_full_disk(small: Disk) -> None:
    """Enough of them to fill the last page of a file system, too."""
    told: list[str] = []
    path = small.folder / "t.csv"
    table = Table(path, ["step", "value"], start_step=0)
    table.spared._tell = told.append
    binary = Appended(small.folder / "r.bin", lines=False, size=48)
    took = {"t": [0], "r": [0]}
    assert table.rows([[0, "x"]]) and binary.append(bytes([0]) * 48)
    with small.full():
        for step in range(1, 200):
            took["t"] += [step] * table.rows([[step, "y" * 50]])
            took["r"] += [step] * binary.append(bytes([step]) * 48)
        with path.open(newline="") as lines:
            assert [int(row["step"]) for row in csv.DictReader(lines)] == took["t"]
        binary.close()
        assert list(binary.path.read_bytes()[::48]) == took["r"]
        assert 199 not in took["t"] + took["r"]
    took["t"] += [200] * table.rows([[200, "z"]])
    took["r"] += [201] * binary.append(bytes([201]) * 48)
    table.close()
    binary.close()
    with path.open(newline="") as lines:
        rows = [(int(row["step"]), len(row["value"])) for row in csv.DictReader(lines)]
    assert [step for step, _ in rows] == took["t"] and rows[-1] == (200, 1)
    assert told[1:] == [f"t.csv: written again; records that are missing: {202 - len(rows) - 1}"]
    assert list(binary.path.read_bytes()[::48]) == took["r"] and took["r"][-1] == 201


def test_what_cannot_be_taken_back_at_once_is_when_the_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Appended(tmp_path / "x.bin", lines=False, size=4)
    assert file.append(b"aaaa")

    def fail(handle: int, length: int) -> None:
        raise OSError(errno.EIO, "the server is gone")

    with room_for(file.path, 2), monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        assert not file.append(b"bbbb") and file.path.read_bytes() == b"aaaabb"
        assert not file.append(b"cccc")
    assert file.append(b"dddd") and file.path.read_bytes() == b"aaaadddd"


def test_what_a_server_has_lost_is_not_counted_on(tmp_path: Path) -> None:
    """It took records and kept a part of them; the error came with the next one."""
    file = Appended(tmp_path / "x.bin", lines=False, size=4)
    assert file.append(b"aaaa") and file.append(b"bbbb")
    with room_for(file.path, 0):
        assert not file.append(b"cccc")
    os.truncate(file.path, 6)
    assert file.append(b"dddd") and file.path.read_bytes() == b"aaaadddd"


def test_an_error_at_closing_is_told_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    file = Appended(tmp_path / "x", tell=told.append)
    assert file.append(b"a\n")
    real = os.close

    def close(handle: int) -> None:
        real(handle)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        file.close()
    assert ["Disk quota" in told[0], told[1]] == [
        True, "x: not written to the end; records that are missing: 1"]  # fmt: skip


def test_a_line_that_a_kill_left_unfinished_swallows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one\ntw")
    file = Appended(path)
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


def test_a_table_is_taken_over_when_there_is_room(tmp_path: Path) -> None:
    """Rows of steps that are repeated go aside first: until they can, none is added."""
    path, aside = tmp_path / "m.csv", tmp_path / "m.abandoned.csv"
    path.write_bytes(b"step,value\r\n" + b"".join(b"%d,%d\r\n" % (n, n) for n in range(1, 30)))
    aside.write_bytes(b"step,value\r\n9,old\r\n")
    whole = path.read_bytes()
    with room_for(aside, 7):
        table = Table(path, ["step", "value"], start_step=5, aside=aside)
        assert not table.begun and not table.rows([[6, "x"]])
        assert path.read_bytes() == whole and aside.read_bytes().endswith(b"9,old\r\n")
    assert table.rows([[7, "x"]]) and table.begun
    table.close()
    assert path.read_bytes().splitlines()[-2:] == [b"5,5", b"7,x"]
    assert [line.split(b",")[0] for line in aside.read_bytes().splitlines()[1:]] == [
        b"9", *(b"%d" % n for n in range(6, 30))]  # fmt: skip

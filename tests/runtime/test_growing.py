"""Files that only grow, cut back at a resume: to the byte, from the end, and nothing is lost."""

from __future__ import annotations

import csv
import os
import tracemalloc
from pathlib import Path

import pytest

from megatron_patch.runtime import growing
from megatron_patch.runtime.growing import DamagedError, cut, end_of_last, resume_table

COLUMNS = ["step", "value"]


def table(path: Path, steps: range, *, torn: bytes = b"") -> None:
    lines = [f'{step},"{step}, {{""a"": {step / 7}}}"\r\n' for step in steps]
    path.write_bytes(("step,value\r\n" + "".join(lines)).encode() + torn)


def steps_of(path: Path) -> list[str]:
    with path.open(newline="") as lines:
        return [row["step"] for row in csv.DictReader(lines)]


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
def test_the_last_wanted_line_is_found_from_the_end(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "BLOCK", block)
    file = tmp_path / "x"
    content = b"a1\n\nb22\r\na3\nb\nlast a without its end"
    file.write_bytes(content)
    for wanted, line in (
        (b"a", b"a3\n"),
        (b"b", b"\nb\n"),
        (b"a1", b"a1\n"),
        (b"b22\r", b"b22\r\n"),
    ):
        at = end_of_last(file, lambda found, wanted=wanted: found.startswith(wanted))
        assert content[:at].endswith(line)
    assert end_of_last(file, lambda found: found.startswith(b"last")) == 0
    file.write_bytes(b"")
    assert end_of_last(file, lambda found: True) == 0


@pytest.mark.parametrize("block", [3, 50, 1 << 20])
@pytest.mark.parametrize("torn", [b"", b"4", b"40,2", b'41,"x\r'])
def test_a_table_is_cut_after_the_step(
    block: int, torn: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "BLOCK", block)
    path, aside = tmp_path / "m.csv", tmp_path / "m.abandoned.csv"
    for last, dropped in ((40, 0), (37, 3), (0, 40), (12, 28)):
        table(path, range(1, 41), torn=torn)
        whole = path.read_bytes()
        aside.unlink(missing_ok=True)
        assert resume_table(path, COLUMNS, start_step=last, aside=aside) == dropped + bool(torn)
        kept = path.read_bytes()
        assert whole.startswith(kept) and steps_of(path) == [str(s) for s in range(1, last + 1)]
        if dropped or torn:
            moved = aside.read_bytes()
            assert moved.startswith(b"step,value\r\n" + whole[len(kept) :]) and moved[-1:] == b"\n"
        else:
            assert not aside.exists()


def test_rows_that_are_cut_off_twice_stand_one_after_the_other(tmp_path: Path) -> None:
    path, aside = tmp_path / "m.csv", tmp_path / "m.abandoned.csv"
    for torn in (b"9", b""):
        table(path, range(1, 9), torn=torn)
        resume_table(path, COLUMNS, start_step=6, aside=aside)
    assert steps_of(aside) == ["7", "8", "9", "7", "8"]
    table(path, range(1, 3))
    assert resume_table(path, COLUMNS, start_step=1, aside=None) == 1 and steps_of(path) == ["1"]


def test_names_of_columns_that_cannot_be_read(tmp_path: Path) -> None:
    """The table is left as it is: written anew, a column would lose its name and all its values."""
    path = tmp_path / "m.csv"
    path.write_bytes(b"step,val\xffe\n1,2\n")
    with pytest.raises(DamagedError, match=r"m\.csv: its first line") as raised:
        resume_table(path, COLUMNS, start_step=1, aside=None)
    assert raised.value.exit_code == 2 and path.read_bytes() == b"step,val\xffe\n1,2\n"


def test_other_columns(tmp_path: Path) -> None:
    """An earlier version's rows get the columns of this one; what was cut off keeps its own."""
    path, aside = tmp_path / "m.csv", tmp_path / "m.abandoned.csv"
    aside.write_text("step,value\n5,old\n")
    path.write_text("step,gone,value\n1,g,a\n2,g,b\n3,g,c\n4,g")
    assert resume_table(path, ["step", "value", "new"], start_step=2, aside=aside) == 2
    assert path.read_text().split() == ["step,value,new", "1,a,", "2,b,"]
    assert aside.read_text() == "step,value\n5,old\n"
    assert (tmp_path / "m.abandoned.2.csv").read_text() == "step,gone,value\n3,g,c\n4,g\n"


@pytest.mark.parametrize("content", ["", "st", "step,value"])
def test_killed_before_the_header_was_whole(content: str, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text(content)
    resume_table(path, COLUMNS, start_step=0, aside=tmp_path / "aside.csv")
    assert path.read_text().split() == ["step,value"] and os.listdir(tmp_path) == ["m.csv"]


def test_a_crash_between_keeping_and_cutting_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, aside = tmp_path / "x.bin", tmp_path / "aside.bin"
    path.write_bytes(b"0123456789")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cut(path, 4, aside)
    assert path.read_bytes() == b"0123456789"
    cut(path, 4, aside)
    assert path.read_bytes() == b"0123" and aside.read_bytes().endswith(b"456789")
    cut(path, 4, aside)  # nothing follows
    cut(path, 9, aside)
    assert path.read_bytes() == b"0123"


def test_what_stays_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "BLOCK", 1 << 16)
    path = tmp_path / "m.csv"
    table(path, range(1, 200_001))
    assert path.stat().st_size > 6_000_000
    tracemalloc.start()
    assert resume_table(path, COLUMNS, start_step=199_900, aside=tmp_path / "aside.csv") == 100
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000

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
        found = resume_table(path, COLUMNS, start_step=last, aside=aside)
        assert found.dropped == dropped + bool(torn) and found.columns == COLUMNS
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
    assert resume_table(path, COLUMNS, start_step=1, aside=None).dropped == 1
    assert steps_of(path) == ["1"]


ROWS = b"1,2\n2,3\n"


@pytest.mark.parametrize(
    "content",
    [
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
    ],
)
def test_what_is_no_line_of_columns_is_refused(content: bytes, tmp_path: Path) -> None:
    """The table is left as it is: written anew, a column would lose its name and all its values."""
    path = tmp_path / "m.csv"
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"m\.csv: (its first )?line.*move it away") as raised:
        resume_table(path, COLUMNS, start_step=2, aside=tmp_path / "aside.csv")
    assert raised.value.exit_code == 2
    assert path.read_bytes() == content and os.listdir(tmp_path) == ["m.csv"]


def test_other_columns(tmp_path: Path) -> None:
    """Another version's rows get the columns of this one and lose none; what was cut off too."""
    path, aside = tmp_path / "m.csv", tmp_path / "m.abandoned.csv"
    aside.write_text("step,value\n5,old\n")
    path.write_bytes(b"step,gone,value\n1,g,\xff\n2,g\n3,g,c\n4,g")
    found = resume_table(path, ["step", "value", "new"], start_step=2, aside=aside)
    assert found.dropped == 2 and found.columns == ["step", "gone", "value", "new"]
    assert path.read_bytes().split() == [b"step,gone,value,new", b"1,g,\xff,", b"2,g,,"]
    assert aside.read_text() == "step,value\n5,old\n"
    assert (tmp_path / "m.abandoned.2.csv").read_text() == "step,gone,value\n3,g,c\n4,g\n"
    note = found.note("m.csv", 2)
    assert note is not None and note.startswith("warning: m.csv gets the columns new, empty up to")
    assert "does not know gone: kept" in note
    before = path.read_bytes()
    again = resume_table(path, COLUMNS, start_step=2, aside=aside)
    assert again.columns == found.columns and again.note("m.csv", 2) is None
    assert path.read_bytes() == before


@pytest.mark.parametrize("block", [7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "step"),
    [
        (b"step,value\n1,2\n2,3\n", None),
        (b"step,value\n1,2\n2,3\n3,\0\0\0\n6,7\n", 2),
        (b"step,value\n1\0,2\n", 0),
        (b"", None),
    ],
)
def test_zeros_in_the_middle_are_found(
    block: int, content: bytes, step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "BLOCK", block)
    path = tmp_path / "m.csv"
    path.write_bytes(content)
    assert growing.zeros_after(path) == step


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
    assert (
        resume_table(path, COLUMNS, start_step=199_900, aside=tmp_path / "aside.csv").dropped == 100
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000

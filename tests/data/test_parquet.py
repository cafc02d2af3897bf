"""Parquet inputs: a named column of text, read in pieces, or a refusal that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import documents, lines, make, options, texts_of

from megatron_patch.data import parquet
from megatron_patch.data.errors import DataError
from megatron_patch.data.prepare import prepare

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
TEXTS = ["one", "zwei äöü", "漢字 🙂", "line\nbreak", "\ufeffmark"]


def write(path: Path, values: Any, kind: Any = None, *, name: str = "text", **how: Any) -> Path:
    """A table of the column and another one beside it."""
    column = values if isinstance(values, pa.Array) else pa.array(values, kind or pa.string())
    table = pa.table([column, pa.array(range(len(column)))], names=[name, "id"])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **how)
    return path


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (pa.string(), {}),
        (pa.large_string(), {}),
        (pa.string_view(), {}),
        (pa.dictionary(pa.int32(), pa.string()), {}),
        (pa.dictionary(pa.int8(), pa.large_string()), {}),
        (pa.string(), {"row_group_size": 2}),
        (pa.string(), {"use_dictionary": False, "compression": "none"}),
        (pa.string(), {"compression": "zstd", "data_page_version": "2.0"}),
        (pa.string(), {"compression": "gzip", "data_page_size": 1, "write_page_checksum": True}),
        (pa.string(), {"store_schema": False, "use_byte_stream_split": False}),
    ],
)
def test_the_same_documents_as_json_lines(tmp_path, kind, how):
    path = write(tmp_path / "c" / "part-0.parquet", pa.array(TEXTS).cast(kind), **how)
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    made = make(tmp_path / "p", path.parent)
    ours = make(tmp_path / "j", tmp_path / "a.jsonl")
    assert texts_of(tmp_path / "p") == TEXTS
    assert (made.bin, made.idx) == (ours.bin, ours.idx)


@pytest.mark.parametrize("name", ["part-00000", "a.snappy", "A.PARQUET", "b.txt"])
def test_by_any_name(tmp_path, name):
    make(tmp_path / "out", write(tmp_path / name, TEXTS))
    assert texts_of(tmp_path / "out") == TEXTS


@pytest.mark.parametrize("name", ["body", "a.b", "text.text", "тело", "with space"])
def test_the_column_has_a_name(tmp_path, name):
    path = write(tmp_path / "a.parquet", TEXTS, name=name)
    make(tmp_path / "out", path, json_key=name)
    assert texts_of(tmp_path / "out") == TEXTS


@pytest.mark.parametrize("values", [["a", None, "b", "", " ", None], [None] * 3 + ["a", "b"]])
def test_nulls_are_empty_documents(tmp_path, values):
    made = make(tmp_path / "out", write(tmp_path / "a.parquet", values))
    assert texts_of(tmp_path / "out") == ["a", "b"]
    assert made.sources[0].skipped == len(values) - 2 and made.sources[0].invalid == 0


def test_a_column_of_nulls_and_a_table_without_rows(tmp_path):
    write(tmp_path / "c" / "a.parquet", [None, None], pa.null())
    write(tmp_path / "c" / "b.parquet", [])
    write(tmp_path / "c" / "c.parquet", ["one"])
    made = make(tmp_path / "out", tmp_path / "c")
    assert texts_of(tmp_path / "out") == ["one"]
    assert (made.sources[0].files, made.sources[0].skipped) == (3, 2)


@pytest.mark.parametrize(
    ("values", "kind", "reason"),
    [
        ([1, 2], pa.int64(), "column 'text' is int64, and text is a string column"),
        ([["a"]], pa.list_(pa.string()), "is list<"),
        ([{"text": "a"}], pa.struct([("text", pa.string())]), "is struct<text: string>"),
        ([b"a"], pa.binary(), "is binary"),
        ([[("a", "b")]], pa.map_(pa.string(), pa.string()), "is map<"),
        (pa.array([1, 1]).dictionary_encode(), None, "column 'text' is "),
        ([True], pa.bool_(), "is bool"),
    ],
)
def test_columns_that_are_no_text(tmp_path, values, kind, reason):
    path = write(tmp_path / "a.parquet", values, kind)
    for skip in (False, True):
        with pytest.raises(DataError) as caught:
            make(tmp_path / "out", path, skip_unknown=skip)
        assert reason in str(caught.value) and "--json-key" in str(caught.value)
    assert list(tmp_path.iterdir()) == [path], "refused before any work"


def test_missing_and_doubled_columns(tmp_path):
    path = write(tmp_path / "a.parquet", TEXTS, name="content")
    with pytest.raises(DataError, match=r"no column is named 'text'.*it has content, id"):
        make(tmp_path / "out", path)
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(DataError, match="2 columns are named 'text'"):
        make(tmp_path / "out", path)
    nested = pa.array([{"text": "a"}])
    pq.write_table(pa.table([nested], names=["doc"]), path)
    with pytest.raises(DataError, match=r"no column is named 'doc\.text'"):
        make(tmp_path / "out", path, json_key="doc.text")


@pytest.mark.parametrize("where", ["footer", "end", "half", "magic", "pages"])
def test_damage(tmp_path, where):
    path = write(
        tmp_path / "a.parquet", [f"text {i}" for i in range(5000)], compression="snappy",
        use_dictionary=False, write_page_checksum=True,
    )  # fmt: skip
    data = bytearray(path.read_bytes())
    if where == "footer":
        data[-12:-8] = b"\xff\xff\xff\x7f"
        data[-200:-100] = bytes(100)
    elif where == "end":
        del data[-3:]
    elif where == "half":
        del data[len(data) // 2 :]
    elif where == "magic":
        data[:4] = b"\0\0\0\0"
    else:
        data[2000:2010] = bytes(10)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet: (the parquet data is damaged|its name says)"):
        make(tmp_path / "out", path, skip_unknown=True)


@pytest.mark.parametrize("mode", ["error", "skip", "replace"])
def test_what_is_not_utf8_in_a_string_column(tmp_path, mode):
    """Writers do not check; the file says string and holds Latin-1."""
    raw = pa.array([b"good", b"caf\xe9", b"end"], pa.binary())
    column = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    given = options(tmp_path / "out", write(tmp_path / "a.parquet", column), invalid_text=mode)
    if mode == "error":
        with pytest.raises(DataError, match=r"a\.parquet, row 2: not UTF-8.*skip leaves such rows"):
            prepare(given)
        return
    (source,) = prepare(given).sources
    wanted = ["good", "end"] if mode == "skip" else ["good", "caf\ufffd", "end"]
    assert texts_of(tmp_path / "out") == wanted
    assert (source.invalid, source.replaced) == ((1, 0) if mode == "skip" else (0, 1))


def test_memory_is_bounded_by_batches_not_by_row_groups(tmp_path):
    path = write(
        tmp_path / "a.parquet", [f"{i:06d}" * 1000 for i in range(8000)], use_dictionary=False,
        compression="none",
    )  # fmt: skip
    assert path.stat().st_size > 45_000_000 and pq.ParquetFile(path).num_row_groups == 1
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    for number, (row, _) in enumerate(parquet.rows(path, "text")):
        assert row[:6] == b"%06d" % number
        most = max(most, pool.bytes_allocated() - before)
    assert number == 7999 and most < 20_000_000


def test_row_groups_and_workers_change_nothing(tmp_path):
    """Batches are cut by the size of the documents."""
    texts = documents(100, seed=3)
    for name, group in (("a", 7), ("b", 100)):
        write(tmp_path / name / "x.parquet", texts, row_group_size=group)
    one = make(tmp_path / "one", tmp_path / "a" / "x.parquet", batch_bytes=300)
    two = make(tmp_path / "two", tmp_path / "b" / "x.parquet", workers=2, batch_bytes=900)
    assert one.bin.sha256 == two.bin.sha256


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.none() | st.text(max_size=20), max_size=30),
    group=st.integers(1, 40),
    dictionary=st.booleans(),
)
def test_every_row_is_a_document_or_counted(
    tmp_path_factory: pytest.TempPathFactory, values: list, group: int,
    dictionary: bool,
) -> None:  # fmt: skip
    base = tmp_path_factory.mktemp("rows")
    path = write(base / "a.parquet", values, row_group_size=group, use_dictionary=dictionary)
    rows = [row.decode() for row, _ in parquet.rows(path, "text")]
    assert rows == [value or "" for value in values]
    kept = [value for value in values if value and value.strip()]
    if kept:
        made = make(base / "out", path)
        assert texts_of(base / "out") == kept
        assert made.sources[0].skipped == len(values) - len(kept)

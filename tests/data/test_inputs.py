"""What the inputs of prepare-data name: nothing is left out silently, nothing is read by name."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import os
import socket
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from prepared import documents, lines, make, texts_of

from megatron_patch.data.errors import DataError
from megatron_patch.data.manifest import read_manifest

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}
LATIN = "Voilà déjà l'été, café où çà".encode("latin-1")


def refusal(tmp_path: Path, *inputs: Path, **changes: object) -> str:
    with pytest.raises(DataError) as caught:
        make(tmp_path / "refused", *inputs, **changes)
    assert not list(tmp_path.glob("refused*")), "refused before any work"
    return str(caught.value)


def corpus_of_the_report(tmp_path: Path) -> Path:
    """A linked folder, a dangling link, B.JSONL, part-00000, .xz: 15 documents."""
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    corpus.mkdir()
    elsewhere.mkdir()
    texts = [f"document {i}" for i in range(15)]
    (corpus / "a.jsonl").write_bytes(lines(texts[:3]))
    (corpus / "B.JSONL").write_bytes(lines(texts[3:6]))
    (corpus / "part-00000").write_bytes(lines(texts[6:9]))
    (corpus / "d.jsonl.xz").write_bytes(lzma.compress(lines(texts[9:12])))
    (elsewhere / "e.ndjson").write_bytes(lines(texts[12:15]))
    (corpus / "linked").symlink_to(elsewhere)
    (corpus / "nowhere").symlink_to(tmp_path / "gone")
    return corpus


def test_three_of_fifteen_documents(tmp_path):
    """The case of the report: all fifteen are read, and the link to nothing is named."""
    corpus = corpus_of_the_report(tmp_path)
    text = refusal(tmp_path, corpus)
    assert "corpus/nowhere: a link to nothing" in text and "--skip-unknown (1 in all" in text
    made = make(tmp_path / "out", corpus, skip_unknown=True)
    assert sorted(texts_of(tmp_path / "out")) == sorted(f"document {i}" for i in range(15))
    assert made.sources[0].left_out_entries == ["nowhere: a link to nothing"]
    assert read_manifest(tmp_path / "out") == made


def test_what_is_left_out_is_told_counted_and_bounded(tmp_path, capsys):
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "a.txt").write_text("a document")
    for i in range(150):
        (corpus / "deep" / f"{i:03d}.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    text = refusal(tmp_path, corpus)
    assert text.count(".pdf: a PDF document") == 100 and "and 50 more" in text
    assert "(150 in all" in text
    made = make(tmp_path / "out", corpus, skip_unknown=True, quiet=False)
    seen = capsys.readouterr()
    assert "corpus: 150 entries left out" in seen.err and "and 130 more" in seen.err
    assert "deep/000.pdf: a PDF document" in seen.err
    assert "entries of the inputs not read: 150" in seen.out
    assert made.sources[0].left_out == 150 and len(made.sources[0].left_out_entries) == 100
    assert str(tmp_path) not in (tmp_path / "out.manifest.json").read_text()


def test_the_manifest_of_plain_inputs_is_as_it_always_was(tmp_path):
    """What later versions count is written where it says something: old manifests stay valid."""
    (tmp_path / "a.txt").write_text("text")
    make(tmp_path / "out", tmp_path / "a.txt")
    (source,) = json.loads((tmp_path / "out.manifest.json").read_text())["sources"]
    assert set(source) == {"name", "files", "bytes", "documents", "tokens", "skipped"}
    assert read_manifest(tmp_path / "out").sources[0].left_out_entries == []


def a_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "text")


UNKNOWN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "pdf": ("a.txt", lambda p: p.write_bytes(b"%PDF-1.4\n"), "a PDF document"),
    "zip": ("a.jsonl", a_zip, "a zip archive"),
    "tar": ("a.tar", lambda p: p.write_bytes(bytes(257) + b"ustar\0" + bytes(400)), "a tar"),
    "numpy": ("a.npy", lambda p: np.save(p, np.arange(9)), "a NumPy array"),
    "binary": ("a.bin", lambda p: p.write_bytes(bytes(range(256)) * 4), "binary data"),
    "ids": ("ids", lambda p: p.write_bytes(np.arange(999, dtype="<u2").tobytes()), "uint16"),
    "zeros": ("a.txt", lambda p: p.write_bytes(bytes(4096)), "nothing but NUL"),
    "empty": ("a.txt", lambda p: p.touch(), "a.txt: empty"),
    "empty gz": ("a.txt.gz", lambda p: p.write_bytes(gzip.compress(b"")), "empty, when decom"),
    "hidden": (".a.txt", lambda p: p.write_text("text"), ".a.txt: hidden"),
    "spark": ("_SUCCESS", lambda p: p.touch(), "_SUCCESS: hidden"),
    "finder": (".DS_Store", lambda p: p.write_bytes(b"\0\0\0\1Bud1"), ".DS_Store: hidden"),
    "hidden folder": (".git", lambda p: p.mkdir(), ".git: a hidden folder"),
    "pipe": ("a.jsonl", os.mkfifo, "a pipe"),
    "link to itself": ("a.txt", lambda p: p.symlink_to(p), "Too many levels"),
    "twice": ("a.gz", lambda p: p.write_bytes(gzip.compress(gzip.compress(b"x"))), "twice"),
    "tar.gz": (
        "a.tgz",
        lambda p: p.write_bytes(gzip.compress(bytes(257) + b"ustar\0" + bytes(400))),
        "a tar archive",
    ),
    "lfs": (
        "a.jsonl",
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "git lfs pull",
    ),
    "pretty": ("a.json", lambda p: p.write_text(json.dumps([{"text": "x"}], indent=1)), "jq"),
    "one array": ("part-0", lambda p: p.write_text('[{"text": "x"},\n {"text": "y"}]'), "jq"),
    "table": ("a.csv", lambda p: p.write_text("id,text\n1,x\n"), "a table by its name"),
    "named text": ("a.txt", lambda p: p.write_bytes(lines(["x"])), "say --format jsonl"),
    "named lines": ("a.jsonl", lambda p: p.write_text("plain text"), "not JSON lines"),
    "records": ("part-0", lambda p: p.write_text("{'text': 'x'}\n{'text': 'y'}\n"), "like JSON"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_holds_no_documents_is_refused_or_left_out(tmp_path, kind):
    name, create, reason = UNKNOWN[kind]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "good.md").write_text("a good document")
    create(tmp_path / "c" / name)
    assert reason in refusal(tmp_path, tmp_path / "c")
    made = make(tmp_path / "out", tmp_path / "c", skip_unknown=True)
    assert texts_of(tmp_path / "out") == ["a good document"]
    assert made.sources[0].left_out == 1
    assert made.sources[0].left_out_entries[0].startswith(name)


def test_unreadable_entries_and_sockets(tmp_path, monkeypatch):
    """Without root's rights, that is."""
    corpus = tmp_path / "c"
    (corpus / "closed").mkdir(parents=True)
    for name in ("a.txt", "secret.txt"):
        (corpus / name).write_text(name)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "secret.txt")
    listdir = os.listdir

    def refusing(path: Path) -> list[str]:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    with socket.socket(socket.AF_UNIX) as end, contextlib.chdir(corpus):
        end.bind("sock")
        text = refusal(tmp_path, corpus)
    for reason in ("closed: cannot be read", "secret.txt: cannot be read", "sock: a socket"):
        assert reason in text
    made = make(tmp_path / "out", corpus, skip_unknown=True)
    assert texts_of(tmp_path / "out") == ["a.txt"] and made.sources[0].left_out == 3


def test_a_file_system_that_does_not_answer_is_not_skipped(tmp_path, monkeypatch):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.txt").write_text("a")

    def stale(path: Path) -> list[str]:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "listdir", stale)
    with pytest.raises(DataError, match=r"Stale file handle.*try again") as caught:
        make(tmp_path / "out", tmp_path / "c", skip_unknown=True)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["part-00000", "A.JSONL", "x.json", "x.log", "x", "x.jsonl.1"])
@pytest.mark.parametrize("packing", ["", "gz", "xz"])
def test_json_lines_by_any_name(tmp_path, name, packing):
    path = tmp_path / "c" / name
    path.parent.mkdir()
    path.write_bytes(PACK[packing](lines(["one", "two"])) if packing else lines(["one", "two"]))
    for source in (path, path.parent):
        make(tmp_path / source.name / "out" / "o", source)
        assert texts_of(tmp_path / source.name / "out" / "o") == ["one", "two"]


@pytest.mark.parametrize(
    "head",
    ["\ufeff", "\n \n", '{"id": 1, "text": "' + "long " * 20_000 + '"}\n', "// a comment\n{}\n"],
    ids=["bom", "blank lines", "a line longer than the head", "a comment"],
)
def test_json_lines_are_recognised_behind_anything(tmp_path, head):
    (tmp_path / "part-0").write_bytes(head.encode() + lines(["one", "two", "three"]))
    if head.startswith("//"):
        with pytest.raises(DataError, match="line 1: not JSON"):
            make(tmp_path / "out", tmp_path / "part-0")
    else:
        make(tmp_path / "out", tmp_path / "part-0")
        assert texts_of(tmp_path / "out")[-3:] == ["one", "two", "three"]


@pytest.mark.parametrize(
    "text",
    [
        "{\\bf bold} is no record",
        "[1] a reference\n[2] another",
        '"Quoted," she said.\n"Yes."',
        "BZh9 is text here",
        "PAR is text",
        "123\n456",
        "a\0b",
        "Обычный текст",
        "漢" * 40_000,
    ],
)
def test_text_is_text_by_any_name(tmp_path, text):
    (tmp_path / "LICENSE").write_text(text, encoding="utf-8")
    make(tmp_path / "out", tmp_path / "LICENSE")
    assert texts_of(tmp_path / "out") == [text]


def test_format_text_keeps_records_and_tables(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.jsonl").write_text('{"text": "x"}')
    (tmp_path / "c" / "b.csv").write_text("id,text")
    make(tmp_path / "out", tmp_path / "c", format="text")
    assert texts_of(tmp_path / "out") == ['{"text": "x"}', "id,text"]


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL.{}", "part-0.{}", "a.gz", "part-00000"])
def test_compression_by_content(tmp_path, packing, name):
    """Frames one behind the other, and padding where the format has it."""
    texts = [f"text {i}" for i in range(9)]
    data = b"".join(PACK[packing](lines(part)) for part in (texts[:4], texts[4:]))
    path = tmp_path / name.format(packing.upper())
    path.write_bytes(data + bytes(8) * (packing == "xz"))
    make(tmp_path / "out", path)
    assert texts_of(tmp_path / "out") == texts


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("damage", ["cut", "cut early", "second cut", "flipped", "garbage"])
def test_damage_is_never_a_shorter_corpus(tmp_path, packing, damage):
    whole = PACK[packing](lines([os.urandom(20).hex() for _ in range(5000)]))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    data = {
        "cut": whole[:-20],
        "cut early": whole[:30],
        "second cut": whole + whole[:5],
        "flipped": bytes(flipped),
        "garbage": whole + b"garbage behind it",
    }[damage]
    (tmp_path / "a.jsonl").write_bytes(data)
    # A flipped byte of zstd without a checksum is found by what it decompresses to.
    reason = "damaged or cut off|not JSON|not UTF-8" if damage == "flipped" else "damaged or cut"
    if packing == "zst" and damage == "flipped":
        data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(lines(["x"] * 99)))
        data[-1] ^= 0xFF
        (tmp_path / "a.jsonl").write_bytes(data)
    for skip in (False, True):
        with pytest.raises(DataError, match=reason):
            make(tmp_path / f"out{skip}", tmp_path / "a.jsonl", skip_unknown=skip)


@pytest.mark.parametrize("packing", ["xz", "bz2"])
def test_what_decompresses_a_thousandfold_is_read_in_pieces(tmp_path, packing):
    from megatron_patch.data import compression

    (tmp_path / "a").write_bytes(PACK[packing](bytes(1 << 25)))
    with (tmp_path / "a").open("rb") as raw:
        sizes = [len(piece) for piece in compression._pieces(raw, packing)]
    assert sum(sizes) == 1 << 25 and max(sizes) <= 1 << 20


@pytest.mark.parametrize("claim", [".gz", ".ZST", ".xz", ".bz2", ".parquet"])
def test_a_name_that_promises_what_is_not_there(tmp_path, claim):
    (tmp_path / f"a.jsonl{claim}").write_bytes(lines(["text"]))
    text = refusal(tmp_path, tmp_path / f"a.jsonl{claim}", skip_unknown=True)
    assert "its name says" in text and "does not begin like it" in text


def test_differences_of_name_and_content_are_told(tmp_path, capsys):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.jsonl").write_bytes(lzma.compress(lines(["one"])))
    (tmp_path / "c" / "part-0").write_bytes(lines(["two"]))
    (tmp_path / "c" / "t.txt").write_text("three")
    make(tmp_path / "out", tmp_path / "c", quiet=False)
    seen = capsys.readouterr().err
    assert "c: 3 files (1 JSONL xz, 1 JSONL, 1 text)" in seen
    assert "a.jsonl: it is xz data, whatever its name says" in seen
    assert "part-0: its lines are JSON records" in seen and "t.txt" not in seen


def test_many_inputs_make_few_lines(tmp_path, capsys):
    """As a shell names them: the files of a pattern one by one."""
    files = [tmp_path / f"{i:03d}" for i in range(60)]
    for i, path in enumerate(files):
        path.write_bytes(b"%PDF-" if i % 2 else lines([f"text {i}"]))
    make(tmp_path / "out", *files, quiet=False, skip_unknown=True)
    seen = capsys.readouterr().err.splitlines()
    assert seen[0] == "60 inputs: 30 files (30 JSONL)" and "  and 10 more" in seen
    assert "60 inputs: 30 entries left out" in seen and "  001: a PDF document" in seen
    assert len(seen) == 44


class TestReachedTwice:
    """Linked folders are followed once, and what is reached twice is read once and told."""

    def tree(self, tmp_path: Path) -> Path:
        corpus = tmp_path / "c"
        (corpus / "a" / "deep").mkdir(parents=True)
        (corpus / "a" / "one.txt").write_text("one")
        (corpus / "a" / "deep" / "two.txt").write_text("two")
        return corpus

    @pytest.mark.parametrize(
        ("link", "target", "told"),
        [
            ("a/loop", "..", "a/loop: the same as the whole input, read once"),
            ("a/deep/loop", "../../a", "a/deep/loop: the same as a, read once"),
            ("b", "a", "b: the same as a, read once"),
            ("z.txt", "a/one.txt", "z.txt: the same as a/one.txt, read once"),
            ("a/deep/self", ".", "a/deep/self: the same as a/deep, read once"),
        ],
    )
    def test_links(self, tmp_path, link, target, told):
        corpus = self.tree(tmp_path)
        (corpus / link).symlink_to(target)
        made = make(tmp_path / "out", corpus)
        assert texts_of(tmp_path / "out") == ["two", "one"]
        assert made.sources[0].left_out_entries == [told]

    def test_hard_links(self, tmp_path):
        corpus = self.tree(tmp_path)
        os.link(corpus / "a" / "one.txt", corpus / "b.txt")
        made = make(tmp_path / "out", corpus)
        assert texts_of(tmp_path / "out") == ["two", "one"]
        assert made.sources[0].left_out_entries == ["b.txt: the same as a/one.txt, read once"]

    def test_an_input_that_adds_nothing_is_refused(self, tmp_path):
        corpus = self.tree(tmp_path)
        for second in (corpus, corpus / "a", corpus / "a" / "one.txt", corpus / "*" / "*.txt"):
            text = refusal(tmp_path, corpus, second)
            assert f"{second}: all of it is read already" in text
        made = make(tmp_path / "out", corpus / "a" / "deep", corpus)
        assert texts_of(tmp_path / "out") == ["two", "one"]
        assert [(s.files, s.left_out) for s in made.sources] == [(1, 0), (1, 1)]

    def test_globs(self, tmp_path):
        """A glob takes folders as the shell would, and ** names each file once."""
        corpus = self.tree(tmp_path)
        for number, pattern in enumerate(("*", "**", "**/*.txt")):
            made = make(tmp_path / f"out{number}", corpus / pattern)
            assert sorted(texts_of(tmp_path / f"out{number}")) == ["one", "two"]
            assert made.sources[0].left_out == 0
        (corpus / "loop").symlink_to(".")
        (corpus / "z").symlink_to("a")
        for pattern in ("**", "**/*.txt"):
            made = make(tmp_path / f"loop{len(pattern)}", corpus / pattern)
            assert sorted(texts_of(tmp_path / f"loop{len(pattern)}")) == ["one", "two"]
            said = " ".join(made.sources[0].left_out_entries)
            assert "loop" in said and "the same as" in said
            assert made.sources[0].left_out < 5
        (corpus / "nowhere.txt").symlink_to("gone")
        assert "nowhere.txt: a link to nothing" in refusal(tmp_path, corpus / "*.txt")


def test_a_directory_named_like_a_file_is_walked(tmp_path):
    (tmp_path / "out.jsonl").mkdir()
    (tmp_path / "out.jsonl" / "part-00000").write_bytes(lines(["one"]))
    (tmp_path / "out.jsonl" / ".part-00000.crc").write_bytes(b"crc\0\0\0\2\0\x12")
    (tmp_path / "out.jsonl" / "_SUCCESS").touch()
    made = make(tmp_path / "out", tmp_path / "*.jsonl", skip_unknown=True)
    assert texts_of(tmp_path / "out") == ["one"]
    assert made.sources[0].left_out_entries == [
        "out.jsonl/.part-00000.crc: hidden",
        "out.jsonl/_SUCCESS: hidden",
    ]


def test_what_the_command_writes_is_no_input(tmp_path):
    """Its output and its tokenizer may lie among the inputs, and the second run sees the same."""
    (tmp_path / "a.txt").write_text("some text " * 50)
    changes = {
        "tokenizer": "huggingface",
        "tokenizer_path": str(tmp_path / "tok.json"),
        "train_bpe": 260,
    }
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "lock").touch()
    for _ in range(2):
        made = make(tmp_path / "out", tmp_path, **changes)
        assert (made.sources[0].files, made.sources[0].left_out) == (1, 0)
        for ending in (".bin", ".idx", ".manifest.json"):
            Path(f"{tmp_path}/out{ending}").unlink()


def test_named_unknown_files_and_nothing_left(tmp_path):
    """What a shell's `*` names one by one is left out like what a directory holds."""
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "a.pdf").write_bytes(b"%PDF-")
    (tmp_path / "a.txt").write_text("one")
    files = [tmp_path / name for name in ("_SUCCESS", "a.pdf", "a.txt")]
    text = refusal(tmp_path, *files)
    assert "_SUCCESS: empty" in text and "a.pdf: a PDF document" in text and "(2 in all" in text
    made = make(tmp_path / "out", *files, skip_unknown=True)
    assert [(s.files, s.left_out) for s in made.sources] == [(0, 1), (0, 1), (1, 0)]
    assert "nothing is left to read" in refusal(tmp_path, *files[:2], skip_unknown=True)
    assert "no such file" in refusal(tmp_path, tmp_path / "gone", skip_unknown=True)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("ids.npy", b"\x93NUMPY\1\0v\0{'descr': '<u2'}", "a NumPy array"),
        ("a.idx", b"MMIDIDX\0\0\1\0\0\0\0\0\0\0", "the index of a Megatron dataset"),
        ("a.jsonl", lines(["some text of a document"] * 3), "text, and --format says token ids"),
        ("a.u16", b"", "empty"),
        ("a.zip", b"PK\3\4" + bytes(60), "a zip archive"),
    ],
)
def test_token_files_are_looked_into_too(tmp_path, name, data, reason):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_bytes(data)
    ids = np.array([35_615, 8, 0], dtype="<u2")  # begins like a gzip file and is none
    ids.tofile(tmp_path / "c" / "b.bin")
    common = {"format": "uint16", "tokenizer": "none", "vocab_size": 60_000, "eod_id": 0}
    assert reason in refusal(tmp_path, tmp_path / "c", **common)
    make(tmp_path / "out", tmp_path / "c", skip_unknown=True, **common)
    assert np.fromfile(tmp_path / "out.bin", dtype="<u2").tolist() == ids.tolist()


def test_a_tokenizer_is_trained_on_the_documents_of_any_kind_of_input(tmp_path):
    """The README's command trains on compressed JSONL."""
    pa, pq = (pytest.importorskip(f"pyarrow{name}") for name in ("", ".parquet"))
    text = "\n".join(documents(200, seed=1))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines([text])))
    pq.write_table(pa.table({"text": [text]}), tmp_path / "d.parquet")
    trained = set()
    for name in ("a.txt", "b.txt.xz", "c.jsonl.gz", "d.parquet"):
        tokenizer = tmp_path / f"{name}.json"
        changes = {"tokenizer": "huggingface", "tokenizer_path": str(tokenizer)}
        make(tmp_path / f"o{name}", tmp_path / name, train_bpe=300, **changes)
        trained.add(tokenizer.read_bytes())
    assert len(trained) == 1


def test_a_tokenizer_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "file").touch()
    changes = {"tokenizer": "huggingface", "tokenizer_path": str(tmp_path / "file" / "t.json")}
    text = refusal(tmp_path, tmp_path / "a.txt", train_bpe=257, **changes)
    assert "t.json: cannot be written (" in text


def test_pyarrow_is_asked_for_only_where_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.txt").write_text("one")
    make(tmp_path / "out", tmp_path / "a.txt")
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(60) + b"PAR1")
    text = refusal(tmp_path, tmp_path / "a.parquet")
    assert "pip install 'pyarrow>=17'" in text and "JSONL" in text

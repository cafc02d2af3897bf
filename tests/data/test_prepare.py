"""prepare-data: formats, determinism, refusals, the manifest."""

import argparse
import gzip
import shutil
import subprocess
import sysconfig
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from prepared import ENDINGS, check_dataset, content, lines, make, tokens_of

from megatron_patch.cli import prepare_data
from megatron_patch.data import manifest as manifests
from megatron_patch.data.errors import DataError
from megatron_patch.data.manifest import read_manifest
from megatron_patch.data.options import PrepareOptions


def test_every_format_gives_the_same_documents(tmp_path, texts):
    one_each = tmp_path / "dir"
    one_each.mkdir()
    for i, text in enumerate(texts):
        (one_each / f"{i:04d}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    (tmp_path / "d.txt").write_text("\n\n".join(texts), encoding="utf-8")
    (tmp_path / "e.txt").write_text("\r\n\r\n".join(texts), encoding="utf-8", newline="")
    wanted = [text.encode() for text in texts]
    for number, (source, changes) in enumerate(
        [
            (one_each, {}),
            (tmp_path / "dir" / "*.txt", {}),
            (tmp_path / "a.jsonl", {}),
            (tmp_path / "d.txt", {"document_separator": "\n\n"}),
            (tmp_path / "e.txt", {"document_separator": "\n\n"}),
        ]
    ):
        out = tmp_path / f"out{number}"
        made = make(out, source, batch_bytes=1000, **changes)
        assert tokens_of(out) == wanted, source
        assert made.documents == made.sequences == len(texts)
        assert made.tokens == sum(map(len, wanted)) + len(wanted)
        assert check_dataset(out) == []


def test_megatrons_reader_sees_the_documents(tmp_path, texts):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    make(tmp_path / "out", tmp_path / "a.jsonl", batch_bytes=500)
    read = IndexedDataset(str(tmp_path / "out"))
    assert len(read) == len(texts) == len(read.document_indices) - 1
    for i, text in enumerate(texts):
        assert read[i].tolist() == [*text.encode(), 256]


def test_workers_and_batch_size_do_not_change_a_byte(tmp_path, texts):
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    for name, changes in (
        ("serial", {}),
        ("parallel", {"workers": 2, "batch_bytes": 300}),
        ("large", {"batch_bytes": 1 << 20}),
    ):
        make(tmp_path / name, tmp_path / "a.jsonl", **changes)
    assert content(tmp_path / "serial") == content(tmp_path / "parallel")
    assert content(tmp_path / "serial") == content(tmp_path / "large")


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_token_files_are_one_stream_cut_at_the_end_id(tmp_path, dtype):
    rng = np.random.default_rng(3)
    stream = rng.integers(0, 20, size=5000).astype(dtype)
    cuts = [0, 1111, 1112, 3000, 5000]  # documents go on from file to file
    paths = []
    for i, (a, b) in enumerate(pairwise(cuts)):
        paths.append(tmp_path / f"tokens.{i}.gz")
        paths[-1].write_bytes(gzip.compress(stream[a:b].tobytes()))
    common = {"format": dtype, "tokenizer": "none", "vocab_size": 20, "eod_id": 0}
    for name, batch_bytes in (("small", 64), ("large", 1 << 20)):
        made = make(tmp_path / name, *paths, batch_bytes=batch_bytes, **common)
        assert np.array_equal(np.fromfile(tmp_path / f"{name}.bin", dtype=np.uint16), stream)
        ends = int((stream == 0).sum())
        assert made.documents == ends + (stream[-1] != 0)
        assert made.max_token_id == 19
        assert sum(s.documents for s in made.sources) == made.documents
        assert [s.tokens for s in made.sources] == np.diff(cuts).tolist()
    assert (tmp_path / "small.idx").read_bytes() == (tmp_path / "large.idx").read_bytes()
    with pytest.raises(DataError, match=r"tokens\.0\.gz.*is id 19, but the tokenizer has 19 ids"):
        make(tmp_path / "x", *paths, **(common | {"vocab_size": 19}))


def test_large_vocabularies_take_int32(tmp_path):
    ids = np.array([70_000, 5, 0, 69_999, 0], dtype=np.int32)
    ids.tofile(tmp_path / "ids")
    made = make(tmp_path / "out", tmp_path / "ids", format="int32", tokenizer="none",
                    vocab_size=70_001, eod_id=0)  # fmt: skip
    assert made.dtype == "int32" and made.documents == 2
    assert np.fromfile(tmp_path / "out.bin", dtype=np.int32).tolist() == ids.tolist()
    np.array([-1], dtype=np.int32).tofile(tmp_path / "negative")
    with pytest.raises(DataError, match="is id -1"):
        make(tmp_path / "x", tmp_path / "negative", format="int32", tokenizer="none",
                        vocab_size=10, eod_id=0)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "changes", "reason"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', {}, r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', {}, r"no text under --json-key 'text'.*body"),
        ("a.jsonl", b"[1]\n", {}, r"a\.jsonl: not JSON lines: '\[1\]\\n' is no record"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', {}, r"line 2: no text under"),
        ("a.jsonl", b"[" * 100_000, {}, "not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, "half a surrogate pair"),
        ("a.jsonl", b"\n\n", {}, "hold no documents"),
        ("a.txt", b"\xff\xfe\x00", {}, r"a\.txt: not UTF-8 text"),
        ("a.txt", b"  \n ", {}, "hold no documents"),
        ("a.u16", b"\x01\x00\x02", {"format": "uint16", "tokenizer": "bytes"}, "whole number"),
    ],
)  # fmt: skip
def test_unusable_inputs_are_refused_with_a_reason(tmp_path, name, data, changes, reason):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=reason):
        make(tmp_path / "out", tmp_path / name, **changes)
    assert not any((tmp_path / f"out{ending}").exists() for ending in ENDINGS)


@pytest.mark.parametrize("batch_bytes", [8, 1 << 20])
def test_two_odd_token_files_are_not_joined_out_of_step(tmp_path, batch_bytes):
    """Together they are an even number of bytes, and every id of the second would be wrong."""
    raw = np.arange(1, 7, dtype="<u2").tobytes()
    (tmp_path / "a.bin").write_bytes(raw[:-1])
    (tmp_path / "b.bin").write_bytes(raw + b"\1")
    common = {"format": "uint16", "tokenizer": "none", "vocab_size": 60_000, "eod_id": 0}
    with pytest.raises(DataError, match=r"a\.bin: 11 bytes are not a whole number of uint16"):
        make(tmp_path / "out", tmp_path / "*.bin", batch_bytes=batch_bytes, **common)
    (tmp_path / "a.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"b\.bin: 13 bytes are not a whole number of uint16"):
        make(tmp_path / "again", tmp_path / "*.bin", batch_bytes=batch_bytes, **common)


def test_errors_of_workers_arrive(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 50 + b"{\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 51: not JSON"):
        make(tmp_path / "out", tmp_path / "a.jsonl", workers=2, batch_bytes=200)


def test_missing_inputs_are_listed_together(tmp_path):
    with pytest.raises(DataError) as caught:
        make(tmp_path / "out", tmp_path / "a", tmp_path / "*.jsonl")
    assert len(caught.value.problems) == 2
    with pytest.raises(DataError, match="no inputs"):
        make(tmp_path / "out")


def test_invalid_text_can_be_left_out_or_replaced(tmp_path):
    (tmp_path / "t").mkdir()
    for name, data in (("a", b"good"), ("b", b"b\xffd"), ("c", b"\xef\xbb\xbfmark")):
        (tmp_path / "t" / f"{name}.txt").write_bytes(data)
    made = make(tmp_path / "skip", tmp_path / "t", invalid_text="skip")
    assert tokens_of(tmp_path / "skip") == [b"good", b"mark"]
    assert made.sources[0].skipped == 1
    make(tmp_path / "replace", tmp_path / "t", invalid_text="replace")
    assert tokens_of(tmp_path / "replace") == [b"good", "b\ufffdd".encode(), b"mark"]


def test_separators_across_reads(tmp_path, monkeypatch):
    """A separator or CRLF cut in two by a read must still be found."""
    from megatron_patch.data import sources

    monkeypatch.setattr(sources, "_READ", 3)
    (tmp_path / "a.txt").write_bytes(b"one<END>two\r\n2<END><END>three\r")
    make(tmp_path / "out", tmp_path / "a.txt", document_separator="<END>")
    assert tokens_of(tmp_path / "out") == [b"one", b"two\n2", b"three\r"]


def test_the_manifest_says_what_was_read_and_names_no_directory(tmp_path, texts):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(lines(texts))
    made = make(tmp_path / "out", tmp_path / "first", tmp_path / "second")
    assert made == read_manifest(tmp_path / "out")
    size = len(lines(texts))
    tokens = sum(len(text.encode()) + 1 for text in texts)
    assert [(s.name, s.files, s.bytes, s.documents, s.tokens) for s in made.sources] == [
        ("first", 1, size, len(texts), tokens),
        ("second", 1, size, len(texts), tokens),
    ]
    assert (made.tokenizer.kind, made.tokenizer.vocab_size, made.tokenizer.eod_id) == (
        "bytes",
        257,
        256,
    )
    text = (tmp_path / "out.manifest.json").read_text()
    assert str(tmp_path) not in text and "/" not in text
    digest = subprocess.run(
        ["sha256sum", tmp_path / "out.bin"], check=True, capture_output=True, text=True
    )
    assert digest.stdout.split()[0] == made.bin.sha256


def test_the_standard_library_is_a_corpus(tmp_path, monkeypatch):
    """Two packages of it: training a tokenizer on all of them takes 20 seconds."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("email", "asyncio"):
        shutil.copytree(library / name, tmp_path / "lib" / name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    tokenizer = tmp_path / "tok.json"
    changes = {
        "corpus": "python-stdlib",
        "tokenizer": "huggingface",
        "tokenizer_path": str(tokenizer),
        "train_bpe": 512,
    }
    made = make(tmp_path / "out", **changes)
    assert made.documents > 40 and made.tokens > 100_000
    assert made.tokenizer.vocab_size == 512
    assert [s.name for s in made.sources] == ["python-stdlib"]
    before = tokenizer.read_bytes()
    with pytest.raises(DataError, match="has 512 ids, --train-bpe asks for 600"):
        make(tmp_path / "other", **(changes | {"train_bpe": 600}))
    assert tokenizer.read_bytes() == before


def test_a_tokenizer_of_fewer_ids_than_asked_for_is_not_left(tmp_path):
    """It would be the next attempt's, as it is."""
    (tmp_path / "a.txt").write_text("one line of text\n" * 9)
    tokenizer = tmp_path / "tok.json"
    changes = {"tokenizer": "huggingface", "tokenizer_path": str(tokenizer)}
    with pytest.raises(DataError, match="asks for 4096: the text is too small"):
        make(tmp_path / "out", tmp_path / "a.txt", train_bpe=4096, **changes)
    assert not tokenizer.exists()
    made = make(tmp_path / "out", tmp_path / "a.txt", train_bpe=260, **changes)
    assert made.tokenizer.vocab_size == 260


def test_the_bin_of_another_tool_is_a_token_file(tmp_path, corpora):
    for ending in (".bin", ".idx"):
        (tmp_path / f"c{ending}").write_bytes(Path(f"{corpora[0]}{ending}").read_bytes())
    assert "prepared again, as a token file" in check_dataset(tmp_path / "c")[0]
    made = make(tmp_path / "new", tmp_path / "c.bin", format="uint16")
    ours = read_manifest(corpora[0])
    assert (made.documents, made.bin, made.idx) == (ours.documents, ours.bin, ours.idx)


def test_every_option_is_an_argument_with_help(capsys):
    parser = argparse.ArgumentParser()
    prepare_data.add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["prepare-data", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in ("--out", "--corpus {python-stdlib}", "--json-key", "--batch-bytes", "--restart"):
        assert flag in text
    assert "the sources of this Python's standard library" in text and "--adopt" not in text
    arguments = ["prepare-data", "a", "b", "--out", "o", "--document-separator", r"\n\n", "--quiet"]
    args = parser.parse_args([*arguments, "--eod-id", "3"])
    assert prepare_data.options(args) == PrepareOptions(
        inputs=["a", "b"], out="o", document_separator="\n\n", eod_id=3, quiet=True
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["prepare-data", "a"])
    with pytest.raises(DataError, match=r"--adopt has been removed.*--format uint16") as caught:
        prepare_data.run(parser.parse_args([*arguments, "--adopt"]))
    assert caught.value.exit_code == 2


def test_progress_without_a_terminal_is_plain_lines(capsys, monkeypatch):
    from megatron_patch.data import progress

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with progress.Progress("prepare", 2_000_000) as bar:
        time.sleep(0.01)
        bar.set(1_000_000, "3 tokens")
    output = capsys.readouterr().err
    assert "prepare: 50% of 2.00MB" in output and " left, 3 tokens\n" in output
    assert "\r" not in output


def test_files_of_any_size_have_at_most_4096_pieces():
    for size in (0, 1, 1 << 20, (1 << 32) + 1, 10**13):
        chunk = manifests.chunk_bytes_for(size)
        assert chunk >= 1 << 20 and -(-size // chunk) <= manifests.MAX_CHUNKS
        offsets = manifests.sample_offsets(size)
        assert offsets[0] == 0 and len(offsets) <= manifests.SAMPLE_PAGES
        assert offsets[-1] == max(0, size - manifests.SAMPLE_PAGE_BYTES)

"""Every option of prepare-data has an effect on an input, or is refused with the reason."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from prepared import lines, make, run_config, texts_of

from megatron_patch.cli import app
from megatron_patch.config import checks
from megatron_patch.data import sources
from megatron_patch.data.errors import DataError
from megatron_patch.data.options import PrepareOptions
from megatron_patch.data.prepare import prepare
from megatron_patch.schema.data import DatasetConfig

INVALID = {
    "in the text": b'{"text": "caf\xe9 au lait"}',
    "at its end": b'{"text": "caf\xe9"}',
    "in another field": b'{"text": "fine", "by": "Andr\xe9"}',
    "in another key": b'{"text": "fine", "\xe9": 1}',
    "in the key": b'{"t\xe9xt": "lost"}',
    "cut off": b'{"text": "a \xe6\xbc"}',
    "surrogate in UTF-8": b'{"text": "a \xed\xa0\x80 b"}',
    "in the braces": b'{"text": "lost"\xe9',
    "half a pair": b'{"text": "a \\ud800 b"}',
    "other half": b'{"text": "\\udc00"}',
}
"""A JSONL line each; what --invalid-text replace makes of it, below; None: beyond replacing."""
REPLACED = {
    "in the text": "caf\ufffd au lait",
    "at its end": "caf\ufffd",
    "in another field": "fine",
    "in another key": "fine",
    "in the key": None,
    "cut off": "a \ufffd",
    "surrogate in UTF-8": "a \ufffd\ufffd\ufffd b",
    "in the braces": None,
    "half a pair": "a \ufffd b",
    "other half": "\ufffd",
}


@pytest.mark.parametrize("where", INVALID)
@pytest.mark.parametrize("name", ["a.jsonl", "part-00000"])
def test_invalid_text_works_record_by_record(tmp_path, where, name):
    path = tmp_path / name
    path.write_bytes(lines(["before"]) + INVALID[where] + b"\n" + lines(["after"]))
    with pytest.raises(DataError, match=r"line 2: (not UTF-8|half a surr).*--invalid-text skip"):
        make(tmp_path / "error", path)
    (source,) = make(tmp_path / "skip", path, invalid_text="skip").sources
    assert texts_of(tmp_path / "skip") == ["before", "after"]
    assert (source.documents, source.skipped, source.invalid, source.replaced) == (2, 1, 1, 0)
    (source,) = make(tmp_path / "replace", path, invalid_text="replace").sources
    text = REPLACED[where]
    assert texts_of(tmp_path / "replace") == ["before", *([text] if text else []), "after"]
    assert (source.invalid, source.replaced) == ((0, 1) if text else (1, 0))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a\0b"}', r"line 2: not JSON \(Invalid control.*a NUL byte, which JSON"),
        (b'{"text": 1}', "line 2: no text under --json-key 'text'; it holds 1"),
        (b'{"text": null}', "line 2: no text under --json-key 'text'; it holds null"),
        (b'{"text": ["a"]}', "line 2: no text under --json-key 'text'; it holds \\[\"a\"]"),
        (b"{", r"line 2: not JSON \("),
    ],
)
@pytest.mark.parametrize("mode", ["error", "skip", "replace"])
def test_what_is_wrong_otherwise_stops_without_that_hint(tmp_path, line, reason, mode):
    (tmp_path / "a.jsonl").write_bytes(lines(["one"]) + line + b"\n")
    with pytest.raises(DataError, match=reason) as caught:
        make(tmp_path / "out", tmp_path / "a.jsonl", invalid_text=mode)
    assert "--invalid-text" not in str(caught.value)


def test_escaped_nul_and_marks_are_text(tmp_path):
    data = b"\xef\xbb\xbf" + lines(["a\0b"]) + b"\xef\xbb\xbf" + lines(["\ufeffc"])
    (tmp_path / "a.jsonl").write_bytes(data)
    make(tmp_path / "out", tmp_path / "a.jsonl")
    assert texts_of(tmp_path / "out") == ["a\0b", "\ufeffc"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "b.jsonl.gz"])
def test_other_encodings_are_converted_not_replaced(tmp_path, encoding, name):
    data = lines(["some text"]).decode().encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(DataError, match=rf"{name}: not UTF-8 text but UTF-\d+.*iconv") as caught:
        make(tmp_path / "out", tmp_path / name, invalid_text="replace")
    assert "--invalid-text" not in str(caught.value)


KINDS = ("text", "jsonl", "parquet", "tokens", "corpus")
TOKENS = "token ids"
IDS = "text, and --format"
BEYOND = "300 is not an id"
NO_TEXT = "no input is plain text"
CORPUS = "--corpus python-stdlib"
EFFECT = ""
EFFECTS: list[tuple[str, object, tuple[str, str, str, str, str]]] = [
    # An option and its value: effect, or the refusal, on text, JSONL, parquet, token ids, corpus.
    ("out", "{tmp}/", ("names a directory",) * 5),
    ("inputs", [], ("no inputs",) * 4 + (EFFECT,)),
    ("inputs", ["{tmp}"], (EFFECT,) * 4 + ("choose one",)),
    ("corpus", "python-stdlib", ("choose one",) * 4 + (EFFECT,)),
    ("format", "text", (EFFECT, EFFECT, "--format says text", "NumPy|binary", EFFECT)),
    ("format", "jsonl", ("not JSON lines", EFFECT, "--format says jsonl", "binary", CORPUS)),
    ("format", "uint16", (IDS, IDS, "says uint16", EFFECT, CORPUS)),
    ("format", "int32", (IDS, IDS, "says int32", EFFECT, CORPUS)),
    ("json_key", "body", ("no input is JSONL or parquet", EFFECT, EFFECT, TOKENS, CORPUS)),
    ("document_separator", "\n", (EFFECT, NO_TEXT, NO_TEXT, TOKENS, CORPUS)),
    ("document_separator", "", ("is empty",) * 5),
    ("document_separator", "\udce9", ("is not UTF-8",) * 5),
    ("invalid_text", "skip", (EFFECT, EFFECT, EFFECT, TOKENS, EFFECT)),
    ("invalid_text", "replace", (EFFECT, EFFECT, EFFECT, TOKENS, CORPUS)),
    ("skip_unknown", True, (EFFECT,) * 4 + (CORPUS,)),
    ("tokenizer", "none", ("has no text",) * 3 + ("--vocab-size",) + ("has no text",)),
    ("tokenizer", "huggingface", ("--tokenizer-path: kind",) * 5),
    ("tokenizer", "sentencepiece", ("--tokenizer-path: kind",) * 5),
    ("tokenizer", "tiktoken", ("--tokenizer-path: kind",) * 5),
    ("tokenizer_path", "t.json", ("--tokenizer-path: kind 'bytes' reads no file",) * 5),
    ("train_bpe", 300, ("--train-bpe needs --tokenizer huggingface",) * 5),
    ("vocab_size", 300, ("--vocab-size: 300 is set, but the 'bytes'",) * 5),
    ("eod_id", 3, ("--eod-id: 3: the bytes tokenizer's is 256",) * 5),
    ("eod_id", 256, (EFFECT,) * 5),
    ("workers", 0, ("--workers 0",) * 5),
    ("batch_bytes", 1, ("--batch-bytes 1",) * 5),
    ("batch_bytes", 64, (EFFECT,) * 5),
    ("restart", True, (EFFECT,) * 5),
    ("quiet", False, (EFFECT,) * 5),
]  # fmt: skip
BPE = {"tokenizer": "huggingface", "tokenizer_path": "{tmp}/tok.json"}
TOGETHER: list[tuple[dict, tuple[str, str, str, str, str]]] = [
    ({"train_bpe": 270, **BPE}, (EFFECT, EFFECT, EFFECT, TOKENS, EFFECT)),
    ({**BPE}, ("--tokenizer-path: no tokenizer.json file",) * 5),
    ({"train_bpe": 270, "eod_id": 300, **BPE}, (BEYOND, BEYOND, BEYOND, TOKENS, BEYOND)),
    ({"tokenizer": "none", "vocab_size": 300, "eod_id": 300}, ("--eod-id: 300 is not below",) * 5),
    ({"tokenizer": "none", "vocab_size": 300}, ("--eod-id: documents end",) * 5),
    ({"json_key": "text", "format": "auto"}, (EFFECT, EFFECT, EFFECT, "binary", EFFECT)),
]  # fmt: skip


def one_input(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Options that read one input of a kind, with all that an option could have an effect on."""
    text = "some text\nof words\nand more of them\nin lines " * 20
    if kind == "text":
        (tmp_path / "text.txt").write_text(text)
        return {"inputs": ["{tmp}/text.txt"]}
    if kind == "jsonl":
        record = {"text": text, "body": "another text"}
        (tmp_path / "lines.jsonl").write_text(json.dumps(record) + "\n")
        return {"inputs": ["{tmp}/lines.jsonl"]}
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": [text], "body": ["other"]}), tmp_path / "t.parquet")
        return {"inputs": ["{tmp}/t.parquet"]}
    if kind == "tokens":
        np.tile(np.arange(257, dtype="<u2"), 2).tofile(tmp_path / "ids.u16")
        return {"inputs": ["{tmp}/ids.u16"], "format": "uint16"}
    (tmp_path / "lib.py").write_text(text)
    monkeypatch.setattr(sources, "stdlib_files", lambda: [tmp_path / "lib.py"])
    return {"corpus": "python-stdlib"}


def outcome(tmp_path: Path, values: dict) -> str:
    """What preparing says against these options; empty when a dataset was made."""
    values = {"out": "{tmp}/out", "workers": 1, "quiet": True} | values
    filled = {
        k: v.format(tmp=tmp_path) if isinstance(v, str) and "{tmp}" in v else v
        for k, v in values.items()
    }
    if filled.get("inputs"):
        filled["inputs"] = [i.format(tmp=tmp_path) for i in filled["inputs"]]
    try:
        prepare(PrepareOptions(**filled))
    except DataError as error:
        assert not (tmp_path / "out.manifest.json").exists()
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_on_every_kind_of_input(tmp_path, kind, monkeypatch):
    basis = one_input(tmp_path, kind, monkeypatch)
    cases = [({name: value}, answers) for name, value, answers in EFFECTS]
    for changes, answers in [*cases, *TOGETHER]:
        wanted = answers[KINDS.index(kind)]
        if kind == "tokens" and changes == {"format": "int32"}:
            np.array([1, 2, 256], dtype="<i4").tofile(tmp_path / "ids.u16")
        said = outcome(tmp_path, basis | changes)
        if wanted:
            assert any(word in said for word in wanted.split("|")), (kind, changes, said)
            assert "Traceback" not in said and said
        else:
            assert not said, (kind, changes, said)
        if kind == "tokens":
            one_input(tmp_path, kind, monkeypatch)
        for left in [tmp_path / "tok.json", *tmp_path.glob("out*")]:
            left.unlink(missing_ok=True)


def test_the_table_names_every_option():
    assert {name for name, _, _ in EFFECTS} == {item.name for item in fields(PrepareOptions)}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("text", {"document_separator": "\n"}),
        ("text", {"document_separator": "\r\n"}),
        ("jsonl", {"json_key": "body"}),
        ("parquet", {"json_key": "body"}),
        ("jsonl", {"format": "text"}),
        ("tokens", {"tokenizer": "none", "vocab_size": 300, "eod_id": 7}),
    ],
)
def test_what_is_accepted_changes_the_documents(tmp_path, kind, changes, monkeypatch):
    basis = one_input(tmp_path, kind, monkeypatch)
    assert outcome(tmp_path, basis | {"out": "{tmp}/plain"}) == ""
    assert outcome(tmp_path, basis | changes) == ""
    plain, changed = ((tmp_path / f"{name}.idx").read_bytes() for name in ("plain", "out"))
    assert plain != changed


def test_mixed_inputs_take_the_options_of_each(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.txt").write_text("one--two")
    (tmp_path / "c" / "b.jsonl").write_text('{"body": "three--four"}')
    make(tmp_path / "out", tmp_path / "c", document_separator="--", json_key="body")
    assert texts_of(tmp_path / "out") == ["one", "two", "three--four"]


def test_what_cannot_be_known_before_is_told(tmp_path, capsys):
    """A separator that is nowhere, --restart of nothing, a tokenizer that is there already."""
    (tmp_path / "a.txt").write_text(" ".join(f"one\n\ntwo {i}" for i in range(99)))
    changes = {"tokenizer": "huggingface", "tokenizer_path": str(tmp_path / "t"), "train_bpe": 259}
    for name in ("a", "b"):
        make(
                tmp_path / name, tmp_path / "a.txt", document_separator="---", restart=True,
                quiet=False, **changes,
            )  # fmt: skip
        seen = capsys.readouterr().err
        assert "--document-separator '---' is in no file" in seen
        assert "--restart: no interrupted attempt is at" in seen
        assert ("is there already and used as it is" in seen) == (name == "b")


def test_all_contradictions_are_told_at_once(tmp_path):
    with pytest.raises(DataError) as caught:
        make(tmp_path / "out", tmp_path / "a", workers=0, batch_bytes=0, vocab_size=3,
                        format="uint16", invalid_text="skip", document_separator="x")  # fmt: skip
    assert len(caught.value.problems) == 5


A = DatasetConfig(path="a")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"reset_position_ids": True}, "data.reset_position_ids"),
        ({"reset_position_ids": True, "position_embedding": "none"}, "data.reset_position_ids"),
        ({"reset_position_ids": True, "position_embedding": "learned_absolute"}, None),
        ({"eod_mask_loss": True}, None),
    ],
)
def test_keys_of_the_configuration(changes, path):
    found = [p.path for p in checks.problems(run_config(A, **changes), ["data"])]
    assert found == ([path] if path else [])


def test_preflight_of_one_node_expects_no_other(capsys):
    with pytest.raises(SystemExit) as caught:
        app.run(["preflight", "--config", "x.yaml", "--out", "o", "--node", "--expect", "n1"])
    assert caught.value.code == 2 and "--expect: --node only measures" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [4097, 2**31, 10**11])
def test_more_workers_than_any_machine_has_cores_are_refused(tmp_path, workers):
    (tmp_path / "a").write_text("text")
    with pytest.raises(DataError, match=f"--workers {workers}: use 1 to 4,096"):
        make(tmp_path / "out", tmp_path / "a", workers=workers)


@pytest.mark.parametrize("size", [2**30 + 1, 10**18, 10**20])
def test_batches_that_no_worker_could_hold_are_refused(tmp_path, size):
    """Token files were read by so many bytes at a time: MemoryError, or OverflowError."""
    np.tile(np.arange(257, dtype="<u2"), 2).tofile(tmp_path / "a")
    with pytest.raises(DataError, match=f"--batch-bytes {size}: use 4 to 1,073,741,824"):
        make(tmp_path / "out", tmp_path / "a", format="uint16", batch_bytes=size)

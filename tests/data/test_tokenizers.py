"""Tokenizers: round trips, hashes, end of document, and no network."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import documents

from megatron_patch.data import tokenizers
from megatron_patch.data.errors import DataError
from megatron_patch.schema.data import TokenizerConfig

TEXT = "Ein Satz, 漢字 und 🙂;\n\treturn self._x\n"


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("text")
    paths = [root / f"{i}.txt" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_text("\n".join(documents(200, seed=i)), encoding="utf-8")
    return paths


@pytest.fixture(scope="session")
def bpe(text_files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [path.read_text("utf-8") for path in text_files]
    return tokenizers.train_bpe(texts, 300, tmp_path_factory.mktemp("bpe") / "tok.json")


def huggingface(path: Path, **more: object) -> tokenizers.Tokenizer:
    return tokenizers.build(TokenizerConfig(kind="huggingface", path=str(path), **more))


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = tokenizers.build(TokenizerConfig())
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, 256]) == text
    assert list(tokenizer.encode_batch([text])[0]) == ids
    assert all(i < 256 for i in ids) and (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)


def test_bpe_training_repeats_bit_for_bit_in_another_process(text_files, bpe, tmp_path):
    code = (
        "import pathlib, sys; from megatron_patch.data import tokenizers; "
        "texts = [pathlib.Path(name).read_text('utf-8') for name in sys.argv[2:]]; "
        "tokenizers.train_bpe(texts, 300, sys.argv[1])"
    )
    other = tmp_path / "again.json"
    subprocess.run(
        [sys.executable, "-c", code, str(other), *map(str, text_files)],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"},
    )
    assert other.read_bytes() == bpe.read_bytes()
    tokenizer = huggingface(bpe)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (300, 0)
    for text in (TEXT, "", "\x00\x01"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode())


def test_bpe_refusals(bpe, tmp_path):
    for size in (-1, 100, 99_999_999_999_999):
        with pytest.raises(DataError, match=rf"--train-bpe {size}: .* 257 to 1,048,576 ids"):
            tokenizers.train_bpe([TEXT], size, tmp_path / "t.json")
    with pytest.raises(DataError, match="exists already"):
        tokenizers.train_bpe([TEXT], 300, bpe)


def test_text_cannot_contain_the_end_of_a_document(bpe):
    """The tokenizers package turns the characters into the special id unless told otherwise."""
    tokenizer = huggingface(bpe)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert 0 not in ids and tokenizer.decode(ids) == "a<|endoftext|>b"
    assert list(tokenizer.encode_batch(["a<|endoftext|>b"])[0]) == ids


def test_the_hash_follows_the_ids_and_not_the_layout_of_the_file(bpe, tmp_path):
    content = json.loads(bpe.read_text())
    base = huggingface(bpe).sha256

    def changed(**fields: object) -> str:
        path = tmp_path / "other.json"
        path.write_text(json.dumps(content | fields, indent=3))
        return huggingface(path).sha256

    assert changed() == base
    assert changed(truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst",
                               "stride": 0}) == base  # fmt: skip
    model = content["model"] | {"merges": content["model"]["merges"][::-1]}
    assert changed(model=model) != base
    assert huggingface(bpe, eod_id=5).sha256 != base


def test_truncation_in_the_file_does_not_cut_documents(bpe, tmp_path):
    content = json.loads(bpe.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    path = tmp_path / "cutting.json"
    path.write_text(json.dumps(content))
    assert huggingface(path).encode(TEXT * 5) == huggingface(bpe).encode(TEXT * 5)


def test_unusable_huggingface_files(bpe, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        huggingface(broken)
    with pytest.raises(DataError, match=r"no tokenizer\.json file at"):
        huggingface(tmp_path / "none.json")
    with pytest.raises(DataError, match="300 is not an id"):
        huggingface(bpe, eod_id=300)
    nameless = tmp_path / "nameless.json"
    nameless.write_text(bpe.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(DataError, match=r"set tokenizer\.eod_id"):
        huggingface(nameless)
    assert huggingface(nameless, eod_id=0).eod_id == 0


def test_sentencepiece(text_files, tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.Train(
        input=",".join(map(str, text_files)),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=200,
        byte_fallback=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    config = TokenizerConfig(kind="sentencepiece", path=str(tmp_path / "sp.model"))
    tokenizer = tokenizers.build(config)
    ids = tokenizer.encode("the quick brown fox")
    assert tokenizer.decode(ids) == "the quick brown fox"
    assert tokenizer.eod_id == 2 and max(ids) < tokenizer.vocab_size
    assert tokenizer.eod_id not in tokenizer.encode("a </s> b")
    damaged = tmp_path / "damaged.model"
    damaged.write_bytes(b"no model")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        tokenizers.build(TokenizerConfig(kind="sentencepiece", path=str(damaged)))


@pytest.fixture
def toy_encoding(tmp_path: Path) -> Path:
    """256 bytes and a few merges, described in a .json."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (tmp_path / "toy.tiktoken").write_bytes(b"\n".join(lines))
    path = tmp_path / "toy.json"
    path.write_text(
        json.dumps(
            {
                "name": "toy",
                "pat_str": r"\s?\w+|\s+|[^\s\w]+",
                "special_tokens": {"<|endoftext|>": 259},
                "ranks": "toy.tiktoken",
            }
        )
    )
    return path


def test_tiktoken_from_files(toy_encoding):
    config = TokenizerConfig(kind="tiktoken", path=str(toy_encoding))
    tokenizer = tokenizers.build(config)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (260, 259)
    assert tokenizer.encode("the the") == [257, 258]
    assert 259 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    before = tokenizer.sha256
    ranks = toy_encoding.with_name("toy.tiktoken")
    ranks.write_bytes(ranks.read_bytes() + b"\n" + base64.b64encode(b"qu") + b" 260")
    # tiktoken's own loader would serve the old file from its cache here.
    assert tokenizers.build(config).sha256 != before
    ranks.write_bytes(b"!! 1")
    with pytest.raises(DataError, match="line 1 is not"):
        tokenizers.build(config)


@pytest.mark.parametrize("name", ["cl100k_base", "gpt2"])
def test_tiktoken_never_downloads(name, tmp_path, monkeypatch):
    import socket

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(DataError, match="nothing is downloaded here"):
        tokenizers.build(TokenizerConfig(kind="tiktoken", path=name))
    fake = tmp_path / f"{name}.tiktoken"
    fake.write_bytes(b"YQ== 0")
    with pytest.raises(DataError, match=r"not the published ranks|nothing is downloaded"):
        tokenizers.build(TokenizerConfig(kind="tiktoken", path=str(fake)))
    with pytest.raises(DataError, match="nor a known encoding"):
        tokenizers.build(TokenizerConfig(kind="tiktoken", path="no_such_name"))


def test_none_has_no_text():
    tokenizer = tokenizers.build(TokenizerConfig(kind="none", vocab_size=100, eod_id=3))
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (100, 3)
    with pytest.raises(DataError, match="has no text"):
        tokenizer.encode("x")
    other = tokenizers.build(TokenizerConfig(kind="none", vocab_size=100))
    assert other.sha256 != tokenizer.sha256 and other.eod_id is None


def test_contradictions_are_reported_together():
    with pytest.raises(DataError) as caught:
        tokenizers.build(TokenizerConfig(kind="none", path="x", eod_id=-1))
    assert len(caught.value.problems) == 3
    for size in (0, -3, (1 << 31) + 1):
        with pytest.raises(DataError, match=f"vocab_size: {size} is not 1 to 2147483648"):
            tokenizers.build(TokenizerConfig(kind="none", vocab_size=size))

"""Tokenizers: text to ids and back, and a hash of everything that determines the ids.

All kinds work offline, never parse special tokens out of text (a document that contains the
characters ``<|endoftext|>`` is not cut there) and never add any: ``prepare`` appends ``eod_id``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.data.errors import DataError
from megatron_patch.runtime.files import write_named
from megatron_patch.schema.data import TokenizerConfig

EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>")
"""Names an end-of-document token is recognized by, when ``eod_id`` is not configured."""


class Tokenizer(ABC):
    """What the other rooms may use of a tokenizer."""

    kind: str
    vocab_size: int
    """Ids are in [0, vocab_size)."""
    eod_id: int | None
    """End-of-document id; None only for ``kind: none`` without ``eod_id``."""
    sha256: str
    """Hash of everything that determines the ids: two tokenizers with equal hashes agree."""

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...


def build(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a configuration.

    Raises DataError: the configuration contradicts itself, the file is missing or not a tokenizer,
    the end of document is not known, or the encoding would have to be downloaded.
    """
    problems = [f"{p.path}: {p.message}" for p in config.problems("tokenizer")]
    if problems:
        raise DataError(problems)
    return _KINDS[config.kind](config)


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, and 256 for the end of a document."""

    kind = "bytes"
    vocab_size = 257
    eod_id = 256
    sha256 = hashlib.sha256(b"bytes: utf-8 values, 256 = end of document").hexdigest()

    def __init__(self, config: TokenizerConfig | None = None) -> None:
        del config

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class NoTokenizer(Tokenizer):
    """Datasets of bare ids: there is no text, only a vocabulary size."""

    kind = "none"

    def __init__(self, config: TokenizerConfig) -> None:
        assert config.vocab_size is not None
        self.vocab_size = config.vocab_size
        self.eod_id = config.eod_id
        self.sha256 = _hash("none", [self.vocab_size, self.eod_id])

    def encode(self, text: str) -> list[int]:
        raise DataError("tokenizer kind 'none' has no text; choose another kind to encode")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` of the ``tokenizers`` package."""

    kind = "huggingface"

    def __init__(self, config: TokenizerConfig) -> None:
        from tokenizers import Tokenizer as Native

        path = _existing(config.path, "tokenizer.json")
        text = path.read_bytes().decode("utf-8", errors="replace")
        try:
            content = json.loads(text)
            self._native = Native.from_str(text)
        except Exception as error:  # the Rust side raises plain Exception
            raise DataError(
                f"{path}: not a tokenizer.json of the tokenizers package ({error})"
            ) from error
        self._native.no_truncation()
        self._native.no_padding()
        self._native.encode_special_tokens = True
        vocab = self._native.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.eod_id = _eod(config, self.vocab_size, vocab.get, path)
        # Padding and truncation do not reach the ids (switched off above), so they do not count.
        content.pop("truncation", None)
        content.pop("padding", None)
        self.sha256 = _hash(self.kind, [content, self.eod_id])

    def encode(self, text: str) -> list[int]:
        return self._native.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._native.encode_batch_fast(list(texts), add_special_tokens=False)
        return [item.ids for item in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return self._native.decode(list(ids), skip_special_tokens=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model``."""

    kind = "sentencepiece"

    def __init__(self, config: TokenizerConfig) -> None:
        import sentencepiece

        path = _existing(config.path, ".model")
        content = path.read_bytes()
        self._native = sentencepiece.SentencePieceProcessor()
        try:
            self._native.LoadFromSerializedProto(content)
        except Exception as error:  # RuntimeError or ValueError, depending on what is wrong
            raise DataError(f"{path}: not a SentencePiece model ({error})") from error
        self.vocab_size = int(self._native.GetPieceSize())
        eos = int(self._native.eos_id())
        self.eod_id = _eod(
            config, self.vocab_size, lambda name: eos if name == "</s>" and eos >= 0 else None, path
        )
        self.sha256 = _hash(self.kind, [hashlib.sha256(content).hexdigest(), self.eod_id])

    def encode(self, text: str) -> list[int]:
        return self._native.EncodeAsIds(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._native.DecodeIds([int(i) for i in ids])


class TiktokenTokenizer(Tokenizer):
    """An encoding of ``tiktoken``, from files on this machine only."""

    kind = "tiktoken"

    def __init__(self, config: TokenizerConfig) -> None:
        import tiktoken

        assert config.path is not None
        fields = _tiktoken_fields(config.path)
        try:
            self._native = tiktoken.Encoding(**fields)
        except Exception as error:
            raise DataError(f"{config.path}: not a usable tiktoken encoding ({error})") from error
        special = dict(fields["special_tokens"])
        self.vocab_size = self._native.max_token_value + 1
        self.eod_id = _eod(config, self.vocab_size, special.get, Path(config.path))
        ranks = sorted((rank, token.hex()) for token, rank in fields["mergeable_ranks"].items())
        self.sha256 = _hash(
            self.kind, [fields["pat_str"], ranks, sorted(special.items()), self.eod_id]
        )

    def encode(self, text: str) -> list[int]:
        return self._native.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._native.decode(list(ids))


_KINDS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "bytes": BytesTokenizer,
    "huggingface": HuggingFaceTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "tiktoken": TiktokenTokenizer,
    "none": NoTokenizer,
}


BPE_SIZES = range(257, (1 << 20) + 1)
"""Bytes and an end of document at least. The trainer reserves memory for all ids at once, and
aborts the process where it gets none."""


def train_bpe(
    texts: Iterable[str], vocab_size: int, out: str | Path, *, eod: str = EOD_NAMES[0]
) -> Path:
    """Train a byte-level BPE on texts and write it as ``tokenizer.json``.

    The result is a function of the texts and ``vocab_size``: two calls write the same bytes. Id 0
    is ``eod``, ids 1..256 are the bytes, so any text can be encoded.

    Raises:
        DataError: ``vocab_size`` is not in ``BPE_SIZES``, or ``out`` exists.
        OSError: it cannot be written.
    """
    from tokenizers import Tokenizer as Native
    from tokenizers import decoders, models, pre_tokenizers, trainers

    target = Path(out)
    if vocab_size not in BPE_SIZES:
        raise DataError(
            f"--train-bpe {vocab_size}: a byte-level BPE has {BPE_SIZES[0]} to {BPE_SIZES[-1]:,} "
            "ids; usual are 32768 to 131072"
        )
    if target.exists():
        raise DataError(f"{target} exists already; remove it or choose another name")
    native = Native(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eod],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    target.parent.mkdir(parents=True, exist_ok=True)  # before the work: it may be refused
    native.train_from_iterator(texts, trainer=trainer)
    write_named(target, native.to_str(pretty=False))
    return target


def _hash(kind: str, parts: Any) -> str:
    text = json.dumps([kind, parts], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _existing(path: str | None, what: str) -> Path:
    assert path is not None
    found = Path(path)
    if not found.is_file():
        raise DataError(f"tokenizer.path: no {what} file at {path}")
    if not os.access(found, os.R_OK):
        raise DataError(f"tokenizer.path: {path} cannot be read; check its permissions")
    return found


def _eod(
    config: TokenizerConfig, vocab_size: int, lookup: Callable[[str], int | None], path: Path
) -> int:
    """The configured end-of-document id, else that of the first known name in the vocabulary."""
    if config.eod_id is not None:
        if config.eod_id >= vocab_size:
            raise DataError(
                f"tokenizer.eod_id: {config.eod_id} is not an id of {path}, which has {vocab_size}"
            )
        return config.eod_id
    for name in EOD_NAMES:
        found = lookup(name)
        if found is not None:
            return found
    raise DataError(
        f"{path}: none of {', '.join(EOD_NAMES)} is in the vocabulary; set tokenizer.eod_id to "
        "the id that ends a document"
    )


def _tiktoken_fields(path: str) -> dict[str, Any]:
    """Constructor arguments of ``tiktoken.Encoding``; never opens a connection."""
    file = Path(path)
    if file.suffix == ".json":
        return _tiktoken_description(_existing(path, "description"))
    import tiktoken.load
    from tiktoken_ext import openai_public  # type: ignore[import-untyped]

    known, ranks_given = openai_public.ENCODING_CONSTRUCTORS, file.suffix == ".tiktoken"
    name = file.stem if ranks_given else path
    if ranks_given:
        _existing(path, "ranks")
    if name not in known:
        raise DataError(
            f"tokenizer.path: {path!r} is neither a .json file nor a known encoding or its "
            f".tiktoken file ({', '.join(sorted(known))}); describe the encoding in a .json file"
        )

    def refuse(url: str) -> bytes:
        raise DataError(
            f"tokenizer.path: the encoding {path!r} is not on this machine and nothing is "
            f"downloaded here. Fetch {url} elsewhere and give the .tiktoken file's path, or put "
            "it into the directory named by TIKTOKEN_CACHE_DIR"
        )

    before = openai_public.load_tiktoken_bpe, tiktoken.load.read_file
    try:
        tiktoken.load.read_file = refuse
        if ranks_given:
            openai_public.load_tiktoken_bpe = lambda _url, expected_hash=None: _tiktoken_ranks(
                file, expected_hash
            )
        return known[name]()
    finally:
        openai_public.load_tiktoken_bpe, tiktoken.load.read_file = before


def _tiktoken_ranks(path: Path, expected_sha256: str | None = None) -> dict[bytes, int]:
    """Parse ``base64(token) rank`` lines (tiktoken's loader caches by path: it can be stale)."""
    content = path.read_bytes()
    if expected_sha256 and hashlib.sha256(content).hexdigest() != expected_sha256:
        raise DataError(f"{path}: not the published ranks of {path.stem!r} (sha256 differs)")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not 'base64 rank' ({error})") from error
    return ranks


def _tiktoken_description(path: Path) -> dict[str, Any]:
    """``{"name", "pat_str", "special_tokens", "ranks"}``; ranks: base64 lines beside the .json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        fields: dict[str, Any] = {name: str(content[name]) for name in ("name", "pat_str")}
        fields["special_tokens"] = {str(k): int(v) for k, v in content["special_tokens"].items()}
        ranks = str(path.parent / content["ranks"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a description of a tiktoken encoding; it needs name, pat_str, "
            f"special_tokens and ranks ({error})"
        ) from error
    return fields | {"mergeable_ranks": _tiktoken_ranks(_existing(ranks, "ranks"))}

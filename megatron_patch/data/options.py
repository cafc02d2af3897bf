"""Options of ``prepare-data``; the docstring under each field is its ``--help``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from megatron_patch.schema.data import TokenizerConfig
from megatron_patch.schema.paths import PathOrName, PathText

InputFormat = Literal["auto", "text", "jsonl", "uint16", "int32"]
TokenizerKind = Literal["bytes", "huggingface", "sentencepiece", "tiktoken", "none"]


@dataclass(kw_only=True, frozen=True, slots=True)
class PrepareOptions:
    """What to read, how to tokenize it and where to write it."""

    inputs: list[PathText] = field(default_factory=list)
    """Files, directories (everything below, in the order of names, linked folders too) or quoted
    globs, in order."""
    out: PathText
    """Prefix of the files to write: OUT.bin, OUT.idx, OUT.manifest.json (and OUT.parts while
    working)."""
    corpus: Literal["python-stdlib"] | None = None
    """Instead of inputs: python-stdlib, the sources of this Python's standard library."""
    format: InputFormat = "auto"
    """How files are read; auto: by their content, as JSONL, parquet or text. Token files
    (little-endian uint16 or int32, one stream over all files) must be named here. Files that hold
    gzip, zstd, xz or bzip2 data are decompressed."""
    json_key: str = "text"
    """Key of the document's text in a JSONL line, and its column in a parquet file."""
    document_separator: str | None = None
    """Cut text files into documents at this string ('\\n\\n': blank lines); default: one document
    a file."""
    invalid_text: Literal["error", "skip", "replace"] = "error"
    """Documents, JSONL lines and parquet rows that are not UTF-8, or hold half a surrogate pair:
    stop, leave them out, or replace what is wrong by U+FFFD (both counted)."""
    skip_unknown: bool = False
    """Leave out what holds no documents, listed and counted, instead of refusing it: files of other
    kinds, empty, hidden and unreadable ones, links to nothing."""
    tokenizer: TokenizerKind = "bytes"
    """Kind of tokenizer, as data.tokenizer.kind in the configuration."""
    tokenizer_path: PathOrName | None = None
    """Its file, as data.tokenizer.path."""
    train_bpe: int | None = None
    """Train a byte-level BPE of so many ids on the inputs first and write it to --tokenizer-path
    (with --tokenizer huggingface). A tokenizer of that size already there is used as it is."""
    vocab_size: int | None = None
    """Number of ids, for tokenizer none."""
    eod_id: int | None = None
    """End-of-document id: appended to every document; token files are cut after it."""
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processes; the output does not depend on it. Default: one a core."""
    batch_bytes: int = 8 << 20
    """Text handed to a worker at a time: the unit that is not done twice after an interruption."""
    restart: bool = False
    """Throw an interrupted attempt away instead of continuing it."""
    quiet: bool = False
    """No progress."""

    @property
    def token_files(self) -> bool:
        """Whether the inputs are token ids already."""
        return self.format in ("uint16", "int32")

    def tokenizer_config(self) -> TokenizerConfig:
        """The same tokenizer, as the ``data.tokenizer`` section names it."""
        return TokenizerConfig(
            kind=self.tokenizer,
            path=self.tokenizer_path,
            vocab_size=self.vocab_size,
            eod_id=self.eod_id,
        )

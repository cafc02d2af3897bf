"""Options of ``prepare-data``; the docstring under each field is its ``--help``."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from megatron_patch.schema.data import TokenizerConfig

InputFormat = Literal["auto", "text", "jsonl", "uint16", "int32"]
TokenizerKind = Literal["bytes", "huggingface", "sentencepiece", "tiktoken", "none"]


@dataclass(kw_only=True, frozen=True, slots=True)
class PrepareOptions:
    """What to read, how to tokenize it and where to write it."""

    inputs: list[str] = field(default_factory=list)
    """Files, directories (every text and JSONL file below, sorted) or quoted globs, in order."""
    out: str
    """Prefix of the files to write: OUT.bin, OUT.idx, OUT.manifest.json (and OUT.parts while
    working)."""
    corpus: Literal["python-stdlib"] | None = None
    """Instead of inputs: python-stdlib, the sources of this Python's standard library."""
    format: InputFormat = "auto"
    """How files are read; auto: JSONL by its ending (.jsonl, .ndjson, .json), else text. Token
    files (little-endian uint16 or int32, one stream over all files) must be named here. Files
    ending in .gz or .zst are decompressed."""
    json_key: str = "text"
    """Key of the document's text in a JSONL line."""
    document_separator: str | None = None
    """Cut text files into documents at this string ('\\n\\n': blank lines); default: one document
    a file."""
    invalid_text: Literal["error", "skip", "replace"] = "error"
    """Documents that are not UTF-8: stop, leave them out (counted), or replace the bytes."""
    tokenizer: TokenizerKind = "bytes"
    """Kind of tokenizer, as data.tokenizer.kind in the configuration."""
    tokenizer_path: str | None = None
    """Its file, as data.tokenizer.path."""
    train_bpe: int | None = None
    """Train a byte-level BPE of so many ids on the inputs first and write it to --tokenizer-path
    (with --tokenizer huggingface; text inputs only). A tokenizer of that size already there is
    used as it is."""
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
    adopt: bool = False
    """Write only OUT.manifest.json, for the OUT.bin and OUT.idx of another Megatron tool."""
    quiet: bool = False
    """No progress."""

    def tokenizer_config(self) -> TokenizerConfig:
        """The same tokenizer, as the ``data.tokenizer`` section names it."""
        return TokenizerConfig(
            kind=self.tokenizer,
            path=self.tokenizer_path,
            vocab_size=self.vocab_size,
            eod_id=self.eod_id,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one argument per field of ``PrepareOptions``; ``inputs`` are positional."""
    hints, helps = get_type_hints(PrepareOptions), _field_help(PrepareOptions)
    for item in fields(PrepareOptions):
        hint, text = hints[item.name], helps[item.name].replace("%", "%%")
        if item.name == "inputs":
            parser.add_argument("inputs", nargs="*", metavar="INPUT", help=text)
            continue
        flag = "--" + item.name.replace("_", "-")
        if hint is bool:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        extra: dict[str, Any] = {"default": _default(item), "help": text}
        if item.default is MISSING and item.default_factory is MISSING:
            extra["required"] = True
        kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
        choices = _literals(hint)
        if choices:
            extra["choices"] = choices
        elif int in kinds:
            extra["type"] = int
        if extra["default"] is not None and item.name != "workers":
            extra["help"] += f" [{extra['default']!r}]".replace("%", "%%")
        parser.add_argument(flag, **extra)


def from_args(args: argparse.Namespace) -> PrepareOptions:
    """Options from parsed arguments; ``\\n`` and ``\\t`` in the separator are unescaped."""
    values = {item.name: getattr(args, item.name) for item in fields(PrepareOptions)}
    separator = values["document_separator"]
    if separator is not None:
        values["document_separator"] = separator.replace("\\n", "\n").replace("\\t", "\t")
    return PrepareOptions(**values)


def _default(item: Any) -> Any:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else None


def _literals(hint: Any) -> list[str]:
    """The strings of a Literal, also inside a union."""
    found: list[str] = []
    for value in get_args(hint):
        found += [value] if isinstance(value, str) else _literals(value)
    return found


def _field_help(kind: type) -> dict[str, str]:
    """Field name -> the docstring under it, on one line."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    helps = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            helps[statement.target.id] = " ".join(str(following.value.value).split())
    return helps

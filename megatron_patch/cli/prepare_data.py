"""``megatron-patch prepare-data``."""

from __future__ import annotations

import argparse
from typing import Any, Literal, get_origin

from megatron_patch.cli.common import Subparsers, as_path

DESCRIPTION = """\
Turn text, JSON lines (plain, gz, zst, xz, bz2), parquet or raw token files into a Megatron indexed
dataset: OUT.bin, OUT.idx and OUT.manifest.json, which training verifies before it reads a token.
Every entry of a directory is read by its content or refused; --skip-unknown leaves out the rest.

  megatron-patch prepare-data corpus/*.jsonl.zst --tokenizer huggingface \\
      --tokenizer-path tokenizer.json --out data/corpus
  megatron-patch prepare-data tokens.u16 --format uint16 --tokenizer none \\
      --vocab-size 50257 --eod-id 50256 --out data/books

An interrupted run continues where it was when the same command is given again.
"""
ADOPT = (
    "--adopt has been removed: prepare the .bin of another tool again, as a token file: "
    "megatron-patch prepare-data OLD.bin --format uint16 (or int32) --out NEW, with the options of "
    "its tokenizer"
)


def add_parser(commands: Subparsers) -> None:
    """Register the command: one argument per field of ``PrepareOptions``."""
    from megatron_patch.config import types
    from megatron_patch.data.options import PrepareOptions

    parser = commands.add_parser(
        "prepare-data",
        help="turn text into token files that training verifies",
        description=DESCRIPTION,
    )
    for item in types.fields(PrepareOptions).values():
        text = types.help_of(PrepareOptions, item.name).replace("%", "%%")
        if item.name == "inputs":
            parser.add_argument("inputs", nargs="*", metavar="INPUT", type=as_path, help=text)
            continue
        flag = "--" + item.name.replace("_", "-")
        (kind,), _ = types.alternatives(item.type)
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        extra: dict[str, Any] = {"required": item.required}
        if not item.required:
            extra["default"] = item.default
            if item.default is not None and item.name != "workers":
                text += f" [{item.default!r}]".replace("%", "%%")
        if get_origin(kind) is Literal:
            extra["choices"] = kind.__args__
        else:
            extra["type"] = as_path if types.is_path(kind) else kind
        parser.add_argument(flag, help=text, **extra)
    # For one release: told what replaces it.
    parser.add_argument("--adopt", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def options(args: argparse.Namespace) -> Any:
    """The options, of arguments; in the separator ``\\n``, ``\\r`` and ``\\t`` are unescaped."""
    from megatron_patch.config import types
    from megatron_patch.data.options import PrepareOptions

    values = {name: getattr(args, name) for name in types.fields(PrepareOptions)}
    separator = values["document_separator"]
    if separator is not None:
        for escaped, character in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
            separator = separator.replace(escaped, character)
        values["document_separator"] = separator
    return PrepareOptions(**values)


def run(args: argparse.Namespace) -> int:
    from megatron_patch.data.errors import DataError
    from megatron_patch.data.prepare import prepare

    if args.adopt:
        raise DataError(ADOPT)
    prepare(options(args))
    return 0

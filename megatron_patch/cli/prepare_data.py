"""``megatron-patch prepare-data``."""

from __future__ import annotations

import argparse

from megatron_patch.cli.common import Subparsers

DESCRIPTION = """\
Turn text, JSON lines (plain, .gz, .zst) or raw token files into a Megatron indexed dataset:
OUT.bin, OUT.idx and OUT.manifest.json, which training verifies before it reads a token.

  megatron-patch prepare-data corpus/*.jsonl.zst --tokenizer huggingface \\
      --tokenizer-path tokenizer.json --out data/corpus
  megatron-patch prepare-data tokens.u16 --format uint16 --tokenizer none \\
      --vocab-size 50257 --eod-id 50256 --out data/books

An interrupted run continues where it was when the same command is given again.
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command; its options belong to the data room."""
    from megatron_patch.data.options import add_arguments

    parser = commands.add_parser(
        "prepare-data",
        help="turn text into token files that training verifies",
        description=DESCRIPTION,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare the dataset."""
    from megatron_patch.data import options, prepare

    prepare.prepare(options.from_args(args))
    return 0

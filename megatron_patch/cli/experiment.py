"""``megatron-patch experiment``: says where it went, for one release."""

from __future__ import annotations

import argparse

from megatron_patch.cli.common import Subparsers

MOVED = """\
the command 'experiment' has left the product. In a clone of the repository:
  experiment stability --config FILE   is   python research/run.py FILE
  experiment results --config FILE     is   python research/run.py FILE --results
Protocols are in research/protocols (configs/stability before). 'pack' and 'unpack' have no
successor: copy the experiment's directory."""


class MovedError(ValueError):
    """A command that is not here any more; the text names what replaces it."""

    exit_code = 2


def add_parser(commands: Subparsers) -> None:
    """Register the name, whatever follows it; without ``help`` it is in no list of commands."""
    parser = commands.add_parser("experiment", add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises MovedError, always."""
    raise MovedError(MOVED)

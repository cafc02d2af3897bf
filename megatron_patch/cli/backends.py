"""``megatron-patch backends list``."""

from __future__ import annotations

import argparse

from megatron_patch.cli.common import Formatter, Subparsers

DESCRIPTION = """\
Attention backends by name (the key attention.backend): what each can do, and what it lacks on this
machine. A backend that cannot serve a configuration refuses it, listing every unmet requirement.
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "backends",
        help="list the attention backends and what each can do",
        description=DESCRIPTION,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parts = parser.add_subparsers(title="what to do", metavar="list", required=True)
    listing = parts.add_parser(
        "list",
        help="print the capability table",
        description="Print the capability table of the attention backends.",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    listing.set_defaults(run=run, only_prints=True)


def run(args: argparse.Namespace) -> int:
    """Print the capability table."""
    from megatron_patch.attention import registry

    print(registry.table())
    return 0

"""``megatron-patch preflight``."""

from __future__ import annotations

import argparse

from megatron_patch.cli.common import Subparsers, add_config, as_path, load

DESCRIPTION = """\
Ask a node whether it can train: number and health of its GPUs, their matrix rate and the bandwidth
between them, versions, clock, free disk, shared directory. The batch script runs it on every node
(--node), measures collectives with one process a GPU, and compares the answers on the first node
(--compare); by hand, without either, this machine is measured and judged alone.
Exit code 0: passed; 1: a node failed, the table and OUT/bad_nodes say which; 2: OUT cannot be used.
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "preflight",
        help="ask nodes whether they can train, before training",
        description=DESCRIPTION,
    )
    add_config(parser)
    parser.add_argument(
        "--out", metavar="DIR", type=as_path, required=True, help="shared directory for answers"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--node", action="store_true", help="only measure this node")
    which.add_argument("--compare", action="store_true", help="only compare what nodes answered")
    parser.add_argument(
        "--expect",
        metavar="NODE",
        action="append",
        default=[],
        help="a node that must have answered",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Measure, compare, or both."""
    from pathlib import Path

    if args.node and args.expect:
        args.parser.error("--expect: --node only measures this node, --compare looks for others")
    loaded = load(args.config, args.overrides)
    from megatron_patch.launcher import preflight, verdict

    out = Path(args.out)
    if not args.compare:
        preflight.measure(loaded.config, out)
    return 0 if args.node else verdict.compare(loaded.config, out, args.expect)

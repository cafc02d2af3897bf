"""``megatron-patch doctor``."""

from __future__ import annotations

import argparse

from megatron_patch.cli.common import Subparsers

DESCRIPTION = """\
Say what this machine has and whether it works: versions and pins of Python, torch, triton,
megatron-core, Transformer Engine and Apex, GPU, driver, cuDNN and NCCL; then use them: a matrix
product on the GPU, the attention kernel forward and backward. List the attention backends with what
each can do and what it lacks here, and every change that is made to Megatron-Core. Exit code 0:
everything required works; 1: something required does not.
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "doctor", help="say what this machine has and whether it works", description=DESCRIPTION
    )
    parser.add_argument(
        "--json", action="store_true", help="print the environment report as JSON and stop"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    if args.json:
        import json

        from megatron_patch.runtime import environment

        print(json.dumps(environment.report(), indent=1, sort_keys=True))
        return 0
    from megatron_patch.runtime import doctor

    return doctor.run()

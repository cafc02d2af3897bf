"""``megatron-patch report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_patch.cli.common import Formatter, Subparsers

DESCRIPTION = """\
Write one self-contained HTML page about a run: verdicts, curves, layer x head maps of attention,
events, software, configuration with origins. Readable without a server, in light, dark and on
paper; no script, no request to anywhere. Works while the run is going on, and for runs that were
interrupted or exploded.

  megatron-patch report runs/gpt2_124m
  megatron-patch report runs/gpt2_124m --out report.html
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "report",
        help="write an HTML page about a run",
        description=DESCRIPTION,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument(
        "-o",
        "--out",
        metavar="HTML",
        help="file to write, in a directory that is there; default: <RUN>/report.html",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    from megatron_patch.report import page
    from megatron_patch.runtime.files import is_standard_output

    folder = Path(args.run_dir)
    out = page.write(folder, Path(args.out) if args.out else folder / "report.html")
    if not is_standard_output(out):  # its name would follow the page
        print(out)
    return 0

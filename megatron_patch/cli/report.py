"""``megatron-patch report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_patch.cli.common import Subparsers, as_path

DESCRIPTION = """\
Write one self-contained HTML page about a run: verdicts, curves, layer x head maps of attention,
events, software, configuration with origins. Readable without a server, in light, dark and on
paper; no script, no request to anywhere. Works while the run is going on, and for runs that were
interrupted or exploded. With --png: loss, gradient norm and tokens/s of one or several runs,
overlaid, in one picture.

  megatron-patch report runs/gpt2_124m
  megatron-patch report runs/a runs/b --png comparison.png
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "report", help="write an HTML page about a run, or draw runs", description=DESCRIPTION
    )
    text = "run directory; with --png also a metrics.csv, and several"
    parser.add_argument("runs", metavar="RUN", type=as_path, nargs="+", help=text)
    out = parser.add_mutually_exclusive_group()
    text = "file to write, in a directory that is there; default: <RUN>/report.html"
    out.add_argument("-o", "--out", metavar="HTML", type=as_path, help=text)
    text = "draw loss, gradient norm and tokens/s instead"
    out.add_argument("--png", metavar="FILE", type=as_path, help=text)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Write the page, or the picture."""
    from megatron_patch.report import charts, report
    from megatron_patch.runtime.files import is_standard_output

    runs = [Path(run) for run in args.runs]
    if args.png is not None:
        out = Path(args.png)
        charts.draw_png(runs, out)
    elif len(runs) == 1:
        out = Path(args.out) if args.out else runs[0] / "report.html"
        report.write(runs[0], out)
    else:
        args.parser.error(f"a page is about one run, {len(runs)} are given; compare with --png")
    if not is_standard_output(out):  # its name would follow the page
        print(out)
    return 0

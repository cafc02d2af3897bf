"""``megatron-patch plot``."""

from __future__ import annotations

import argparse

from megatron_patch.cli.common import Formatter, Subparsers

DESCRIPTION = """\
Draw loss, gradient norm and throughput of one or several runs into one PNG, runs overlaid.

  megatron-patch plot runs/gpt2_124m
  megatron-patch plot runs/a runs/b --out comparison.png
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plot",
        help="draw loss, gradient norm and throughput of runs",
        description=DESCRIPTION,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="run directory (or its metrics.csv), one or several"
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="PNG",
        help="file to write; default: <RUN>/<name of RUN>.png for one run, runs.png for several",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw the runs."""
    from pathlib import Path

    from megatron_patch.monitor import plot

    runs = [Path(run) for run in args.runs]
    if args.out:
        output = Path(args.out)
    elif len(runs) == 1:
        folder = runs[0] if runs[0].is_dir() else runs[0].parent
        output = folder / f"{folder.resolve().name}.png"
    else:
        output = Path("runs.png")
    if not output.suffix and not output.is_dir():  # matplotlib would write a file beside it
        raise plot.PlotError(f"{output}: has no ending; name a PNG file, e.g. {output}.png")
    plot.plot_runs(runs, output)
    print(output)
    return 0

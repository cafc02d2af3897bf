"""Names of commands that moved: they work, or say what replaces them, for one release."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_patch.cli.common import Subparsers, as_path

EXPERIMENT = """\
the command 'experiment' has left the product. In a clone of the repository:
  experiment stability --config FILE   is   python research/run.py FILE
  experiment results --config FILE     is   python research/run.py FILE --results
Protocols are in research/protocols (configs/stability before). 'pack' and 'unpack' have no
successor: copy the experiment's directory."""


class MovedError(ValueError):
    """A command that is not here any more; the text names what replaces it."""

    exit_code = 2


def add_parser(commands: Subparsers) -> None:
    """Register the names; without ``help`` they are in no list of commands."""
    experiment = commands.add_parser(
        "experiment", add_help=False, prefix_chars="\0", description=EXPERIMENT
    )
    experiment.add_argument("arguments", nargs="*", help="whatever follows")
    experiment.set_defaults(run=run_experiment)
    plot = commands.add_parser("plot", description="Is now: report RUN... --png FILE")
    text = "run directory or metrics.csv"
    plot.add_argument("runs", metavar="RUN", type=as_path, nargs="+", help=text)
    text = "default: <RUN>/<name>.png, or runs.png"
    plot.add_argument("-o", "--out", metavar="PNG", type=as_path, help=text)
    plot.set_defaults(run=run_plot)
    backends = commands.add_parser("backends", description="Is now a part of: doctor")
    backends.add_argument("list", choices=["list"], help="print the capability table")
    backends.set_defaults(run=run_backends, only_prints=True)


def _note(old: str, new: str) -> None:
    text = f"megatron-patch: '{old}' is now '{new}'; the old name goes with the next release"
    print(text, file=sys.stderr)


def run_experiment(args: argparse.Namespace) -> int:
    """Raises MovedError, always."""
    raise MovedError(EXPERIMENT)


def run_plot(args: argparse.Namespace) -> int:
    """Draw the runs."""
    from megatron_patch.report import charts

    _note("plot", "report RUN... --png FILE")
    runs, out = [Path(run) for run in args.runs], Path(args.out or "runs.png")
    if not args.out and len(runs) == 1:
        folder = runs[0] if runs[0].is_dir() else runs[0].parent
        out = folder / f"{folder.resolve().name}.png"
    charts.draw_png(runs, out)
    print(out)
    return 0


def run_backends(args: argparse.Namespace) -> int:
    """Print the capability table."""
    from megatron_patch.attention import registry

    _note("backends list", "doctor")
    print(registry.table())
    return 0

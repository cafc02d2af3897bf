"""``megatron-patch experiment stability|results|cell|pack|unpack``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patch.cli.common import Formatter, Subparsers, add_overrides, load
from megatron_patch.runtime.lifeline import die_with_launcher

if TYPE_CHECKING:
    from megatron_patch.experiments.publish import Target

MIB = 15.5
"""Of an archive."""
DESCRIPTION = """\
Run a fixed protocol of training runs that differ in one thing each, through the real trainer, and
say which of them exploded. See docs/experiments.md.

  megatron-patch experiment stability --config configs/stability/smoke.yaml
  megatron-patch experiment stability --config configs/stability/baselines.yaml --minutes 25
  megatron-patch experiment pack runs/stability_baselines --to results
"""
STABILITY = """\
Start the runs of a protocol on the GPUs of this node, several at once. The same command again goes
on: finished and exploded runs are skipped, stopped ones continue from their checkpoint, and runs
that were refused before their first step are tried again. Failed ones, and those refused later, are
started again with --retry. Every run is in the verdict table, whatever it shows, also those not
started yet. Exit code 0: no run failed for a reason of its own (exploding is not failing); 1: one
did, or was refused; 2: error in the protocol or configuration, or its data are not there (nothing
was started).
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command and its parts."""
    parser = commands.add_parser(
        "experiment",
        help="run a protocol of comparable training runs",
        description=DESCRIPTION,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parts = parser.add_subparsers(
        title="what to do", metavar="stability|results|cell|pack|unpack", required=True
    )
    _add_stability(parts)
    _add_cell(parts)
    _add_pack(parts)


def _part(parts: Subparsers, name: str, summary: str, more: str) -> argparse.ArgumentParser:
    return parts.add_parser(
        name,
        help=summary,
        description=more,
        formatter_class=Formatter,
        allow_abbrev=False,
    )


def _add_stability(parts: Subparsers) -> None:
    part = _part(parts, "stability", "run (or go on with) a protocol", STABILITY)
    part.add_argument("--config", metavar="FILE", required=True, help="protocol file")
    part.add_argument("--out", metavar="DIR", help="default: runs/<name of the protocol>")
    part.add_argument(
        "--gpus", metavar="N", type=_positive, help="GPUs to use; default: all; CPU: runs at once"
    )
    part.add_argument(
        "--minutes", metavar="M", type=_amount, help="stop, with checkpoints, before this is over"
    )
    part.add_argument("--steps", metavar="N", type=_positive, help="end runs at this step for now")
    part.add_argument(
        "--only",
        metavar="CELL",
        nargs="+",
        default=[],
        help="cells, single runs (cell-s1), or seeds (s1)",
    )
    part.add_argument(
        "--gpus-per-run", metavar="N", type=_positive, help="instead of the protocol's gpus_per_run"
    )
    part.add_argument(
        "--widen",
        action="store_true",
        help="runs also take GPUs that no run waits for, and are stopped, with a checkpoint, to go "
        "on with GPUs that have become idle; batches and update stay the same",
    )
    part.add_argument(
        "--retry",
        action="store_true",
        help="also start runs again that failed, or were refused after they had made steps",
    )
    part.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan, look whether the data are there, and start nothing",
    )
    _add_target(part, "every 90 s and at the end")
    add_overrides(part)
    part.set_defaults(run=run_stability)
    shown = _part(
        parts,
        "results",
        "write the tables and plots of what is there, and start nothing",
        "After 'unpack': the verdict table, the curves and the plot of all records together, in\n"
        "<DIR>/results. Exit code 2: there is no such experiment, or it is another protocol's.",
    )
    shown.add_argument("--config", metavar="FILE", required=True, help="protocol file")
    shown.add_argument("--out", metavar="DIR", help="default: runs/<name of the protocol>")
    _add_target(shown, "once")
    add_overrides(shown)
    shown.set_defaults(run=run_results)


def _add_target(part: argparse.ArgumentParser, when: str) -> None:
    part.add_argument(
        "--results-dir",
        metavar="DIR",
        help=f"also copy the results there, {when}: <name>.json, .png, .csv; "
        "runs that went further in the results lying there are kept",
    )
    part.add_argument(
        "--archives",
        metavar="N",
        type=_count,
        default=0,
        help="with --results-dir: and at most N archives of the records, as 'pack' writes them; "
        "default 0: none",
    )
    part.add_argument(
        "--mib",
        metavar="M",
        type=_amount,
        help=f"with --archives: size of one, at most; default {MIB:g}",
    )


def _target(args: argparse.Namespace) -> Target | None:
    from megatron_patch.experiments.errors import ExperimentError
    from megatron_patch.experiments.publish import Target

    if args.mib is not None and not args.archives:
        raise ExperimentError(f"--mib {args.mib:g} needs --archives: say how many archives")
    if args.results_dir is None:
        if args.archives:
            raise ExperimentError("--archives needs --results-dir: say where they go")
        return None
    limit = int((MIB if args.mib is None else args.mib) * 2**20)
    return Target(folder=Path(args.results_dir), archives=args.archives, limit=limit)


def _add_cell(parts: Subparsers) -> None:
    part = _part(
        parts,
        "cell",
        "one run of a protocol, as 'stability' starts it",
        "Train like 'megatron-patch train', after checking that batches, initial weights and\n"
        "software are those of the reference file (written by the first run that finds none).",
    )
    part.add_argument("--config", metavar="FILE", required=True, help="trainer configuration")
    part.add_argument("--variant", metavar="NAME", default="plain", help="change of core attention")
    part.add_argument("--reference", metavar="FILE", required=True, help="fingerprint of the seed")
    part.add_argument(
        "--checked-steps",
        metavar="N",
        type=_positive,
        default=20,
        help="steps whose batches are hashed and compared; default 20",
    )
    add_overrides(part)
    part.set_defaults(run=run_cell)


def _add_pack(parts: Subparsers) -> None:
    pack = _part(
        parts,
        "pack",
        "put an experiment's records into a few small archives",
        "Everything but checkpoints and TensorBoard files. A run that is not finished can be read\n"
        "elsewhere, but continued only where its checkpoints are.",
    )
    pack.add_argument("experiment", metavar="DIR", help="directory of the experiment")
    pack.add_argument("--to", metavar="DIR", required=True, help="where the archives go")
    pack.add_argument(
        "--files", metavar="N", type=_positive, default=8, help="how many, at most; default 8"
    )
    pack.add_argument(
        "--mib",
        metavar="M",
        type=_amount,
        default=MIB,
        help=f"size of one, at most; default {MIB:g}",
    )
    pack.set_defaults(run=run_pack)
    unpack = _part(
        parts,
        "unpack",
        "read archives that 'pack' wrote into an experiment directory",
        "Every file is checked against its hash, and all archives of a 'pack' must be given. A\n"
        "run that is there already is replaced only by one of the same experiment that went\n"
        "further, and a directory in use is left alone. Interrupted: the same command does what\n"
        "is left.",
    )
    unpack.add_argument("archives", metavar="FILE", nargs="+", help="archives of one experiment")
    unpack.add_argument("--out", metavar="DIR", required=True, help="directory of the experiment")
    unpack.set_defaults(run=run_unpack)


def _count(text: str, at_least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least {at_least}")
    return value


def _positive(text: str) -> int:
    return _count(text, at_least=1)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:  # not a number is neither
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0, e.g. 15.5")
    return value


def run_stability(args: argparse.Namespace) -> int:
    """Run the protocol."""
    from megatron_patch.experiments import stability

    return stability.run(
        stability.Request(
            config=Path(args.config),
            out=None if args.out is None else Path(args.out),
            gpus=args.gpus,
            minutes=args.minutes,
            steps=args.steps,
            only=args.only,
            overrides=args.overrides,
            gpus_per_run=args.gpus_per_run,
            widen=args.widen,
            target=_target(args),
            retry=args.retry,
            dry_run=args.dry_run,
        )
    )


def run_results(args: argparse.Namespace) -> int:
    """Write tables and plots."""
    from megatron_patch.experiments import stability

    return stability.show(
        stability.Request(
            config=Path(args.config),
            out=None if args.out is None else Path(args.out),
            gpus=None,
            minutes=None,
            steps=None,
            only=[],
            overrides=args.overrides,
            target=_target(args),
        )
    )


def run_cell(args: argparse.Namespace) -> int:
    """Train one run."""
    die_with_launcher()
    loaded = load(args.config, args.overrides)
    from megatron_patch.experiments import cell

    return cell.train(
        loaded,
        variant=args.variant,
        reference=Path(args.reference),
        checked_steps=args.checked_steps,
    )


def run_pack(args: argparse.Namespace) -> int:
    """Write the archives and say what did not fit."""
    from megatron_patch.experiments import archive

    for line in archive.pack(
        Path(args.experiment), Path(args.to), files=args.files, limit=int(args.mib * 2**20)
    ):
        print(line)
    return 0


def run_unpack(args: argparse.Namespace) -> int:
    """Read the archives."""
    from megatron_patch.experiments import archive

    for line in archive.unpack([Path(name) for name in args.archives], Path(args.out)):
        print(line)
    return 0

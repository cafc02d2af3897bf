"""``megatron-patch train``."""

from __future__ import annotations

import argparse
import os
import sys

from megatron_patch.cli.common import Subparsers, add_config, load
from megatron_patch.runtime.lifeline import die_with_launcher

DESCRIPTION = """\
Train a GPT as one YAML file says. One process uses one GPU (or the CPU, with
training.device: cpu); several GPUs and nodes run under torchrun:

  megatron-patch train --config run.yaml
  torchrun --nproc-per-node 8 -m megatron_patch train --config run.yaml --set optimizer.lr=3e-4

The configuration is checked completely before anything starts. A run that was stopped continues
from its newest good checkpoint when the same command is given again (checkpoint.resume).
"""
EPILOG = """\
Every key of the configuration: 'megatron-patch config help', one section of it:
'megatron-patch config help optimizer'.
Exit codes: 0 finished, or stopped gracefully (the file FINISHED in the run directory tells which),
2 configuration or data error, 3 non-finite loss or gradient, 4 no good checkpoint where one is
required, 5 stopped by stability.guard after a checkpoint, 6 a hang (stacks in <run_dir>/hangs), 7
loss spikes and no rewind left, 8 the same step crashed every attempt, 1 anything else.
"""


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "train", help="train a GPT as one YAML file says", description=DESCRIPTION, epilog=EPILOG
    )
    add_config(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    die_with_launcher()
    loaded = load(args.config, args.overrides)
    # Megatron is imported only for a configuration that passed.
    from megatron_patch.training import trainer

    code = trainer.train(loaded)
    _flush_console()
    return code


def _flush_console() -> None:
    """What a console on a full disk cannot take must not make Python end a good run with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

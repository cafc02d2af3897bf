"""The ``megatron-patch`` command line: which command, which exit code (130 interrupted)."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys

import megatron_patch
from megatron_patch.cli import checkpoint, cluster, config, inspect, prepare_data, train
from megatron_patch.cli.common import Parser, report_error

COMMANDS = train, cluster, prepare_data, config, inspect, checkpoint
OURS = ("megatron_patch", "stable_attention")
BAD_INPUT = 2
INTERRUPTED = 130
READER_GONE = 141
OUTPUT_LOST = 1
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megatron-patch",
        description="Stable BF16 GPT pretraining on Megatron-Core from one YAML file.",
        epilog="Exit codes: 0 finished or stopped gracefully, 2 configuration or data error, "
        "3 non-finite loss or gradient, 4 no good checkpoint, 5 stability guard, 6 hang,\n"
        "7 loss spikes, 8 the same step crashed every attempt, 1 anything else.\n"
        "Several GPUs: torchrun --nproc-per-node 8 -m megatron_patch train --config run.yaml",
    )
    version = f"megatron-patch {megatron_patch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def run(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; errors that are the user's leave no traceback."""
    for stream in (sys.stdout, sys.stderr):
        # A path may hold what the terminal's encoding has not: show an escape, do not fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    try:
        done = int(args.run(args))
        if getattr(args, "only_prints", False):
            sys.stdout.flush()  # what cannot be written is known here, not while Python ends
        return done
    except KeyboardInterrupt:
        print("megatron-patch: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        code = exit_code(error)
        if code is not None:
            report_error(error)
        elif getattr(args, "only_prints", False):
            code = _end_output(error)
        if code is None:
            raise
        return code


def _end_output(error: Exception) -> int | None:
    """Exit code where nobody takes what is printed; None: the error is another one."""
    if not isinstance(error, OSError) or error.filename is not None:
        return None
    if isinstance(error, BrokenPipeError):  # `config show | head`: nobody reads on
        code = READER_GONE
    elif error.errno in UNWRITABLE:
        text = f"standard output: {error.strerror}; make room, or send it elsewhere"
        print(f"megatron-patch: {text}", file=sys.stderr)
        code = OUTPUT_LOST
    else:
        return None
    # Python would complain once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def exit_code(error: BaseException) -> int | None:
    """Exit code of an error that is ours to explain; None: a fault, to be shown in full."""
    if type(error).__module__.partition(".")[0] not in OURS:
        return None
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    return BAD_INPUT if isinstance(error, ValueError) else None

"""``megatron-patch probe``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

from megatron_patch.cli.common import Subparsers, as_path

DESCRIPTION = """\
Run every attention backend on tensors that a training run captured (stability.capture_steps) and
judge it against float64: bias of delta with its standard error clustered by head, coherence, dQ
error; and what the tensors are like: kappa, repeated maxima, dead zone, spectral norms.

  megatron-patch probe runs/gpt2_124m
  megatron-patch probe runs/a/captures/step_00004000.*.pt --backends stable_flash,sdpa_cudnn --out p

Without a GPU the kernels are left out and emulations stand for them. Captures are read as plain
tensors (no code is run from them).

Exit code 0: every capture has a figure of at least one backend; 1: one has none that is finite; 2:
one cannot be probed (the others are, and written), or the command line is wrong.
"""

NO_FUSED_OPTIMIZERS = r"Transformer Engine and Apex are not installed\. Falling back to "
NO_CUDA_RUNTIME = "No CUDA runtime is found, using CUDA_HOME="


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "probe", help="judge attention backends on captured tensors", description=DESCRIPTION
    )
    text = "capture file, or a run directory"
    parser.add_argument("captures", metavar="CAPTURE", type=as_path, nargs="+", help=text)
    parser.add_argument(
        "--backends", metavar="NAMES", default="all", help="'all' (default) or names with commas"
    )
    text = "also write probe.json, probe.md, probe.png"
    parser.add_argument("--out", metavar="DIR", type=as_path, help=text)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: the GPU where there is one",
    )
    parser.add_argument(
        "--skip-rows",
        metavar="N",
        type=_rows,
        default=64,
        help="leave out the first rows, which see few keys; default 64, at most half of them",
    )
    parser.set_defaults(run=run)


def _rows(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 0")
    return value


@contextlib.contextmanager
def known_notices_hidden() -> Iterator[None]:
    """Without what the libraries say at their import about parts that the probe does not use.

    These notices alone, and while the probe runs: any other warning is somebody's to read.
    """
    log = logging.getLogger("torch.utils.cpp_extension")
    with warnings.catch_warnings():
        # Core's optimizers and gradient clipping, of which a probe needs none.
        warnings.filterwarnings(
            "ignore", NO_FUSED_OPTIMIZERS, category=UserWarning, module=r"megatron\.core\."
        )
        log.addFilter(_is_news)
        try:
            yield
        finally:
            log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a CUDA toolkit has no GPU: whether there is one, `--device` says."""
    return not str(record.msg).startswith(NO_CUDA_RUNTIME)


def run(args: argparse.Namespace) -> int:
    """Probe the captures."""
    with known_notices_hidden():
        from megatron_patch.stability import probe_report

        return probe_report.run(
            [Path(name) for name in args.captures],
            backends=args.backends,
            device=args.device,
            skip_rows=args.skip_rows,
            out=None if args.out is None else Path(args.out),
        )

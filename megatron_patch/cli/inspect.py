"""``megatron-patch report|probe|doctor``, and commands of earlier versions for one release."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_patch.cli.common import Subparsers, as_path

REPORT = """\
Write one self-contained HTML page about a run: verdicts, curves, layer x head maps of attention,
events, software, configuration with origins. Readable without a server, in light, dark and on
paper; no script, no request to anywhere. Works while the run is going on, and for runs that were
interrupted or exploded. With --png: loss, gradient norm and tokens/s of one or several runs,
overlaid, in one picture.

  megatron-patch report runs/gpt2_124m
  megatron-patch report runs/a runs/b --png comparison.png
"""
PROBE = """\
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
DOCTOR = """\
Say what this machine has and whether it works: versions and pins of Python, torch, triton,
megatron-core, Transformer Engine and Apex, GPU, driver, cuDNN and NCCL; then use them: a matrix
product on the GPU, the attention kernel forward and backward. List the attention backends with what
each can do and what it lacks here, and every change that is made to Megatron-Core. Exit code 0:
everything required works; 1: something required does not.
"""
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
    """Register the commands; those without ``help`` are in no list."""
    text = "write an HTML page about a run, or draw runs"
    report = commands.add_parser("report", help=text, description=REPORT)
    text = "run directory; with --png also a metrics.csv, and several"
    report.add_argument("runs", metavar="RUN", type=as_path, nargs="+", help=text)
    out = report.add_mutually_exclusive_group()
    text = "file to write, in a directory that is there; default: <RUN>/report.html"
    out.add_argument("-o", "--out", metavar="HTML", type=as_path, help=text)
    text = "draw loss, gradient norm and tokens/s instead"
    out.add_argument("--png", metavar="FILE", type=as_path, help=text)
    report.set_defaults(run=run_report, parser=report)

    text = "judge attention backends on captured tensors"
    probe = commands.add_parser("probe", help=text, description=PROBE)
    text = "capture file, or a run directory"
    probe.add_argument("captures", metavar="CAPTURE", type=as_path, nargs="+", help=text)
    text = "'all' (default) or names with commas"
    probe.add_argument("--backends", metavar="NAMES", default="all", help=text)
    text = "also write probe.json, probe.md, probe.png"
    probe.add_argument("--out", metavar="DIR", type=as_path, help=text)
    devices, text = ("auto", "cpu", "cuda"), "auto: the GPU where there is one"
    probe.add_argument("--device", choices=devices, default="auto", help=text)
    text = "leave out the first rows, which see few keys; default 64, at most half of them"
    probe.add_argument("--skip-rows", metavar="N", type=_rows, default=64, help=text)
    probe.set_defaults(run=run_probe)

    text = "say what this machine has and whether it works"
    doctor = commands.add_parser("doctor", help=text, description=DOCTOR)
    text = "print the environment report as JSON and stop"
    doctor.add_argument("--json", action="store_true", help=text)
    doctor.set_defaults(run=run_doctor, only_prints=True)

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


def run_report(args: argparse.Namespace) -> int:
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


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 0")
    return int(text)


def run_probe(args: argparse.Namespace) -> int:
    from megatron_patch.core_patches import quiet

    quiet.install()
    try:
        from megatron_patch.stability import probe_report

        return probe_report.run(
            [Path(name) for name in args.captures],
            backends=args.backends,
            device=args.device,
            skip_rows=args.skip_rows,
            out=None if args.out is None else Path(args.out),
        )
    finally:
        quiet.undo()


def run_doctor(args: argparse.Namespace) -> int:
    if args.json:
        import json

        from megatron_patch.runtime import environment

        print(json.dumps(environment.report(), indent=1, sort_keys=True))
        return 0
    from megatron_patch.runtime import doctor

    return doctor.run()


def run_experiment(args: argparse.Namespace) -> int:
    raise MovedError(EXPERIMENT)


def run_plot(args: argparse.Namespace) -> int:
    from megatron_patch.report import charts

    _warn_of_old_name("plot", "report RUN... --png FILE")
    runs, out = [Path(run) for run in args.runs], Path(args.out or "runs.png")
    if not args.out and len(runs) == 1:
        folder = runs[0] if runs[0].is_dir() else runs[0].parent
        out = folder / f"{folder.resolve().name}.png"
    charts.draw_png(runs, out)
    print(out)
    return 0


def run_backends(args: argparse.Namespace) -> int:
    from megatron_patch.attention import registry

    _warn_of_old_name("backends list", "doctor")
    print(registry.table())
    return 0


def _warn_of_old_name(old: str, new: str) -> None:
    text = f"megatron-patch: '{old}' is now '{new}'; the old name goes with the next release"
    print(text, file=sys.stderr)

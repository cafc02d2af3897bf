"""Every measurement of the kernel library on one GPU, in order of value, within a time budget.

    PYTHONPATH=kernels python benchmarks/kernel_all.py --minutes 60          # make bench-kernels
    PYTHONPATH=kernels python benchmarks/kernel_all.py --minutes 9.3 --only speed,checks --out DIR

Each step is a script of its own with a share of the time; what a step does not use goes to the next
ones. All of them write their results as they go and resume from files of the same kernels, GPU and
versions in ``--out`` or ``--resume``, so that several short runs make one result: run the same
command again until it says that everything is complete. ``kernel_all.json`` says how each step
ended. Tables: ``python benchmarks/render_tables.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import describe_kernels, same_origin  # noqa: E402

# What a step needs to save what it has, after its own --minutes.
GRACE_S = 40.0


def _complete(result: dict[str, Any]) -> bool:
    return bool(result.get("complete"))


@dataclass(frozen=True, kw_only=True)
class Step:
    """A script, its share of the time, and when its result needs no further run."""

    script: str
    result: str
    share: float
    resumes: bool = True
    done: Callable[[dict[str, Any]], bool] = _complete


STEPS = {
    "faults": Step(
        script="kernel_faults.py",
        result="kernel_faults",
        share=1.5,
        resumes=False,
        done=lambda result: bool(result["faults"]),
    ),
    "speed": Step(
        script="attention.py",
        result="attention",
        share=7.5,
        done=lambda result: bool(result["complete"] and result.get("flex_complete")),
    ),
    "delta": Step(script="delta_regimes.py", result="delta_regimes", share=5.0),
    "checks": Step(script="kernel_checks.py", result="kernel_checks", share=4.5, resumes=False),
    "sanitizer": Step(
        script="kernel_sanitizer.py",
        result="sanitizer",
        share=4.5,
        resumes=False,
        done=lambda result: result["available"],
    ),
    "grid": Step(script="kernel_grid.py", result="kernel_grid", share=14.0),
}


def finished(step: Step, folder: Path, head: dict[str, Any]) -> bool:
    """Whether ``folder`` holds a complete result of these kernels, GPU and versions."""
    path = folder / f"{step.result}.json"
    if not path.exists():
        return False
    result = json.loads(path.read_text())
    return not same_origin(result, head) and step.done(result)


def run(step: Step, args: argparse.Namespace, minutes: float) -> str:
    """One step as a process; how it ended."""
    command = [sys.executable, str(ROOT / "benchmarks" / step.script), "--out", str(args.out)]
    if step.script != "kernel_faults.py":
        command += ["--minutes", f"{minutes:.2f}"]
    if step.resumes and args.resume:
        command += ["--resume", str(args.resume)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(minutes * 60 + GRACE_S)
        return "ok" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        return "stopped: out of time"
    finally:
        # A session of this step's own: the script and the workers it started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--resume", type=Path, default=None, help="folder of earlier results")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all steps together")
    parser.add_argument("--only", default=",".join(STEPS), help="steps, in this order")
    args = parser.parse_args(argv)
    unknown = set(args.only.split(",")) - set(STEPS)
    if unknown:
        parser.error(f"unknown steps {sorted(unknown)}; there are {', '.join(STEPS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    head = describe_kernels()
    steps = {name: STEPS[name] for name in args.only.split(",")}
    endings: dict[str, dict[str, Any]] = {}
    for i, (name, step) in enumerate(steps.items()):
        if args.resume and finished(step, args.resume, head) and args.resume != args.out:
            shutil.copy(args.resume / f"{step.result}.json", args.out)
        if finished(step, args.out, head):
            endings[name] = {"ended": "complete before"}
            print(f"== {name}: complete before", flush=True)
            continue
        left = args.minutes - (time.monotonic() - begin) / 60
        shares = sum(s.share for s in list(steps.values())[i:])
        last = i == len(steps) - 1
        minutes = left if last else min(left, max(step.share, left * step.share / shares))
        minutes -= GRACE_S / 60
        if minutes < 0.5:
            endings[name] = {"ended": "not started: out of time"}
            print(f"== {name}: out of time", flush=True)
            continue
        print(f"== {name}: {minutes:.1f} of {left:.1f} min left", flush=True)
        began = time.monotonic()
        ended = run(step, args, minutes)
        seconds = round(time.monotonic() - began, 1)
        complete = finished(step, args.out, head)
        endings[name] = {"ended": ended, "seconds": seconds, "complete": complete}
        print(f"== {name}: {ended}, complete: {complete}, {seconds:.0f} s", flush=True)
        (args.out / "kernel_all.json").write_text(json.dumps(head | {"steps": endings}, indent=1))
    (args.out / "kernel_all.json").write_text(
        json.dumps(head | {"steps": endings}, indent=1) + "\n"
    )
    for name, found in endings.items():
        print(f"{name:10s} {found}")
    return 0 if all(finished(step, args.out, head) for step in steps.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

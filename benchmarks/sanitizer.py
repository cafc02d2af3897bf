"""compute-sanitizer over a representative set of attention calls, forward and backward.

    PYTHONPATH=kernels python benchmarks/sanitizer.py [--minutes 6] [--out DIR]

writes ``sanitizer.json`` into ``--out``. The set is compiled first, in parallel and without the
tool. Under the
tool every tensor is a CUDA allocation of its own (no caching allocator), so that an access one
element out of bounds is seen. A control with a planted out-of-bounds store shows that the tool
finds errors on this machine; where it does not run at all, the file says so and why.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from machine import describe_kernels, fault, in_workers, parser, write_result

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / p) for p in ("tests", "tests/kernels")]

# Odd lengths, every mask and feature, every padded head dim, both paths of the loads.
CASES = (
    "b=2 sq=129 sk=129 hq=4 hk=2 d=64 causal=1 sinks=learned dlse=1",
    "sq=65 sk=200 d=64 layout=bhsd",
    "sq=200 sk=65 d=64 causal=1 layout=sbhd b=2",
    "sq=130 sk=130 d=64 causal=1 left=40 memory=strided",
    "sq=100 sk=131 d=64 left=33 right=20 hq=4 hk=1",
    "sq=97 sk=97 d=40 dtype=fp16 softcap=15.0 causal=1",
    "sq=127 sk=127 d=80 dropout=0.17 causal=1",
    "sq=130 sk=130 d=96 dtype=fp16",
    "b=2 sq=129 sk=129 d=128 causal=1 hq=4 hk=2 memory=fused",
    "sq=257 sk=130 d=128 sinks=off-by-one",
    "sq=129 sk=129 d=128 causal=1 o_lo=int8",
    "sq=129 sk=129 d=128 stabilizer=none",
    "sq=129 sk=129 d=128 causal=1 stabilizer=dynamic_max",
    "sq=70 sk=129 d=192 dv=128 causal=1",
    "sq=70 sk=129 d=256 causal=1",
    "sq=1 sk=1 d=64",
    "sq=1 sk=33 hq=1 hk=1 d=40 o_lo=int8",
    "sq=127 sk=127 d=256 dropout=0.17 causal=1",
    "sq=1 sk=300 d=128 hq=8 hk=1",
    "layout=thd lens_q=0,5,33,1,129 lens_k=4,0,33,1,129 unused=3 d=64 causal=1",
    "layout=thd lens_q=64,128,65 lens_k=64,128,65 gaps=7 d=128 causal=1 left=50 sinks=learned",
    "layout=thd lens_q=100,1 lens_k=1,100 hq=4 hk=2 d=64 dropout=0.1",
    "sq=129 sk=129 hq=4 hk=2 d=64 causal=1 stabilizer=compensated_projected",
    "layout=thd lens_q=0,5,129 lens_k=4,0,200 d=128 stabilizer=compensated_projected",
    "sq=129 sk=200 d=192 dv=128 causal=1 stabilizer=compensated_projected",
    "sq=70 sk=129 d=256 causal=1 stabilizer=compensated_projected sinks=learned",
    "sq=129 sk=129 d=64 stabilizer=projected",
    "sq=70 sk=4500 d=256",
)
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
# What the tool prints where it cannot work (no debugger interface, a virtualised driver).
UNSUPPORTED = re.compile(r"Device not supported|not supported on this")
NOT_STARTED = re.compile(r"Unable to[^\n]*|Failed to initialize[^\n]*|[Nn]o such file[^\n]*")


def find_tool() -> str | None:
    """compute-sanitizer: $COMPUTE_SANITIZER, the PATH, $CUDA_HOME, or the usual place."""
    given = os.environ.get("COMPUTE_SANITIZER")
    if given:
        return given
    places = [os.environ.get("CUDA_HOME", ""), *sorted(glob.glob("/usr/local/cuda*"), reverse=True)]
    tries = [shutil.which("compute-sanitizer")]
    tries += [shutil.which(f"{place}/bin/compute-sanitizer") for place in places if place]
    tries += [shutil.which(f"{p}/compute-sanitizer/compute-sanitizer") for p in places if p]
    return next((x for x in tries if x), None)


def run_case(line: str) -> str:
    """Forward and backward of a case on the GPU; "" or what it raised."""
    import torch
    from attention_cases import Case, make_inputs
    from error_rule import run_ours

    try:
        case = Case.parse(line)
        run_ours(case, make_inputs(case, "cuda"), poison=False)
        torch.cuda.synchronize()
    except Exception as error:
        return fault(error)
    return ""


def child(cases: list[str]) -> int:
    """What runs under the tool: every case, one line each."""
    bad = 0
    for line in cases:
        failed = run_case(line)
        bad += bool(failed)
        print("case failed:" if failed else "case done:", line, failed, flush=True)
    return 1 if bad else 0


@triton.jit
def store_past_the_end(ptr, n):
    tl.store(ptr + n + tl.program_id(0), 1.0)


def planted() -> int:
    """A store past the end of an allocation, which the tool has to report."""
    import torch

    x = torch.zeros(1000, device="cuda")
    store_past_the_end[(1,)](x, 1000)
    torch.cuda.synchronize()
    return 0


def check(tool: str, name: str, arguments: list[str], seconds: float) -> dict[str, Any]:
    """One run of one of the tool's checkers over this script's ``arguments``."""
    command = [tool, "--tool", name, "--print-limit", "20", sys.executable, __file__, *arguments]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=environment, timeout=max(1.0, seconds), check=False)  # fmt: skip
        text, late = done.stdout, False
    except subprocess.TimeoutExpired as error:
        text, late = (error.stdout or b"").decode(errors="replace"), True
    except OSError as error:
        text, late = f"Unable to start: {error}", False
    return judge(text, late=late, seconds=time.monotonic() - began)


def judge(text: str, *, late: bool, seconds: float) -> dict[str, Any]:
    """What a run's output says: errors (None if it did not say), cases done, the first lines."""
    counts = [int(n) for n in SUMMARY.findall(text)]
    unusable = UNSUPPORTED.search(text) or (None if counts else NOT_STARTED.search(text))
    reports = [x for x in text.splitlines() if x.startswith("=========")]
    return {
        "errors": sum(counts) if counts and not unusable else None,
        "cases": text.count("case done:"),
        "failed": [x for x in text.splitlines() if x.startswith("case failed:")],
        "timed_out": late,
        "unusable": unusable.group(0) if unusable else "",
        "seconds": round(seconds, 1),
        "output": (reports or text.splitlines()[-5:])[:30],
    }


def measure(args: argparse.Namespace, tool: str) -> dict[str, Any]:
    """Control, compilation and the checkers, within the time given."""
    end = time.monotonic() + 60 * args.minutes
    left = lambda: end - time.monotonic()  # noqa: E731
    cases = list(CASES[: args.limit] if args.limit else CASES)
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    control = check(tool, "memcheck", ["--planted"], min(120.0, left()))
    print("control:", control["errors"], control["unusable"], flush=True)
    figures: dict[str, Any] = {
        "tool": [x for x in version.stdout.splitlines() if "ersion" in x][:1],
        "planned": len(cases),
        "control": control,
        "finds_errors": bool(control["errors"]),
        "checkers": {},
    }
    if control["unusable"]:
        return figures
    faults = in_workers(
        run_case, [] if args.no_compile else cases, workers=args.workers, seconds=180
    )
    figures["without_tool"] = [f"{case}: {x}" for case, x in zip(cases, faults, strict=False) if x]
    print("compiled;", figures["without_tool"] or "every case runs", flush=True)
    for name in args.tools.split(","):
        found = check(tool, name, ["--child", *cases], left())
        figures["checkers"][name] = found
        print(f"{name}: {found['errors']} errors, {found['cases']}/{len(cases)} cases", flush=True)
    return figures


def clean(figures: dict[str, Any]) -> bool:
    """Every checker went through every case and reported nothing, and the control was found."""
    found = figures.get("checkers", {}).values()
    whole = all(x["errors"] == 0 and x["cases"] == figures["planned"] for x in found)
    return bool(found) and whole and figures["finds_errors"]


def main() -> int:
    found = parser(__doc__, Path("runs/sanitizer"))
    found.add_argument("--minutes", type=float, default=6.0)
    found.add_argument("--tools", default="memcheck", help="also racecheck, initcheck, synccheck")
    found.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 1)))
    found.add_argument("--limit", type=int, default=0, help="number of cases")
    found.add_argument("--no-compile", action="store_true", help="do not compile ahead")
    found.add_argument("--planted", action="store_true", help=argparse.SUPPRESS)
    found.add_argument("--child", nargs="*", default=None, help=argparse.SUPPRESS)
    args = found.parse_args()
    if args.planted:
        return planted()
    if args.child is not None:
        return child(args.child)
    tool = find_tool()
    if tool is None:
        print("compute-sanitizer is not on this machine")
        figures: dict[str, Any] = {"available": False, "planned": len(CASES)}
    else:
        figures = {"available": True} | measure(args, tool)
    figures["clean"] = figures["available"] and clean(figures)
    target = write_result("sanitizer", figures, args.out, head=describe_kernels())
    print("clean:", figures["clean"], "; results in", target)
    return 0 if figures["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())

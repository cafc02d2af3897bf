"""Run the GPU tests of the kernels and write what each of them said.

    PYTHONPATH=kernels python benchmarks/kernel_checks.py [--minutes 6] [--out DIR] [-- PYTEST ...]

writes ``kernel_checks.json``: determinism over 1,000 repeats, CUDA graphs, torch.compile, streams,
tensors beyond 2^31 elements, gates of the delta error. Every test's outcome is recorded as soon as
it is known, so a run that is out of time keeps what it has. The grid has a script of its own
(kernel_grid.py) and is left out here. The file doubles as the pytest plugin that writes.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = "KERNEL_CHECKS_FILE"
FOLDER = "tests/kernels/gpu"


def pytest_runtest_logreport(report: Any) -> None:
    """Append a test's outcome; pytest calls this in the process that collects the results."""
    path = os.environ.get(TARGET)
    if not path or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when != "call" and report.passed:
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
    if not report.passed:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        # pytest marks the lines of the error itself with an E.
        errors = [x[1:].strip() for x in text.splitlines() if x.startswith("E ")]
        line["why"] = " | ".join(errors)[:600] or text[-300:]
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def command(args: argparse.Namespace) -> list[str]:
    """pytest over the folder; files on processes of their own where pytest-xdist is installed."""
    found = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "kernel_checks"]
    found += ["-p", "no:cacheprovider", args.folder]
    if not args.with_grid:
        found += ["--deselect", f"{args.folder}/test_grid.py"]
    if args.processes > 1 and importlib.util.find_spec("xdist"):
        # A file stays together: two tests of 60 GiB never meet.
        found += ["-n", str(args.processes), "--dist", "loadfile"]
    return found + args.rest


def run(args: argparse.Namespace, lines: Path) -> bool:
    """Run pytest; whether it came to its own end, and in time."""
    path = [str(ROOT / p) for p in ("benchmarks", "kernels")] + [os.environ.get("PYTHONPATH", "")]
    # A test of this script may itself run in a worker of pytest-xdist, which tells its children.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    environment |= {TARGET: str(lines), "PYTHONPATH": os.pathsep.join(path)}
    # The tests ask NVML whether there is a GPU; a mounted driver may lie beside the library path.
    nvml = [str(Path(x).parent) for x in glob.glob("/usr/local/nvidia/lib*/libnvidia-ml.so.1")]
    given = [x for x in [environment.get("LD_LIBRARY_PATH", "")] if x]
    if nvml:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*given, *nvml])
    process = subprocess.Popen(command(args), cwd=ROOT, env=environment, start_new_session=True)
    end = time.monotonic() + args.minutes * 60
    try:
        # 0 and 1: every test has an outcome. Anything else: pytest itself was ended, or broke.
        return process.wait(max(1.0, end - time.monotonic())) in (0, 1)
    except subprocess.TimeoutExpired:
        print("out of time", flush=True)
        return False
    finally:
        # The group is this script's own: pytest, its workers and what tests started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def verdict(lines: Path) -> dict[str, Any]:
    """Counts by file and the tests that did not pass; a test with several reports counts worst."""
    outcomes: dict[str, dict[str, Any]] = {}
    order = ("passed", "skipped", "failed")
    for line in lines.read_text().splitlines() if lines.exists() else []:
        found = json.loads(line)
        known = outcomes.get(found["test"])
        if known is None or order.index(found["outcome"]) > order.index(known["outcome"]):
            outcomes[found["test"]] = found
    files: dict[str, dict[str, int]] = {}
    for name, found in outcomes.items():
        count = files.setdefault(Path(name.split("::")[0]).stem, dict.fromkeys(order, 0))
        count[found["outcome"]] += 1
    return {
        "files": files,
        "not_passed": [x for x in outcomes.values() if x["outcome"] != "passed"],
        "slowest": sorted(outcomes.values(), key=lambda x: -x["seconds"])[:5],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--processes", type=int, default=min(6, os.cpu_count() or 1))
    parser.add_argument("--with-grid", action="store_true", help="also a sample of the grid")
    parser.add_argument("--folder", default=FOLDER)
    parser.add_argument("rest", nargs="*", help="handed to pytest (after --)")
    args = parser.parse_args(argv)
    from machine import describe_kernels

    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "outcomes.jsonl"
        complete = run(args, lines)
        figures = verdict(lines) | {"complete": complete}
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "kernel_checks.json"
    target.write_text(json.dumps(describe_kernels() | figures, indent=1) + "\n")
    print(json.dumps(figures["files"]), "complete:", complete)
    failed = [x for x in figures["not_passed"] if x["outcome"] == "failed"]
    for found in failed:
        print("FAILED", found["test"], found.get("why", ""), sep="\n    ")
    print("results in", target, flush=True)
    passed = sum(count["passed"] for count in figures["files"].values())
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())

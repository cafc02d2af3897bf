"""How long it takes until an error that a retry would meet again has ended the run.

    python benchmarks/fault_bounds.py [--out DIR]

Whole processes, imports included, alone and as two ranks under torchrun; and a job under the
shipped script, which must not be requeued. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fault_lab import cases_scripts, lab
from fault_lab.case import Case, Scene

LIMIT = 10.0


def command(folder: Path, ranks: int, *sets: str) -> tuple[float, int, str]:
    """(seconds, exit code, last line on stderr) of the trainer."""
    words = [sys.executable, "-m", "megatron_patch", "train", "--config", "run.yaml"]
    if ranks > 1:
        words[1:2] = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
                      f"--master-port={lab.free_port()}", "-m"]  # fmt: skip
    words += [word for item in sets for word in ("--set", item)]
    began = time.monotonic()
    answer = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    said = [x for x in answer.stderr.splitlines() if x.startswith("megatron-patch:")]
    return time.monotonic() - began, answer.returncode, said[0][:160] if said else ""


def load() -> float:
    """Processes that want to run, mean of the last minute."""
    return round(os.getloadavg()[0], 1)


def bounds(folder: Path) -> list[dict[str, Any]]:
    """Every case, in order."""
    made = lab.Lab(folder / "lab")
    errors = {
        "unknown key": ("optimizer.learning_rate=3",),
        "value out of range": ("optimizer.lr=-1",),
        "contradiction": ("parallel.tensor_model_parallel_size=3",),
        "dataset missing": ("data.blend.0.path=nowhere",),
        "run directory cannot be made": ("run_dir=/proc/none",),
    }
    rows = []
    for what, sets in errors.items():
        for ranks in (1, 2):
            seconds, code, said = command(made.folder, ranks, *sets)
            expected = 2 if ranks == 1 else 1
            where = "one process" if ranks == 1 else "two ranks under torchrun"
            rows.append({"what": f"{what}, {where}", "seconds": round(seconds, 2), "limit": LIMIT,
                         "load": load(), "code": code,
                         "note": said and f"`{said}`".replace("|", "\\|"),
                         "ok": seconds <= LIMIT and code == expected})  # fmt: skip
            print(rows[-1], flush=True)
    rows.append(in_a_job(folder))
    print(rows[-1], flush=True)
    return rows


def in_a_job(folder: Path) -> dict[str, Any]:
    """The script with a dataset that is not there: one attempt, no requeue, a report."""
    scene = Scene(Case(name="x", group="", inject=lambda s: s.play()), lab.Lab(folder / "job"), {})
    cases_scripts.hide_data(scene)
    job = cases_scripts.Job(scene.lab, "none", ())
    began = time.monotonic()
    outcome = job.drive(None, step=0, limit=100)
    seconds = time.monotonic() - began
    report = (scene.lab.run_dir / "launch" / "report.txt").exists()
    requeues = job.requeues()
    good = outcome.code == 2 and requeues == 0 and report
    return {"what": "dataset missing, whole job", "seconds": round(seconds, 2), "limit": 20.0,
            "load": load(), "code": outcome.code, "note": f"{requeues} requeues, report.txt "
            f"{'written' if report else 'missing'}; with torchrun's start and end",
            "ok": good and seconds <= 20}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", f"{lab.ROOT}:{lab.ROOT / 'kernels'}")
    with tempfile.TemporaryDirectory(prefix="fault-bounds-") as name:
        rows = bounds(Path(name).resolve())
    from machine import write_result

    print(f"wrote {write_result('fault_bounds', {'bounds': rows}, options.out).name}")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""What every node is asked before training starts.

``measure`` runs once a node and writes ``<out>/<node>.json``; that it can is already a check of the
shared file system. ``probe.py`` measures collectives; ``verdict.py`` compares the answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_patch.faults.ledger import node
from megatron_patch.runtime import environment
from megatron_patch.runtime.files import write_whole
from megatron_patch.schema.run import RunConfig

VERSIONS = (
    "python", "torch", "triton", "megatron-core", "transformer-engine", "apex", "numpy",
    "megatron-patch-stable", "nvidia-resiliency-ext", "commit", "cuda", "cudnn", "nccl", "gpu",
    "driver",
)  # fmt: skip
GEMM_SIZE, GEMM_REPEATS = 8192, 20
GB = 1e9


class SharedDirectoryError(ValueError):
    """The directory for the answers cannot be used; the text names it and the remedy."""

    exit_code = 2


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """What the file system refuses becomes one line about ``--out``."""
    try:
        yield
    except OSError as error:
        blocked = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file is in the way" if blocked else error.strerror or str(error)
        raise SharedDirectoryError(
            f"--out {out}: cannot be written ({reason}); name a directory that every node can write"
        ) from error


def measure(run: RunConfig, out: Path) -> dict[str, Any]:
    """Everything about this node; written to ``out/<node>.json``.

    Raises SharedDirectoryError: ``out`` cannot be written.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        clock = _clock(out)
    report = environment.report()
    facts: dict[str, Any] = {
        "node": node(),
        "index": int(os.environ.get("SLURM_NODEID", "0")),
        "versions": {name: report.get(name) for name in VERSIONS},
        "platform": platform.platform(),
        "gpus": list(_gpus()) if run.training.device == "cuda" else [],
        "free": {
            "local_dir": _free_gb(Path(run.cluster.local_dir)),
            "run_dir": _free_gb(out),
            "shm": _free_gb(Path("/dev/shm")),
        },
        **clock,
    }
    with writing(out):
        content = json.dumps(facts, indent=1) + "\n"
        write_whole(out / f"{facts['node']}.json", content, durable=False)
    return facts


def _free_gb(path: Path) -> float | None:
    """Free gigabytes in a directory; None where there is none, or none that can be written."""
    try:
        usable = path.is_dir() and os.access(path, os.W_OK | os.X_OK)
        return shutil.disk_usage(path).free / GB if usable else None
    except OSError:
        return None


def _clock(out: Path) -> dict[str, float]:
    """This node's clock against the file server's, which stamps a file written now.

    The stamp is from some moment of the write: the skew is known to half of ``write_seconds``.
    Nodes pass here at different times, so their clocks are compared through the server's.
    """
    probe = out / f".clock.{node()}"
    before = time.time()
    probe.write_text("x")
    after = time.time()
    stamp = probe.stat().st_mtime
    probe.unlink()
    return {"clock_skew": (before + after) / 2 - stamp, "write_seconds": after - before}


def _gpus() -> Iterator[dict[str, Any]]:
    """Name, memory, uncorrected errors and BF16 matrix rate of every GPU."""
    import torch

    errors = _uncorrected_errors()
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield {
            "index": index,
            "name": torch.cuda.get_device_name(index),
            "total_gb": total / GB,
            "free_gb": free / GB,
            "uncorrected": errors.get(index),
            "tflops": _matrix_rate(index),
        }


def _matrix_rate(index: int) -> float:
    """TFLOP/s of a BF16 matrix product, median of single timings."""
    import torch

    device = torch.device("cuda", index)
    left, right = (
        torch.randn(GEMM_SIZE, GEMM_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    times = []
    with torch.cuda.device(device):
        for repeat in range(GEMM_REPEATS + 5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.matmul(left, right)
            end.record()
            end.synchronize()
            if repeat >= 5:  # clocks have risen
                times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * GEMM_SIZE**3 / statistics.median(times) / 1e12


def _uncorrected_errors() -> dict[int, int | None]:
    """Uncorrected ECC errors since the driver was loaded; empty when nvidia-smi does not say."""
    query = "index,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = re.findall(r"(?m)^ *([0-9]+) *, *(.*?) *$", answer.stdout)
    return {int(index): int(errors) if errors.isdigit() else None for index, errors in rows}

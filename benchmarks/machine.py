"""What a result file says about where it comes from: machine, versions, commit.

Every benchmark stores ``describe()`` beside its figures. The commit is read from git, or, where the
tree travels without its history, from the environment variable ``SOURCE_COMMIT``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "apex", "numpy")


def commit() -> str:
    """Commit of the source tree, with ``+changes`` when files differ from it."""
    given = os.environ.get("SOURCE_COMMIT")
    if given:
        return given

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter, plus CUDA, cuDNN and driver if any."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        import torch
    except ImportError:
        return found
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        if answer.strip():
            found["driver"] = answer.split()[0]
    return found


def describe() -> dict[str, Any]:
    """Machine (GPU or CPU model class, never a host name), versions, commit and UTC time."""
    machine: dict[str, Any] = {"cpu": platform.machine(), "cores": os.cpu_count()}
    try:
        import torch

        if torch.cuda.is_available():
            machine["gpu"] = torch.cuda.get_device_name(0)
            machine["gpus"] = torch.cuda.device_count()
    except ImportError:
        pass
    return {
        "machine": machine,
        "versions": versions(),
        "commit": commit(),
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_result(name: str, figures: dict[str, Any], folder: Path | None = None) -> Path:
    """Write ``<folder or docs/results>/<name>.json`` with ``describe()`` beside the figures."""
    target = (folder or RESULTS) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**describe(), **figures}, indent=1, sort_keys=True) + "\n")
    return target

"""What a run was made with: versions, devices, commit. Saved in run directories and checkpoints.

Never a host name, a user name or an environment variable.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron_patch

DISTRIBUTIONS = (
    "megatron-patch-stable", "torch", "triton", "megatron-core", "nvidia-resiliency-ext",
    "transformer-engine", "apex", "flash-attn-4", "numpy", "psutil",
)  # fmt: skip
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells every rank."""
NVRX, NVRX_CORE = "nvidia-resiliency-ext", (0, 6)
"""A package that Megatron-Core imports wherever it is installed, and the first release it can use
(``megatron/core/dist_checkpointing/strategies/nvrx.py`` of 0.19.2)."""
ROOT = Path(megatron_patch.__file__).resolve().parent.parent


def version(distribution: str) -> str | None:
    """Installed version of a distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def core_version() -> str:
    """The Megatron-Core that is imported; a checkout of Megatron-LM has no distribution."""
    return importlib.import_module("megatron.core.package_info").__version__


def hide_old_nvrx() -> str | None:
    """Let Megatron-Core believe that an nvidia-resiliency-ext too old for it is not installed.

    Importing Megatron-Core 0.19.2 beside a release before 0.6.0 ends with AttributeError
    (``nvidia_resiliency_ext`` has no ``__version__``), and images of NVIDIA bring such releases.
    Nothing of it is used in a rank; ft_launcher is another process. Call it before Megatron's
    import.

    Returns the version that was hidden; None: there was none to hide.
    """
    found = version(NVRX)
    if found is None:
        return None
    parts = tuple(int(p) for p in found.split(".")[:2] if p.isdigit())
    if parts >= NVRX_CORE:
        return None
    sys.modules["nvidia_resiliency_ext"] = None  # type: ignore[assignment]
    return found


GPU_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C",
                "fused_weight_gradient_mlp_cuda")  # fmt: skip
"""What Megatron-Core takes wherever it can be imported, although it computes on GPUs only."""


def hide_gpu_packages() -> list[str]:
    """Let a process that computes on the CPU believe that `GPU_PACKAGES` are not installed.

    Core's norms, its AdamW, its router and more call them with any tensor. Call it before
    Megatron's import; what has been imported already stays.

    Returns names that were hidden, to be taken out of ``sys.modules`` again.
    """
    hidden = [name for name in GPU_PACKAGES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    return hidden


def cudnn_conflict() -> str | None:
    """Which two cuDNN libraries are loaded in the place of one, and how to have one; None: one.

    Transformer Engine loads the cuDNN it finds in CUDNN_HOME or under the CUDA toolkit, and torch
    then ends at its first use of its own.
    """
    import torch

    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    else:
        return None
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = sorted({line.split()[-1] for line in lines if "libcudnn.so" in line})
    own = Path(torch.__file__).resolve().parent.parent / "nvidia" / "cudnn"
    return (
        f"two cuDNN libraries ({reason}; loaded: {', '.join(loaded) or 'unknown'}). Let "
        f"Transformer Engine find torch's: export CUDNN_HOME={own} LD_LIBRARY_PATH={own}/lib "
        "before start"
    )


def report() -> dict[str, Any]:
    """Versions (None: not installed), devices and commit, ready for JSON."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    found |= {"commit": commit()} | {name: version(name) for name in DISTRIBUTIONS}
    found["megatron-patch-stable"] = megatron_patch.__version__
    found["apex_cuda_extensions"] = importlib.util.find_spec("amp_C") is not None
    return found | devices()


def devices() -> dict[str, Any]:
    """CUDA, cuDNN, NCCL, GPU and driver; None where there is none."""
    names = ("cuda", "cudnn", "nccl", "gpu", "gpu_count", "driver")
    found: dict[str, Any] = dict.fromkeys(names)
    try:
        import torch
    except ImportError:
        return found
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["cudnn"] = cudnn_conflict() or str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpu"] = torch.cuda.get_device_name(torch.cuda.current_device())
        found["gpu_count"] = torch.cuda.device_count()
        found["driver"] = driver()
    return found


def driver() -> str | None:
    """Version of the NVIDIA driver, None when nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.split()[0] if answer.returncode == 0 and answer.stdout.split() else None


def commit(root: Path = ROOT) -> str:
    """Git commit of the source tree, ``+changes`` when tracked files differ from it.

    ``SOURCE_COMMIT`` in the environment wins (a container has no history). ``unknown`` for an
    installed package: the repository around its environment is not its own.
    """
    given = os.environ.get("SOURCE_COMMIT")
    if given:
        return given

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=root, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return "unknown"
        head = git("rev-parse", "HEAD")
        return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def short_commit(found: str) -> str:
    """The first 12 digits of `commit`, and whether the tree had changes beside it."""
    return found[:12] + ("+changes" if found.endswith("+changes") else "")


def other_copies() -> list[str]:
    """Other packages named ``megatron_patch`` on sys.path (Pai-Megatron-Patch has that name)."""
    ours = Path(megatron_patch.__file__).resolve().parent
    found = []
    for entry in dict.fromkeys(sys.path):
        package = Path(entry or ".").resolve() / "megatron_patch"
        if package != ours and (package / "__init__.py").is_file():
            found.append(str(package))
    return found


def visible_devices(wanted: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES of a child: GPUs by their number among those that this process sees.

    Raises ValueError: this process sees fewer.
    """
    mine = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not mine:
        return ",".join(map(str, wanted))
    if max(wanted) >= len(mine):
        raise ValueError(
            f"GPU number {max(wanted)} of {len(mine)} in CUDA_VISIBLE_DEVICES={','.join(mine)}: "
            "ask for fewer GPUs, or make more of them visible"
        )
    return ",".join(mine[number] for number in wanted)

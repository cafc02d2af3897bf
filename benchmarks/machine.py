"""What every benchmark shares: where a result comes from, how it is stored, how a run is started.

A result is figures with ``describe()`` beside them: machine, versions, commit, time. The commit is
read from git, or from ``SOURCE_COMMIT`` where the tree travels without its history. Benchmarks of
the kernels add digests of their sources: figures of the same sources, GPU and versions may be
joined (``same_origin``), and a page says when the tree's kernels have changed since.

A file of docs/assets holds the results of one topic by name ("parts"). A script replaces its part
and leaves the others. ``python benchmarks/machine.py FILE ...`` takes the parts of files that were
measured elsewhere into docs/assets.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "assets"
# What runs on the device, and what chooses and launches it.
ON_THE_DEVICE = (
    "triton/", "numerics.py", "philox.py", "stabilizers.py", "configs.py", "configs.json",
    "dispatch.py",
)  # fmt: skip
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


def sources_digest(root: Path = ROOT, *folders: str) -> str:
    """Digest of the Python and the tile tables of the kernels, and of other ``folders``."""
    joined = hashlib.sha256()
    for folder in ("kernels/stable_attention", *folders):
        for path in sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".json")):
            joined.update(path.name.encode() + path.read_bytes())
    return joined.hexdigest()[:16]


def context_digest() -> str:
    """Digest of context parallelism and of the kernels under it."""
    return sources_digest(ROOT, "megatron_patch/context_parallel")


def functions_digest(root: Path = ROOT) -> str:
    """Digest of what is compiled for the device: jitted functions, their constants, tile tables.

    Not of the Python that launches them, which may change and leave all of them alone.
    """
    folder = root / "kernels" / "stable_attention"
    found = [(folder / "configs.json").read_text()]
    for path in folder.rglob("*.py"):
        if path.relative_to(folder).as_posix().startswith(ON_THE_DEVICE):
            found += filter(None, map(_compiled, ast.parse(path.read_text()).body))
    return hashlib.sha256("\x00".join(sorted(found)).encode()).hexdigest()[:16]


def _compiled(node: ast.stmt) -> str:
    """A jitted function without its docstring, or a constant of such functions; "" for others."""
    if isinstance(node, ast.FunctionDef):
        if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            return ""
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return ast.unparse(node)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        text = ast.unparse(node)
        return text if "constexpr" in text else ""
    return ""


def same_origin(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Why the figures of two results do not belong into one file; "" where they do.

    Same kernel sources (`sources_digest`; without one, the same commit), GPU, torch and triton.
    """
    for what, pick in (
        ("kernel sources", lambda r: r.get("kernels") or r.get("commit")),
        ("GPU", lambda r: r["machine"].get("gpu")),
        ("torch", lambda r: r["versions"].get("torch")),
        ("triton", lambda r: r["versions"].get("triton")),
    ):
        if pick(old) != pick(new):
            return f"other {what}: {pick(old)}, now {pick(new)}"
    return ""


def describe_kernels() -> dict[str, Any]:
    """`describe`, with the digests of the kernel sources."""
    return describe() | {"kernels": sources_digest(), "functions": functions_digest()}


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


def write_result(
    name: str,
    figures: dict[str, Any],
    folder: Path | None = None,
    *,
    part: str | None = None,
    head: dict[str, Any] | None = None,
) -> Path:
    """Write ``<folder or docs/assets>/<name>.json``: ``head`` or ``describe()``, and the figures.

    With ``part``, only that entry of the file is replaced. Whole or not at all: hours of a GPU may
    be in the file that it replaces.
    """
    target = (folder or RESULTS) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    result = {**(describe() if head is None else head), **figures}
    if part is not None:
        result = (json.loads(target.read_text()) if target.exists() else {}) | {part: result}
    draft = target.with_name(f"{target.name}.tmp")
    draft.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    draft.replace(target)
    return target


def earlier(
    name: str, part: str, head: dict[str, Any], folders: Iterable[Path | None]
) -> dict[str, Any] | None:
    """The part of the first folder that has it, if its figures may stand beside new ones."""
    for folder in filter(None, folders):
        path = folder / f"{name}.json"
        old = json.loads(path.read_text()).get(part) if path.exists() else None
        if old is not None:
            other = same_origin(old, head)
            print(f"{path}: {f'not resumed: {other}' if other else 'resumed'}", flush=True)
            return None if other else old
    return None


def torchrun(
    arguments: Sequence[str],
    *,
    processes: int,
    log: Path,
    devices: Sequence[int] | None = None,
    threads: int = 2,
    timeout: float | None = None,
) -> int:
    """Exit code of ``processes`` ranks on the GPUs ``devices`` (None: all); output goes to ``log``.

    Raises:
        subprocess.TimeoutExpired: the run took longer than ``timeout`` seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if devices is not None:
        from megatron_patch.runtime.environment import visible_devices

        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(list(devices))
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=out, env=environment, timeout=timeout)
    return done.returncode


def train_command(config: str, keys: Mapping[str, object], extra: Sequence[str] = ()) -> list[str]:
    """Arguments of a training run for `torchrun`; ``extra`` holds more KEY=VALUE."""
    sets = [f"{key}={text_of(value)}" for key, value in keys.items()]
    flags = [part for one in (*sets, *extra) for part in ("--set", one)]
    return ["-m", "megatron_patch", "train", "--config", config, *flags]


def plan_of(config: str, sets: Sequence[str], *, gpu: str, gpus: int) -> Any:
    """The planner's plan of a configuration on one node."""
    from megatron_patch.config import load
    from megatron_patch.planner.hardware import gpu_named
    from megatron_patch.planner.plan import Machine, make_plan, vocabulary_of

    run = load(config, list(sets)).config
    return make_plan(run, Machine(gpu_named(gpu), 1, gpus), vocabulary_of(run, None))


def text_of(value: object) -> str:
    """A value as ``--set`` takes it."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def metrics(run_dir: Path) -> dict[int, dict[str, str]]:
    """metrics.csv by step; of a step that was repeated the last row."""
    with (run_dir / "metrics.csv").open(newline="") as lines:
        return {int(row["step"]): row for row in csv.DictReader(lines)}


def why(log: str) -> str:
    """The end of what torchrun's ranks said: its own account comes last and says nothing."""
    ranks, _, _ = log.partition("torch.distributed.elastic.multiprocessing.errors")
    return ranks.rpartition("Traceback (most recent call last)")[0][-1500:] or log[-1500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="NAME.json of the same topic")
    for path in parser.parse_args().files:
        for part, result in json.loads(path.read_text()).items():
            print(f"{write_result(path.stem, result, part=part, head={})}: {part}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

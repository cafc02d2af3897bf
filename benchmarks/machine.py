"""What a result file says about where it comes from: machine, versions, commit, kernel sources.

Every benchmark stores ``describe()`` beside its figures. The commit is read from git, or, where the
tree travels without its history, from the environment variable ``SOURCE_COMMIT``. Benchmarks of the
kernels add ``sources_digest()``: results of the same sources, GPU and versions may be joined
(``same_origin``), and a page can say that its figures belong to other kernels than the tree's.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import platform
import subprocess
import time
import tokenize
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
# Parts of the library whose edits change neither results nor speed of a call.
BESIDE_THE_KERNELS = ("reference/", "aot.py", "hf.py", "probes.py")
# What runs on the device, and what chooses and launches it. The rest checks arguments and wires
# operators: its edits may cost or save host time, and nothing that a kernel computes.
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


def _code(text: str) -> str:
    """Python source without comments and docstrings, as one string."""
    kept: list[str] = []
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)
    ends = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    opens_statement, in_docstring = True, False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped:
            continue
        in_docstring = opens_statement if token.type == tokenize.STRING else in_docstring
        if not in_docstring:
            kept.append(tokenize.tok_name[token.type] if token.type in ends else token.string)
        opens_statement = token.type in ends
        in_docstring = in_docstring and token.type != tokenize.NEWLINE
    return "\x00".join(kept)


def sources_digest(root: Path = ROOT) -> str:
    """Digest of the kernels and the host code of a call, not of their comments."""
    return _digest(root, lambda name: not name.startswith(BESIDE_THE_KERNELS))


def device_digest(root: Path = ROOT) -> str:
    """Digest of `ON_THE_DEVICE` alone."""
    return _digest(root, lambda name: name.startswith(ON_THE_DEVICE))


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


def _digest(root: Path, counts: Callable[[str], bool]) -> str:
    folder = root / "kernels" / "stable_attention"
    joined = hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
        name = path.relative_to(folder).as_posix()
        if not counts(name):
            continue
        text = path.read_text()
        joined.update(name.encode() + b"\x00")
        joined.update((_code(text) if path.suffix == ".py" else text).encode())
    return joined.hexdigest()[:16]


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
    return describe() | {
        "kernels": sources_digest(),
        "device": device_digest(),
        "functions": functions_digest(),
    }


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


def read_result(path: Path, option: str) -> dict[str, Any]:
    """A result file that ``option`` names; SystemExit with the reason if it is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{option} {path}: not a result: {error}") from None
    if not isinstance(found, dict) or "commit" not in found:
        raise SystemExit(f"{option} {path}: not a result: it names no commit")
    return found


def kept_runs(old: dict[str, Any]) -> dict[str, Any]:
    """``runs`` of an earlier result; each names the commit it was read at."""
    if not isinstance(old.get("runs"), dict):
        raise SystemExit("--keep: a result of something else, it has no runs by name")
    return {name: {"commit": old["commit"]} | run for name, run in old["runs"].items()}


def write_result(name: str, figures: dict[str, Any], folder: Path | None = None) -> Path:
    """Write ``<folder or docs/results>/<name>.json`` with ``describe()`` beside the figures.

    Whole or not at all: hours of a GPU may be in the file that it replaces.
    """
    target = (folder or RESULTS) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.tmp")
    draft.write_text(json.dumps({**describe(), **figures}, indent=1, sort_keys=True) + "\n")
    draft.replace(target)
    return target


def why(log: str) -> str:
    """The end of what torchrun's ranks said: its own account comes last and says nothing."""
    ranks, _, _ = log.partition("torch.distributed.elastic.multiprocessing.errors")
    return ranks.rpartition("Traceback (most recent call last)")[0][-1500:] or log[-1500:]

# ruff: noqa: E402  (attention.py chooses the interpreter before Triton is imported)
"""Time versions of the kernel library side by side in one process; write JSON.

    PYTHONPATH=kernels python benchmarks/compare_trees.py old=../old-checkout new=.
    PYTHONPATH=kernels python benchmarks/compare_trees.py new=. wide=.@forward/128=128,64,8,3,64,0

A version is NAME=FOLDER, a checkout, and optionally tiles of its own: @PASS/HEAD_DIM=FIELDS, with
the fields of `stable_attention.configs.Tile` in order. Each package is copied under a name of its
own, so that all versions live in one process and take turns on the same tensors: from one process
to the next the clocks of a chip differ more than versions do. Rows are those of
attention.py, measured as there; ``difference`` is the largest one of an output to SDPA's on the
same inputs, to see that a version computes attention at all. Writes the part ``speed`` of
compare_trees.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

import attention
import torch
from attention import DEVICE, Shape, measure, sdpa, shapes, tensors
from kernel_tables import PASSES
from machine import Row, fault, in_workers, parser, sources_digest, speed, title, write_result
from torch.nn.attention import SDPBackend

STABILIZERS = ("compensated", "none")
BACKENDS = {"SDPA-cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA-flash": SDPBackend.FLASH_ATTENTION}
BASE = "SDPA-math" if DEVICE == "cpu" else "SDPA-cuDNN"
# A module path, an operator's namespace or a file's package; not the function of the same name.
PACKAGE_NAME = re.compile(r"(?<!\.api import )(?<!def )\bstable_attention\b(?!\()")


@dataclass(frozen=True)
class Version:
    """A checkout under a name, with tiles that replace its own."""

    name: str
    tree: Path
    tiles: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Version:
        """NAME=FOLDER[@PASS/HEAD_DIM=FIELDS ...]; ValueError says what is wrong with it."""
        name, found, rest = text.partition("=")
        folder, *tiles = rest.split("@")
        tree = Path(folder)
        if not found or not name.isidentifier():
            raise ValueError(f"{text!r} is not NAME=FOLDER[@PASS/HEAD_DIM=FIELDS]")
        if not (tree / "kernels" / "stable_attention").is_dir():
            raise ValueError(
                f"{text!r}: {folder!r} has no kernels/stable_attention; name a checkout"
            )
        rows = {}
        for tile in tiles:
            match = re.fullmatch(r"((?:forward|dkdv|dq)/\d+)=(\d+(?:,\d+){3,})", tile)
            if match is None:
                raise ValueError(f"{tile!r} is not PASS/HEAD_DIM=FIELDS, as dq/128=128,64,8,3")
            rows[match[1]] = [int(x) for x in match[2].split(",")]
        return cls(name, tree, rows)

    @property
    def package(self) -> str:
        return f"tree_{self.name}"

    def origin(self) -> dict[str, Any]:
        """What this version is: its sources, wherever they lie and whatever commit is near."""
        return {"kernels": sources_digest(self.tree), "tiles": self.tiles}


def copy_package(version: Version, folder: Path) -> None:
    """The version's package as ``folder``/tree_NAME, every mention of its name replaced."""
    copy = folder / version.package
    source = version.tree / "kernels" / "stable_attention"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*.py"):
        path.write_text(PACKAGE_NAME.sub(version.package, path.read_text()))


def load(version: Version, folder: Path) -> Callable[..., torch.Tensor]:
    """The version's public call, with its tiles."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    api = importlib.import_module(f"{version.package}.api")
    configs = importlib.import_module(f"{version.package}.configs")
    if not hasattr(configs, "shipped_lookup"):
        configs.shipped_lookup = configs.lookup

        def changed(which: str, problem: Any, device: torch.device) -> Any:
            row = version.tiles.get(f"{which}/{problem.d}")
            tile = configs.shipped_lookup(which, problem, device)
            return configs.Tile(*row, tma=tile.tma) if row else tile

        configs.lookup = changed
    return api.stable_attention


def calls(version: Version, folder: Path, shape: Shape) -> Iterator[tuple[str, attention.Call]]:
    run = load(version, folder)
    for stabilizer in STABILIZERS:

        def call(q: Any, k: Any, v: Any, stabilizer: str = stabilizer) -> torch.Tensor:
            return run(q, k, v, causal=shape.causal, stabilizer=stabilizer)

        yield f"{version.name} {stabilizer}", call


def compile_version(job: tuple[Version, Path, list[Shape]]) -> str:
    """Run every shape once in a process of its own, to fill Triton's cache; what went wrong."""
    version, folder, wanted = job
    for shape in wanted:
        *qkv, dout = tensors(shape)
        for name, call in calls(version, folder, shape):
            try:
                torch.autograd.grad(call(*qkv), qkv, dout)
            except Exception as error:
                return f"{name}: {fault(error)}"
    return ""


def differences(table: dict[str, attention.Call], qkv: list[torch.Tensor]) -> dict[str, float]:
    """Largest difference of each output to that of the first name; what fails is left out."""
    outs: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, call in table.items():
            with contextlib.suppress(Exception):  # `measure` says which, and why
                outs[name] = call(*qkv).float()
    first = next(iter(outs.values()))
    return {name: (out - first).abs().max().item() for name, out in outs.items()}


def measured(versions: list[Version], folder: Path, shape: Shape, budget_ms: float) -> Row:
    """A shape's row, as in ``attention.json``: every version and SDPA's backends as peers."""
    backends = {BASE: SDPBackend.MATH} if DEVICE == "cpu" else BACKENDS
    table = {name: sdpa(backend, shape) for name, backend in backends.items()}
    for version in versions:
        table |= dict(calls(version, folder, shape))
    leaves = tensors(shape)
    peers = measure(table, leaves, budget_ms)
    for name, value in differences(table, leaves[:3]).items():
        peers[name]["difference"] = value
    return asdict(shape) | {"peers": peers}


def selected(args: argparse.Namespace) -> list[Shape]:
    wanted = [
        s
        for s in shapes()
        if (not args.dims or s.d in args.dims) and (not args.lengths or s.s in args.lengths)
    ]
    if not wanted:
        raise ValueError(f"no shape of attention.py has d in {args.dims} and s in {args.lengths}")
    return wanted


def main(argv: list[str] | None = None) -> int:
    found = parser(__doc__, Path("runs/compare_trees"))
    found.add_argument("versions", nargs="+", help="NAME=FOLDER[@PASS/HEAD_DIM=FIELDS ...]")
    found.add_argument("--dims", type=int, nargs="*", default=[], help="head dims; all by default")
    found.add_argument("--lengths", type=int, nargs="*", default=[], help="all by default")
    found.add_argument("--budget-ms", type=float, default=15.0, help="per name, pass and round")
    found.add_argument("--minutes", type=float, default=8.0, help="start no shape after this long")
    found.add_argument("--device", default="cuda")
    args = found.parse_args(argv)
    try:
        versions = [Version.parse(text) for text in args.versions]
        if len({v.name for v in versions}) < len(versions):
            raise ValueError(f"two versions of one name in {args.versions}")
        wanted = selected(args)
        if DEVICE == "cuda" and not torch.cuda.is_available():
            raise ValueError("no GPU here; --device=cpu tries the script in the interpreter")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="trees") as text:
        folder = Path(text)
        for version in versions:
            copy_package(version, folder)
            try:
                load(version, folder)
            except Exception as error:
                print(f"error: {version.name} cannot be imported: {error}", file=sys.stderr)
                return 2
        if DEVICE == "cuda":
            each = [(version, folder, wanted) for version in versions]
            limit = {"workers": len(each), "seconds": args.minutes * 60}
            print(*filter(None, in_workers(compile_version, each, **limit)), sep="\n", flush=True)
        for shape in wanted:
            if time.monotonic() - began > args.minutes * 60:
                print(f"out of time: {len(rows)} of {len(wanted)} shapes", flush=True)
                break
            rows.append(measured(versions, folder, shape, args.budget_ms))
            left = (len(wanted) - len(rows)) * (time.monotonic() - began) / len(rows) / 60
            print(f"{len(rows)}/{len(wanted)}, about {left:.1f} min left: {title(rows[-1])}")
            for name, cell in rows[-1]["peers"].items():
                print("  ", name, cell, flush=True)
    means: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for row in rows for name in row["peers"]):
        for which in PASSES:
            if ratios := speed(rows, name, BASE, which):
                mean = round(statistics.geometric_mean(ratios.values()), 4)
                means.setdefault(name, {})[which] = mean
    figures = {
        "compared": {v.name: v.origin() for v in versions},
        "complete": len(rows) == len(wanted),
        f"speed over {BASE}": means,
        "rows": rows,
    }
    print(json.dumps(means, indent=1))
    print(f"wrote {write_result('compare_trees', figures, args.out, part='speed')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

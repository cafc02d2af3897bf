# ruff: noqa: E402  (attention.py chooses the interpreter before Triton is imported)
"""Time versions of the kernel library side by side in one process; write JSON.

    PYTHONPATH=kernels python benchmarks/compare_trees.py old=../old-checkout new=.
    PYTHONPATH=kernels python benchmarks/compare_trees.py new=. wide=.@forward/128=128,64,8,3,64,0

A version is NAME=FOLDER, a checkout, and optionally tiles of its own: @PASS/HEAD_DIM=FIELDS, with
the fields of `stable_attention.configs.Tile` in order. Each package is copied under a name of its
own, so that all versions live in one process and take turns on the same tensors: from one process
to the next the clocks of a chip differ more than versions do. Medians of CUDA-event intervals as in
attention.py, over rounds in alternating order; ``error`` is the largest difference of an output to
SDPA's on the same inputs, to see that a version computes attention at all.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib
import json
import math
import multiprocessing
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import attention
import torch
from attention import DEVICE, Shape, intervals, sdpa, shapes, synchronize, tensors
from machine import RESULTS, describe, sources_digest
from torch.nn.attention import SDPBackend

STABILIZERS = ("compensated", "none")
BACKENDS = {"SDPA-cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA-flash": SDPBackend.FLASH_ATTENTION}
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
            match = re.fullmatch(r"((?:forward|dkdv|dq)/\d+)=(\d+(?:,\d+)+)", tile)
            if match is None:
                raise ValueError(f"{tile!r} is not PASS/HEAD_DIM=FIELDS, as dq/128=128,64,8,3")
            rows[match[1]] = [int(x) for x in match[2].split(",")]
        return cls(name, tree, rows)

    @property
    def package(self) -> str:
        return f"tree_{self.name}"

    def origin(self) -> dict[str, Any]:
        """What this version is, without where it lies on this machine."""
        command = ["git", "-C", str(self.tree), "rev-parse", "--short", "HEAD"]
        commit = None
        with contextlib.suppress(OSError):
            commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
        return {"commit": commit, "kernels": sources_digest(self.tree), "tiles": self.tiles}


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


def compile_version(version: Version, folder: Path, wanted: list[Shape]) -> str:
    """Run every shape once in a process of its own, to fill Triton's cache; what went wrong."""
    for shape in wanted:
        *qkv, dout = tensors(shape)
        for name, call in calls(version, folder, shape):
            try:
                torch.autograd.grad(call(*qkv), qkv, dout)
            except Exception as error:
                return f"{name}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compare(
    table: dict[str, attention.Call], leaves: list[torch.Tensor], *, rounds: int, budget_ms: float
) -> dict[str, dict[str, Any]]:
    """{name: {"forward": ms, "backward": ms, "error": largest difference to the first name}}."""
    *qkv, dout = leaves
    found: dict[str, dict[str, Any]] = {}
    live: dict[str, torch.Tensor] = {}
    reference: torch.Tensor | None = None
    for name, call in table.items():
        try:
            live[name] = call(*qkv)
            torch.autograd.grad(live[name], qkv, dout, retain_graph=True)
        except Exception as error:
            live.pop(name, None)
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:160]}"}
            continue
        out = live[name].detach().float()
        reference = out if reference is None else reference
        found[name] = {"error": (out - reference).abs().max().item()}
    times: dict[str, dict[str, list[float]]] = {
        name: {"forward": [], "backward": []} for name in live
    }
    for i in range(rounds):
        for name in list(live) if i % 2 == 0 else list(reversed(live)):
            call, out = table[name], live[name]
            times[name]["forward"] += intervals(lambda call=call: call(*qkv), budget_ms)
            times[name]["backward"] += intervals(
                lambda out=out: torch.autograd.grad(out, qkv, dout, retain_graph=True), budget_ms
            )
        synchronize()
    for name, both in times.items():
        found[name] |= {which: round(statistics.median(x), 4) for which, x in both.items()}
    return found


def speeds(rows: list[dict[str, Any]], base: str) -> dict[str, dict[str, float]]:
    """Geometric mean over the shapes of ``base``'s time / a name's time, {name: {pass: ratio}}."""
    logs: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for name, cell in row["times"].items():
            for which in ("forward", "backward"):
                if which in cell and which in row["times"].get(base, {}):
                    ratio = row["times"][base][which] / cell[which]
                    logs.setdefault(name, {}).setdefault(which, []).append(math.log(ratio))
    return {
        name: {which: round(math.exp(statistics.mean(x)), 4) for which, x in both.items()}
        for name, both in logs.items()
    }


def selected(args: argparse.Namespace) -> list[Shape]:
    wanted = [
        s
        for s in shapes()
        if (not args.dims or s.d in args.dims) and (not args.lengths or s.s in args.lengths)
    ]
    if not wanted:
        raise ValueError(f"no shape of attention.py has d in {args.dims} and s in {args.lengths}")
    return wanted


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("versions", nargs="+", help="NAME=FOLDER[@PASS/HEAD_DIM=FIELDS ...]")
    found.add_argument("--out", type=Path, default=RESULTS / "compare_trees.json")
    found.add_argument("--dims", type=int, nargs="*", default=[], help="head dims; all by default")
    found.add_argument("--lengths", type=int, nargs="*", default=[], help="all by default")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--budget-ms", type=float, default=10.0, help="per name, pass and round")
    found.add_argument("--minutes", type=float, default=8.0, help="start no shape after this long")
    found.add_argument("--device", default="cuda")
    return found


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        versions = [Version.parse(text) for text in args.versions]
        if len({v.name for v in versions}) < len(versions):
            raise ValueError(f"two versions of one name in {args.versions}")
        wanted = selected(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    base = "SDPA-math" if DEVICE == "cpu" else "SDPA-cuDNN"
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
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(len(versions), mp_context=context) as pool:
                jobs = [pool.submit(compile_version, v, folder, wanted) for v in versions]
                print(*filter(None, (job.result() for job in jobs)), sep="\n", flush=True)
        for shape in wanted:
            if time.monotonic() - began > args.minutes * 60:
                print(f"out of time: {len(rows)} of {len(wanted)} shapes", flush=True)
                break
            backends = {base: SDPBackend.MATH} if DEVICE == "cpu" else BACKENDS
            table = {name: sdpa(backend, shape) for name, backend in backends.items()}
            for version in versions:
                table |= dict(calls(version, folder, shape))
            times = compare(table, tensors(shape), rounds=args.rounds, budget_ms=args.budget_ms)
            rows.append(asdict(shape) | {"times": times})
            left = (len(wanted) - len(rows)) * (time.monotonic() - began) / len(rows) / 60
            print(f"{len(rows)}/{len(wanted)}, about {left:.1f} min left: {shape}", flush=True)
            for name, cell in times.items():
                print("  ", name, cell, flush=True)
    result = describe() | {
        "versions_compared": {v.name: v.origin() for v in versions},
        "complete": len(rows) == len(wanted),
        "speed_over": base,
        "speeds": speeds(rows, base),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["speeds"], indent=1), "results in", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

# ruff: noqa: E402  (compare_trees.py chooses the interpreter before Triton is imported)
"""How long the host takes to launch attention: versions of the kernel library and SDPA's backends.

    PYTHONPATH=kernels python benchmarks/host_time.py old=../old-checkout new=.

Figures of attention.py leave this out: there the GPU has more to do than the host. Where it has
not (short sequences, small batches, many small layers), this is what a call costs. q, k and v are
side by side as a projection leaves them, on lengths at which every kernel is shorter than its
launch; calls are queued and not waited for, and all names take turns in one process. ``waited`` is
the time until the GPU had done them too: much above the host's, and the host was not the slower
one. Writes host_time.json.

With ``--without-launches`` kernels are not launched at all, and what is left is the library's own
Python, on any machine (a CPU has no descriptors to make). Writes host_time_python.json.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import torch
from attention import DEVICE, Call, Shape, sdpa
from compare_trees import BACKENDS, Version, calls, copy_package, load
from machine import write_result
from triton.compiler import CompiledKernel

SHAPE = Shape("host", b=1, s=128, h=12, kv_heads=12, d=64, dv=64, causal=True)
KERNELS = {
    "forward": ("forward_kernel",),
    "preprocess": ("preprocess_kernel",),
    "backward": ("dkdv_kernel", "dq_kernel"),
}


class Nothing(CompiledKernel):
    """A compiled kernel that is no kernel; a launch of it does nothing."""

    def __init__(self) -> None:
        pass

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments: None


class NoKernel:
    """Stands where a kernel does, and is as quickly compiled."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.pre_run_hooks = kernel.arg_names, kernel.pre_run_hooks

    def __getitem__(self, grid: object) -> Callable[..., CompiledKernel]:
        return lambda *arguments, **named: Nothing()


def leave_out_launches(version: Version, folder: Path) -> None:
    load(version, folder)
    for name, kernels in KERNELS.items():
        module = importlib.import_module(f"{version.package}.triton.{name}")
        for kernel in kernels:
            assert hasattr(module, kernel), kernel
            setattr(module, kernel, NoKernel(getattr(module, kernel)))


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(host time, time until the device had done it) of one call, of so many queued."""
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    queued = time.perf_counter() - start
    synchronize()
    return queued / repeats, (time.perf_counter() - start) / repeats


def measured(table: dict[str, Call], rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians over rounds, in microseconds, of forward and of forward and backward."""
    rows = (SHAPE.b, SHAPE.s, SHAPE.h)
    whole = torch.randn((*rows, 3 * SHAPE.d), device=DEVICE, dtype=torch.bfloat16)
    qkv = [x.requires_grad_() for x in whole.split(SHAPE.d, -1)]
    dout = torch.randn((*rows, SHAPE.d), device=DEVICE, dtype=torch.bfloat16)
    passes: dict[str, Callable[[Call], object]] = {
        "forward": lambda call: call(*qkv),
        "both": lambda call: torch.autograd.grad(call(*qkv), qkv, dout),
    }
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        for name, call in table.items():
            for which, run in passes.items():
                took = seconds(lambda run=run, call=call: run(call), repeats)  # type: ignore[misc]
                if turn:  # the first compiles, and connects what connects on first use
                    found.setdefault((name, which), []).append(took)
    cells: dict[str, dict[str, float]] = {}
    for (name, which), times in found.items():
        host, waited = (1e6 * statistics.median(t) for t in zip(*times, strict=True))
        cells.setdefault(name, {}).update({which: host, f"{which}_waited": waited})
    return cells


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="+", help="NAME=FOLDER, a checkout each")
    parser.add_argument("--without-launches", action="store_true", help="the Python around them")
    parser.add_argument("--rounds", type=int, default=30, help="every name's turns")
    parser.add_argument("--calls", type=int, default=20, help="calls queued in a turn")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    if min(args.rounds, args.calls) < 1:
        parser.error("--rounds and --calls start at 1")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device=cpu tries the script in the interpreter")
    try:
        versions = [Version.parse(text) for text in args.versions]
    except ValueError as error:
        parser.error(str(error))
    if len({v.name for v in versions}) < len(versions):
        parser.error(f"two versions of one name in {args.versions}")
    with tempfile.TemporaryDirectory(prefix="trees") as text:
        table: dict[str, Call] = {}
        if DEVICE == "cuda" and not args.without_launches:
            table |= {name: sdpa(backend, SHAPE) for name, backend in BACKENDS.items()}
        for version in versions:
            copy_package(version, Path(text))
            if args.without_launches:
                leave_out_launches(version, Path(text))
            table |= dict(calls(version, Path(text), SHAPE))
        cells = measured(table, args.rounds, args.calls)
    for name, cell in cells.items():
        print(f"{name:24}", {which: round(value) for which, value in cell.items()}, flush=True)
    figures = {
        "compared": {v.name: v.origin() for v in versions},
        "shape": {name: getattr(SHAPE, name) for name in "bshd"},
        "microseconds": cells,
    }
    name = "host_time_python" if args.without_launches else "host_time"
    print(f"wrote {write_result(name, figures, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

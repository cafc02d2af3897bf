# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)
"""Time attention forward and backward beside its peers on one GPU.

    PYTHONPATH=kernels python benchmarks/attention.py [--minutes 8] [--out DIR] [--resume DIR]
    PYTHONPATH=kernels python benchmarks/attention.py "--also=FA4,compensated fa4"  # more peers
    PYTHONPATH=kernels python benchmarks/attention.py --host       # what a launch costs the host
    PYTHONPATH=kernels python benchmarks/attention.py --float32    # beside attention in float32
    PYTHONPATH=kernels python benchmarks/attention.py --features   # what sm_90 serves portably
    PYTHONPATH=kernels python benchmarks/attention.py --plot       # of the stored result

Writes the parts ``speed``, ``host``, ``float32`` and ``features`` of docs/assets/attention.json.
Peers run in the same process on the same random tensors: SDPA-cuDNN, SDPA-flash, our own
stabilizers, and FlexAttention, which costs every shape a compilation and therefore comes in a
second pass (beside ``none``, timed again). A run measures what is missing in an earlier result of
the same kernels, GPU and versions in ``--out`` or ``--resume``.

Times are medians of CUDA-event intervals over two rounds, in opposite orders, so that no peer gets
only a cool chip. Before each interval the GPU is given idle work, so that launches are queued as in
a training step; an interval whose ``host`` time exceeds ``queued_ms`` contains host time.

``--host`` leaves the GPU out: q, k and v lie side by side as a projection leaves them, on lengths
at which every kernel is shorter than its launch, and calls are queued and not waited for.
``waited`` is the time until the GPU had done them too: much above the host's, and the host was not
the slower one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / p) for p in ("benchmarks", "tests")]
# One compiler thread a process: our worker processes are the parallelism.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
DEVICE = "cpu" if "--device=cpu" in sys.argv or "cpu" in sys.argv else "cuda"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter_shim

    interpreter_shim.install_on_import()

import torch
import torch.nn.functional as F
from kernel_tables import DEFAULT, GRIDS, OURS, PASSES, kernel_speed, plot
from machine import (
    RESULTS,
    describe_kernels,
    earlier,
    fault,
    in_workers,
    interval,
    markdown,
    parser,
    write_result,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from stable_attention import fa4, stable_attention
from stable_attention.problem import BACKWARDS

TOKENS, HIDDEN = 16384, 2048
# About 2.4 ms at 1.98 GHz: longer than any peer needs to queue one pass, on a slow host too.
QUEUE_CYCLES = 4_800_000
FLEX = "FlexAttention"
# Of this command line, which worker processes have too.
ALSO = next((x[7:].split(",") for x in sys.argv if x.startswith("--also=")), [])
LENGTHS = (4096, 16384, 1024, 8192, 2048)


@dataclass(frozen=True)
class Shape:
    """One problem: [b, s, h, d] queries, kv_heads keys and values, dv value head dim."""

    grid: str
    b: int
    s: int
    h: int
    kv_heads: int
    d: int
    dv: int
    causal: bool


def shapes() -> Iterator[Shape]:
    """The grid of docs/performance.md, the shapes that say most first."""
    if DEVICE == "cpu":
        yield Shape(GRIDS[0], 1, 32, 1, 1, 16, 16, True)
        yield Shape(GRIDS[2], 1, 32, 2, 1, 16, 16, False)
        return

    def hidden(d: int, s: int, causal: bool) -> Shape:
        return Shape(GRIDS[0], TOKENS // s, s, HIDDEN // d, HIDDEN // d, d, d, causal)

    for s in LENGTHS:
        for d in (128, 64):
            yield from (hidden(d, s, causal) for causal in (True, False))
    for s in (4096, 16384, 8192, 32768):
        yield Shape(GRIDS[2], max(1, TOKENS // s), s, 64, 8, 128, 128, True)
    for s in LENGTHS:
        yield Shape(GRIDS[1], TOKENS // s, s, 16, 16, 192, 128, True)
        yield from (hidden(256, s, causal) for causal in (True, False))


Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sdpa(backend: SDPBackend, shape: Shape) -> Call:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=shape.h != shape.kv_heads
            )
        return out.transpose(1, 2)

    return run


def _visible(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def flex(shape: Shape) -> Call:
    """FlexAttention, compiled for this shape alone."""
    from torch._functorch import config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Every shape is a recompilation of one function: past the limit torch would run it uncompiled.
    torch._dynamo.reset()
    # One forward, many timed backwards: they must not reuse each other's saved tensors.
    functorch.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if shape.causal:
        mask = create_block_mask(_visible, None, None, shape.s, shape.s, device=DEVICE)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        gqa = shape.h != shape.kv_heads
        return compiled(q, k, v, block_mask=mask, enable_gqa=gqa).transpose(1, 2)

    return run


def ours(name: str, shape: Shape) -> Call:
    """``name``: a stabilizer, and after it how O_lo is stored or whose backward pass runs."""
    stabilizer, _, rest = name.partition(" ")
    how: dict[str, Any] = {"stabilizer": stabilizer, "deterministic": rest not in BACKWARDS}
    if rest:
        how["backward" if rest in BACKWARDS else "o_lo"] = rest

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = stable_attention(q, k, v, causal=shape.causal, **how)
        assert isinstance(out, torch.Tensor)
        return out

    return run


def peers(shape: Shape) -> dict[str, Call]:
    """Name -> attention over [b, s, h, d] tensors; the first pass."""
    found = {name: ours(name, shape) for name in (*OURS, *ALSO) if name != "FA4"}
    if "FA4" in ALSO:
        how: dict[str, Any] = {"scale": shape.d**-0.5, "window": (-1, 0 if shape.causal else -1)}
        found["FA4"] = functools.partial(fa4.attention, deterministic=False, **how)
    if DEVICE == "cpu":
        return {"SDPA-math": sdpa(SDPBackend.MATH, shape)} | found
    return {
        "SDPA-cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, shape),
        "SDPA-flash": sdpa(SDPBackend.FLASH_ATTENTION, shape),
    } | found


def flex_peers(shape: Shape) -> dict[str, Call]:
    """The second pass."""
    return {FLEX: flex(shape), "none, again": ours("none", shape)}


def tensors(shape: Shape) -> list[torch.Tensor]:
    """q, k, v (leaves) and dO, random."""
    size = ((shape.h, shape.d), (shape.kv_heads, shape.d), (shape.kv_heads, shape.dv))
    q, k, v = (
        torch.randn(shape.b, shape.s, *hd, device=DEVICE, dtype=torch.bfloat16) for hd in size
    )
    dout = torch.randn(shape.b, shape.s, shape.h, shape.dv, device=DEVICE, dtype=torch.bfloat16)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def intervals(run: Callable[[], object], budget_ms: float) -> list[float]:
    """Timed repeats of ``run`` within a time budget, after a warm-up."""
    if DEVICE == "cuda":
        run()
        run()
    first = interval(run, cuda=DEVICE == "cuda")
    synchronize()
    repeats = max(4, min(30, int(budget_ms / max(first(), 1e-3))))
    if DEVICE == "cpu":
        return [first()]
    pending = [interval(run, queue=QUEUE_CYCLES) for _ in range(repeats)]
    synchronize()
    return [elapsed() for elapsed in pending]


def queued_ms() -> float:
    """How long the idle work before an interval takes."""
    if DEVICE == "cpu":
        return 0.0
    torch.cuda._sleep(QUEUE_CYCLES)
    found = interval(lambda: torch.cuda._sleep(QUEUE_CYCLES))
    torch.cuda.synchronize()
    return round(found(), 3)


def one_round(call: Call, leaves: list[torch.Tensor], budget_ms: float) -> dict[str, Any]:
    """Forward and backward intervals, peak memory and host time of one peer."""
    *qkv, dout = leaves
    base = peak = 0
    synchronize()
    if DEVICE == "cuda":
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(call(*qkv), qkv, dout)
    if DEVICE == "cuda":
        peak = torch.cuda.max_memory_allocated() - base
    forward = intervals(lambda: call(*qkv), budget_ms)
    out = call(*qkv)
    backward = intervals(
        lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True), budget_ms * 2
    )
    synchronize()
    began = time.perf_counter()
    call(*qkv)
    host = (time.perf_counter() - began) * 1e3
    return {"forward": forward, "backward": backward, "peak": peak, "host": host}


def measure(
    table: dict[str, Call], leaves: list[torch.Tensor], budget_ms: float
) -> dict[str, dict[str, Any]]:
    """{peer: {"forward": ms, "backward": ms, "peak_mib": MiB, "host": ms} or {"error": why}}."""
    cells: dict[str, dict[str, Any]] = {}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in table}
    for names in (list(table), list(reversed(table))):
        for name in names:
            if name in cells:
                continue
            try:
                rounds[name].append(one_round(table[name], leaves, budget_ms))
            except Exception as error:
                cells[name] = {"error": fault(error)}
                if "CUDA error" in cells[name]["error"]:
                    raise
    for name, found in rounds.items():
        if name in cells:
            continue
        times = {p: [x for r in found for x in r[p]] for p in PASSES}
        cells[name] = {p: round(statistics.median(x), 4) for p, x in times.items()}
        # The second round's: the first one also holds what a peer sets up once.
        cells[name]["peak_mib"] = round(found[-1]["peak"] / 2**20, 1)
        cells[name]["host"] = round(min(r["host"] for r in found), 3)
    return cells


def compile_ahead(job: tuple[Shape, Callable[[Shape], dict[str, Call]]]) -> str:
    """Fill the compilers' caches for a shape, in a worker process; returns what went wrong."""
    shape, table_of = job
    try:
        *qkv, dout = tensors(shape)
        for name, call in table_of(shape).items():
            if not name.startswith(("SDPA", "FA4")) and "fa4" not in name:  # no cache on disk
                torch.autograd.grad(call(*qkv), qkv, dout)
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    except Exception as error:
        return f"{shape}: {fault(error)}"
    return ""


class Run:
    """The result under way: rows by shape, saved after every one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.end = time.monotonic() + args.minutes * 60
        self.wanted = list(shapes())
        self.head = describe_kernels() | {"queued_ms": queued_ms()}
        self.rows: dict[Shape, dict[str, Any]] = {}
        old = earlier("attention", "speed", self.head, (args.out, args.resume))
        for row in (old or {"rows": []})["rows"]:
            self.rows[Shape(**{k: v for k, v in row.items() if k != "peers"})] = row["peers"]

    def late(self) -> bool:
        return time.monotonic() > self.end

    def save(self) -> dict[str, Any]:
        rows = [asdict(s) | {"peers": self.rows[s]} for s in self.wanted if s in self.rows]
        figures = {
            "rows": rows,
            "complete": all(self.has(s, DEFAULT) for s in self.wanted),
        }
        write_result("attention", figures, self.args.out, part="speed", head=self.head)
        return figures

    def has(self, shape: Shape, name: str) -> bool:
        return name in self.rows.get(shape, {})

    def measure(self, shape: Shape, table: dict[str, Call]) -> None:
        cells = measure(table, tensors(shape), self.args.budget_ms)
        self.rows.setdefault(shape, {}).update(cells)
        self.save()
        brief = {n: c.get("error") or (c["forward"], c["backward"]) for n, c in cells.items()}
        left = (self.end - time.monotonic()) / 60
        done = f"{len(self.rows)}/{len(self.wanted)}, {left:.1f} min left"
        print(f"{done}: {shape} {brief}", flush=True)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()

    def one_pass(self, name: str, table_of: Callable[[Shape], dict[str, Call]]) -> None:
        """Compile and measure tables of the shapes that lack ``name``, until time runs out."""
        todo = [s for s in self.wanted if not self.has(s, name)]
        if not todo or self.late():
            return
        if self.args.workers > 0:
            began = time.monotonic()
            jobs = [(shape, table_of) for shape in todo]
            limit = max(1.0, self.end - 60 - began)
            faults = in_workers(compile_ahead, jobs, workers=self.args.workers, seconds=limit)
            for found in filter(None, faults):
                print("compile ahead:", found, flush=True)
            print(f"compiled ahead in {time.monotonic() - began:.0f} s", flush=True)
        for shape in todo:
            if not self.late():
                self.measure(shape, table_of(shape))


FEATURE_SHAPE = Shape("features", 4, 4096, 16, 16, 128, 128, causal=True)
HOST_SHAPE = Shape("host", b=1, s=128, h=12, kv_heads=12, d=64, dv=64, causal=True)


def _queued(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(host time, time until the device had done it) of one call, of so many queued; seconds."""
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    queued = time.perf_counter() - start
    synchronize()
    return queued / repeats, (time.perf_counter() - start) / repeats


def host_times(table: dict[str, Call], *, rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians over rounds, in microseconds, of forward and of forward and backward ("both")."""
    rows, d = (HOST_SHAPE.b, HOST_SHAPE.s, HOST_SHAPE.h), HOST_SHAPE.d
    whole = torch.randn((*rows, 3 * d), device=DEVICE, dtype=torch.bfloat16)
    qkv = [x.requires_grad_() for x in whole.split(d, -1)]
    dout = torch.randn((*rows, d), device=DEVICE, dtype=torch.bfloat16)
    passes: dict[str, Callable[[Call], object]] = {
        "forward": lambda call: call(*qkv),
        "both": lambda call: torch.autograd.grad(call(*qkv), qkv, dout),
    }
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        for name, call in table.items():
            for which, run in passes.items():
                took = _queued(lambda run=run, call=call: run(call), repeats)  # type: ignore[misc]
                if turn:  # the first compiles, and connects what connects on first use
                    found.setdefault((name, which), []).append(took)
    cells: dict[str, dict[str, float]] = {}
    for (name, which), times in found.items():
        host, waited = (1e6 * statistics.median(t) for t in zip(*times, strict=True))
        cells.setdefault(name, {}).update({which: host, f"{which}_waited": waited})
    return cells


def host(args: argparse.Namespace) -> None:
    """The part ``host``."""
    cells = host_times(peers(HOST_SHAPE), rounds=30, repeats=20)
    for name, cell in cells.items():
        print(f"{name:24}", {which: round(value) for which, value in cell.items()}, flush=True)
    shape = {name: getattr(HOST_SHAPE, name) for name in "bshd"}
    figures = {"shape": shape, "microseconds": cells}
    print(write_result("attention", figures, args.out, part="host", head=describe_kernels()))


def float32(args: argparse.Namespace) -> None:
    """The part ``float32``: `compensated` beside PyTorch's fused attention on float32 copies."""
    b, s, h, d = 64, 1024, 12, 64
    shape = Shape("float32", b, s, h, h, d, d, causal=True)
    exact = sdpa(SDPBackend.EFFICIENT_ATTENTION if DEVICE == "cuda" else SDPBackend.MATH, shape)
    table: dict[str, Call] = {
        "compensated": ours("compensated", shape),
        "torch": lambda *qkv: exact(*(x.float() for x in qkv)).bfloat16(),
    }
    cells = measure(table, tensors(shape), args.budget_ms)
    times = {n: {"both_ms": c["forward"] + c["backward"]} for n, c in cells.items()}
    figures = {"shape": [b, s, h, d], "times": times}
    print(json.dumps(figures, indent=1))
    print(write_result("attention", figures, args.out, part="float32", head=describe_kernels()))


FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 30.0},
    "softcap in a window": {"softcap": 30.0, "window": (1023, 0)},
    "dropout": {"dropout_p": 0.1},
    "dropout in a window": {"dropout_p": 0.1, "window": (1023, 0)},
    "O_lo in int8": {"o_lo": "int8"},
    "O_lo in fp32": {"o_lo": "fp32"},
    **{x: {"stabilizer": x} for x in ("dynamic_max", "projected")},
}
"""Calls of which sm_90 leaves a pass to the portable kernels."""


def features(args: argparse.Namespace) -> None:
    """The part ``features``: calls of `FEATURES` beside the same without the feature."""
    shape = next(shapes()) if DEVICE == "cpu" else FEATURE_SHAPE
    rows: list[dict[str, Any]] = []
    for name, keys in FEATURES.items():
        plain = {"causal": True} | {k: v for k, v in keys.items() if k == "window"}
        table = {"with": plain | keys, "without": plain}
        calls = {k: functools.partial(stable_attention, **v) for k, v in table.items()}
        rows.append({"feature": name, "peers": measure(calls, tensors(shape), args.budget_ms)})
        print(rows[-1], flush=True)
        figures = {"shape": asdict(shape), "rows": rows}
        write_result("attention", figures, args.out, part="features", head=describe_kernels())


def main() -> int:
    found = parser(__doc__)
    found.add_argument("--resume", type=Path, default=None, help="folder of an earlier result")
    found.add_argument("--device", default="cuda", help="cpu: tiny, in Triton's interpreter")
    found.add_argument("--minutes", type=float, default=8.0, help="stop after this long")
    found.add_argument("--budget-ms", type=float, default=40.0, help="per peer, pass and round")
    found.add_argument("--workers", type=int, default=max(1, min(15, (os.cpu_count() or 2) - 1)))
    found.add_argument("--also", metavar="PEERS", help="more, with commas: FA4,compensated fa4")
    found.add_argument("--host", action="store_true", help="host time of a call instead")
    found.add_argument("--float32", action="store_true", help="attention in float32 instead")
    found.add_argument("--features", action="store_true", help="portable features instead")
    found.add_argument("--plot", action="store_true", help="draw the stored result instead")
    args = found.parse_args()
    if args.plot:
        stored = json.loads((RESULTS / "attention.json").read_text())["speed"]
        plot(stored, args.out / "attention.png")
        return 0
    if DEVICE == "cuda" and not torch.cuda.is_available():
        found.error("no GPU here; --device=cpu tries the script in the interpreter")
    for part in (host, float32, features):
        if getattr(args, part.__name__):
            part(args)
            return 0
    run = Run(args)
    run.one_pass(DEFAULT, peers)
    if DEVICE == "cuda":
        run.one_pass(FLEX, flex_peers)
    result = run.head | run.save()
    print(markdown([result], kernel_speed({"speed": result})))
    return 0


if __name__ == "__main__":
    sys.exit(main())

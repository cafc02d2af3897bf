# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)
"""Time attention forward and backward beside its peers on one GPU; write JSON, a table and a plot.

    PYTHONPATH=kernels python benchmarks/attention.py [--minutes 8] [--out DIR] [--resume DIR]
    PYTHONPATH=kernels python benchmarks/attention.py --render-only    # table and plot only

Results go to docs/results/attention.{json,md,png}. Peers run in the same process on the same random
tensors: SDPA-cuDNN, SDPA-flash, our own stabilizers, and FlexAttention, which costs every shape a
compilation and therefore comes in a second pass (beside ``none``, timed again). A run that finds an
``attention.json`` of the same kernels, GPU and versions in ``--out`` or ``--resume`` measures what
is missing there.
Times are medians of CUDA-event intervals over two rounds, in opposite orders, so that no peer gets
only a cool chip; before each interval the GPU is given idle work, so that launches are queued as in
a training step (``host`` is the time the CPU spends on a forward call; where it exceeds
``queued_ms`` the interval contains host time, and the page says so).

TFLOP/s count 4 b h sq sk (d + dv) / 2 operations forward, half of that under a causal mask, and 2.5
times as many backward, recomputation not counted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
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
from attention_report import GRIDS, plot, render
from kernel_goals import OURS, goals, summary
from machine import RESULTS, describe_kernels, same_origin
from torch.nn.attention import SDPBackend, sdpa_kernel

from stable_attention import stable_attention

TOKENS, HIDDEN = 16384, 2048
# About 2.4 ms at 1.98 GHz: longer than any peer needs to queue one pass, on a slow host too.
QUEUE_CYCLES = 4_800_000
FLEX = "FlexAttention"
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
    """The grid of docs/kernels.md, the shapes that say most first."""
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
    stabilizer, _, residual = name.partition(" ")

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = stable_attention(
            q,
            k,
            v,
            causal=shape.causal,
            stabilizer=stabilizer,
            residual=residual or "bf16",
            deterministic=True,
        )
        assert isinstance(out, torch.Tensor)
        return out

    return run


def peers(shape: Shape) -> dict[str, Call]:
    """Name -> attention over [b, s, h, d] tensors; the first pass."""
    found = {name: ours(name, shape) for name in OURS}
    if DEVICE == "cpu":
        return {"SDPA-math": sdpa(SDPBackend.MATH, shape)} | found
    return {
        "SDPA-cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, shape),
        "SDPA-flash": sdpa(SDPBackend.FLASH_ATTENTION, shape),
    } | found


def tensors(shape: Shape) -> list[torch.Tensor]:
    """q, k, v (leaves) and dO, random."""
    size = ((shape.h, shape.d), (shape.kv_heads, shape.d), (shape.kv_heads, shape.dv))
    q, k, v = (
        torch.randn(shape.b, shape.s, *hd, device=DEVICE, dtype=torch.bfloat16) for hd in size
    )
    dout = torch.randn(shape.b, shape.s, shape.h, shape.dv, device=DEVICE, dtype=torch.bfloat16)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def interval(run: Callable[[], object], *, queued: bool = True) -> Callable[[], float]:
    """Start one timed run; the returned function gives its milliseconds after a synchronize."""
    if DEVICE == "cpu":
        began = time.perf_counter()
        run()
        elapsed = (time.perf_counter() - began) * 1e3
        return lambda: elapsed
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if queued:
        torch.cuda._sleep(QUEUE_CYCLES)
    start.record()
    run()
    end.record()
    return lambda: start.elapsed_time(end)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def intervals(run: Callable[[], object], budget_ms: float) -> list[float]:
    """Timed repeats of ``run`` within a time budget, after a warm-up."""
    if DEVICE == "cuda":
        run()
        run()
    first = interval(run, queued=False)
    synchronize()
    repeats = max(4, min(30, int(budget_ms / max(first(), 1e-3))))
    pending = [interval(run) for _ in range(repeats if DEVICE == "cuda" else 1)]
    synchronize()
    return [elapsed() for elapsed in pending]


def queued_ms() -> float:
    """How long the idle work before an interval takes."""
    if DEVICE == "cpu":
        return 0.0
    torch.cuda._sleep(QUEUE_CYCLES)
    found = interval(lambda: torch.cuda._sleep(QUEUE_CYCLES), queued=False)
    torch.cuda.synchronize()
    return round(found(), 3)


def one_round(call: Call, leaves: list[torch.Tensor], budget_ms: float) -> dict[str, Any]:
    """Forward and backward intervals, peak memory and host time of one peer."""
    *qkv, dout = leaves
    base = peak = 0
    if DEVICE == "cuda":
        torch.cuda.synchronize()
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
                first = (str(error).splitlines() or [""])[0]
                cells[name] = {"error": f"{type(error).__name__}: {first[:160]}"}
                if "CUDA error" in first:
                    raise
    for name, found in rounds.items():
        if name in cells:
            continue
        times = {p: [x for r in found for x in r[p]] for p in ("forward", "backward")}
        cells[name] = {p: round(statistics.median(x), 4) for p, x in times.items()}
        # The second round's: the first one also holds what a peer sets up once.
        cells[name]["peak_mib"] = round(found[-1]["peak"] / 2**20, 1)
        cells[name]["host"] = round(min(r["host"] for r in found), 3)
    return cells


def compile_ahead(job: tuple[Shape, bool]) -> str:
    """Fill the compilers' caches for a shape, in a worker process; returns what went wrong."""
    shape, with_flex = job
    try:
        *qkv, dout = tensors(shape)
        table = {FLEX: flex(shape)} if with_flex else peers(shape)
        for name, call in table.items():
            if not name.startswith("SDPA"):
                torch.autograd.grad(call(*qkv), qkv, dout)
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    except Exception as error:
        return f"{shape}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    return ""


def compile_all(wanted: list[Shape], *, with_flex: bool, workers: int, end: float) -> None:
    """`compile_ahead` over processes; gives up waiting when time runs out."""
    if workers < 1 or not wanted:
        return
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(min(workers, len(wanted)), mp_context=context)
    jobs = [pool.submit(compile_ahead, (shape, with_flex)) for shape in wanted]
    done, late = concurrent.futures.wait(jobs, timeout=max(1.0, end - began))
    for job in done:
        fault = str(job.exception()) if job.exception() else job.result()
        if fault:
            print("compile ahead:", fault, flush=True)
    for process in list((pool._processes or {}).values()) if late else []:
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)
    seconds = time.monotonic() - began
    print(f"compiled {len(done)} of {len(jobs)} shapes ahead in {seconds:.0f} s", flush=True)


class Run:
    """The result under way: rows by shape, saved after every one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.monotonic()
        self.end = self.began + args.minutes * 60
        self.wanted = list(shapes())
        self.head = describe_kernels() | {"queued_ms": queued_ms()}
        self.rows: dict[Shape, dict[str, Any]] = {}
        for folder in (args.out.parent, args.resume):
            if folder and not self.rows:
                self._take_over(folder / args.out.name)

    def _take_over(self, path: Path) -> None:
        if not path.exists():
            return
        old = json.loads(path.read_text())
        why = same_origin(old, self.head)
        if why:
            print(f"not resuming from {path}: {why}", flush=True)
            return
        for row in old["rows"]:
            shape = Shape(**{k: v for k, v in row.items() if k != "peers"})
            peers = {
                n: c for n, c in row["peers"].items() if not (self.args.retry and "error" in c)
            }
            # The two passes measure a shape's peers together.
            if len(peers) == len(row["peers"]) or set(row["peers"]) - set(peers) == {FLEX}:
                self.rows[shape] = peers
        print(f"resuming from {path}: {len(self.rows)} shapes", flush=True)

    def late(self) -> bool:
        return time.monotonic() > self.end

    def save(self) -> dict[str, Any]:
        rows = [asdict(s) | {"peers": self.rows[s]} for s in self.wanted if s in self.rows]
        result = self.head | {
            "rows": rows,
            "complete": all(self.has(s, "compensated") for s in self.wanted),
            "flex_complete": all(self.has(s, FLEX) for s in self.wanted),
            "summary": summary(rows),
            "goals": goals(rows, len(self.wanted)),
        }
        self.args.out.write_text(json.dumps(result, indent=1) + "\n")
        return result

    def has(self, shape: Shape, name: str) -> bool:
        return name in self.rows.get(shape, {})

    def add(self, shape: Shape, cells: dict[str, dict[str, Any]]) -> None:
        self.rows.setdefault(shape, {}).update(cells)
        self.save()
        brief = {n: c.get("error") or (c["forward"], c["backward"]) for n, c in cells.items()}
        left = (self.end - time.monotonic()) / 60
        print(
            f"{len(self.rows)}/{len(self.wanted)}, {left:.1f} min left:", shape, brief, flush=True
        )

    def first_pass(self) -> None:
        todo = [s for s in self.wanted if not self.has(s, "compensated")]
        compile_all(todo, with_flex=False, workers=self.args.workers, end=self.end - 60)
        for shape in todo:
            if self.late():
                return
            self.add(shape, measure(peers(shape), tensors(shape), self.args.budget_ms))
            self._empty()

    def flex_pass(self) -> None:
        todo = [s for s in self.wanted if not self.has(s, FLEX)]
        if self.late() or DEVICE == "cpu":
            return
        compile_all(todo, with_flex=True, workers=self.args.workers, end=self.end - 60)
        for shape in todo:
            if self.late():
                return
            table = {FLEX: flex(shape), "none, again": ours("none", shape)}
            self.add(shape, measure(table, tensors(shape), self.args.budget_ms))
            self._empty()

    @staticmethod
    def _empty() -> None:
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder, or a .json file")
    parser.add_argument("--resume", type=Path, default=None, help="folder of an earlier result")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this long")
    parser.add_argument("--budget-ms", type=float, default=40.0, help="per peer, pass and round")
    parser.add_argument("--workers", type=int, default=max(1, min(15, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--retry", action="store_true", help="measure what failed before again")
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out")
    parser.add_argument("--render-only", action="store_true")
    args = parser.parse_args()
    if args.out.suffix != ".json":
        args.out = args.out / "attention.json"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.render_only:
        result = json.loads(args.out.read_text())
    else:
        run = Run(args)
        run.first_pass()
        if not args.no_flex:
            run.flex_pass()
        result = run.save()
    args.out.with_suffix(".md").write_text(render(result))
    plot(result, args.out.with_suffix(".png"))
    print(json.dumps(result["summary"], indent=1))
    for goal in result.get("goals", []):
        misses = f"; {len(goal['misses'])} miss it" if goal["misses"] else ""
        verdict = "met" if goal["ok"] else "MISSED"
        print(
            f"{verdict}: {goal['what']}: {goal['value']} (at {goal['at']} {goal['limit']}){misses}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

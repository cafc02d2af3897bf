"""Time attention forward and backward beside its peers on one GPU; write JSON, a table and a plot.

    PYTHONPATH=kernels python benchmarks/attention.py                  # measure
    PYTHONPATH=kernels python benchmarks/attention.py --render-only    # table and plot only

Results go to docs/results/attention.{json,md,png}. Peers run in the same process on the same random
tensors: SDPA-cuDNN, SDPA-flash, FlexAttention (where ``--flex`` names the length, because every
shape costs it a compilation), and our own stabilizers.
Times are medians of CUDA-event intervals over two rounds, so that no peer gets only a cool chip;
before each interval the GPU is given idle work, so that launches are queued as in a training step
(``host`` is the time the CPU spends on a forward call).

TFLOP/s count 4 b h sq sk (d + dv) / 2 operations forward, half of that under a causal mask, and 2.5
times as many backward, recomputation not counted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import RESULTS, describe
from torch.nn.attention import SDPBackend, sdpa_kernel

from stable_attention import stable_attention

TOKENS, HIDDEN = 16384, 2048
OURS = ("none", "compensated", "compensated int8")
# About 0.6 ms: longer than any peer needs to queue one pass.
QUEUE_CYCLES = 1_100_000
GRIDS = ("hidden 2048", "MLA", "GQA 64/8")


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

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward pass."""
        full = 2.0 * self.b * self.h * self.s * self.s * (self.d + self.dv)
        return full / 2 if self.causal else full


def shapes(head_dims: list[int]) -> Iterator[Shape]:
    """The grid of docs/kernels.md."""
    for d in head_dims:
        for causal in (True, False):
            for s in (1024, 2048, 4096, 8192, 16384):
                h = HIDDEN // d
                yield Shape(GRIDS[0], TOKENS // s, s, h, h, d, d, causal)
    for s in (2048, 4096, 8192):
        yield Shape(GRIDS[1], TOKENS // s, s, 16, 16, 192, 128, True)
    for s in (4096, 8192, 16384, 32768):
        yield Shape(GRIDS[2], max(1, TOKENS // s), s, 64, 8, 128, 128, True)


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


def flex(shape: Shape) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if shape.causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, shape.s, shape.s, device="cuda"
        )

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


def peers(shape: Shape, flex_lengths: list[int]) -> dict[str, Call]:
    """Name -> attention over [b, s, h, d] tensors."""
    found = {
        "SDPA-cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, shape),
        "SDPA-flash": sdpa(SDPBackend.FLASH_ATTENTION, shape),
    }
    if shape.s in flex_lengths and shape.d in (64, 128):
        found["FlexAttention"] = flex(shape)
    return found | {name: ours(name, shape) for name in OURS}


def tensors(shape: Shape) -> list[torch.Tensor]:
    """q, k, v (leaves) and dO, random."""
    size = ((shape.h, shape.d), (shape.kv_heads, shape.d), (shape.kv_heads, shape.dv))
    q, k, v = (
        torch.randn(shape.b, shape.s, *hd, device="cuda", dtype=torch.bfloat16) for hd in size
    )
    dout = torch.randn(shape.b, shape.s, shape.h, shape.dv, device="cuda", dtype=torch.bfloat16)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def intervals(run: Callable[[], object], budget_ms: float) -> list[float]:
    """Event-timed repeats of ``run`` within a time budget, after a warm-up."""
    for _ in range(2):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    repeats = max(4, min(30, int(budget_ms / max(start.elapsed_time(end), 1e-3))))
    pairs = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(QUEUE_CYCLES)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairs]


def measure(shape: Shape, flex_lengths: list[int], budget_ms: float) -> dict[str, Any]:
    """{peer: {"forward": ms, "backward": ms, "peak_mib": MiB} or {"error": why}}."""
    q, k, v, dout = tensors(shape)
    cells: dict[str, Any] = {}
    times: dict[str, tuple[list[float], list[float]]] = {}
    table = peers(shape, flex_lengths)
    for _ in range(2):
        for name, call in table.items():
            if "error" in cells.get(name, {}):
                continue
            try:
                base = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                out = call(q, k, v)
                torch.autograd.grad(out, (q, k, v), dout)
                peak = torch.cuda.max_memory_allocated() - base
                forward, backward = times.setdefault(name, ([], []))
                forward += intervals(lambda c=call: c(q, k, v), budget_ms)
                out = call(q, k, v)
                grad = lambda o=out: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)  # noqa: E731
                backward += intervals(grad, budget_ms * 2)
                torch.cuda.synchronize()
                began = time.perf_counter()
                call(q, k, v)
                host = (time.perf_counter() - began) * 1e3
                cells[name] = {"peak_mib": round(peak / 2**20, 1), "host": round(host, 3)}
                del out
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                cells[name] = {"error": f"{type(error).__name__}: {first[:160]}"}
    for name, (forward, backward) in times.items():
        if "error" not in cells[name]:
            cells[name]["forward"] = round(statistics.median(forward), 4)
            cells[name]["backward"] = round(statistics.median(backward), 4)
    return cells


def compile_ahead(shape: Shape) -> None:
    """Fill Triton's cache for a shape's kernels, in a worker process."""
    small = Shape(**asdict(shape) | {"b": 1, "s": 2048})
    q, k, v, dout = tensors(small)
    for name in OURS:
        torch.autograd.grad(ours(name, small)(q, k, v), (q, k, v), dout)
    torch.cuda.synchronize()


def run(args: argparse.Namespace) -> dict[str, Any]:
    wanted = list(shapes([int(d) for d in args.head_dims.split(",")]))
    kinds = {(x.grid, x.d, x.causal): x for x in wanted}
    context = multiprocessing.get_context("spawn")
    workers = min(len(kinds), os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(compile_ahead, kinds.values()))
    flex_lengths = [int(s) for s in args.flex.split(",") if s]
    end = time.monotonic() + args.minutes * 60
    result = describe() | {"rows": [], "complete": False}
    for shape in wanted:
        if time.monotonic() > end:
            break
        cells = measure(shape, flex_lengths, args.budget_ms)
        result["rows"].append(asdict(shape) | {"peers": cells})
        brief = {n: (c.get("forward"), c.get("backward")) for n, c in cells.items()}
        print(shape, brief, flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    else:
        result["complete"] = True
    result["summary"] = summary(result["rows"])
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over the grid: speed over each peer, and the cost of the stabilizer."""

    def ratios(a: str, b: str, which: str) -> list[float]:
        cells = [(r["peers"].get(a, {}), r["peers"].get(b, {})) for r in rows]
        return [y[which] / x[which] for x, y in cells if which in x and which in y]

    found: dict[str, Any] = {}
    for which in ("forward", "backward"):
        for name in OURS:
            for peer in ("SDPA-cuDNN", "SDPA-flash", "FlexAttention"):
                values = ratios(name, peer, which)
                if values:
                    mean, low = geometric_mean(values), min(values)
                    found[f"{which}: {name} speed / {peer}"] = [round(mean, 3), round(low, 3)]
        for name in OURS[1:]:
            values = ratios("none", name, which)
            found[f"{which}: {name} time / none"] = [
                round(geometric_mean(values), 3),
                round(max(values, default=math.nan), 3),
            ]
    return found


def render(result: dict[str, Any]) -> str:
    """Markdown: summary and one table a grid and pass, TFLOP/s."""
    machine, versions = result["machine"], result["versions"]
    gpu = machine.get("gpu", "no GPU")
    lines = [
        f"# Attention speed: {gpu}",
        "",
        f"Generated by `benchmarks/attention.py` from `attention.json`; commit "
        f"{result.get('commit', '?')[:12]}, torch {versions.get('torch')}, "
        f"triton {versions.get('triton')}, cuDNN {versions.get('cudnn')}. BF16, TFLOP/s, medians.",
        "",
        "| geometric mean over the grid | mean | worst |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {name} | {a} | {b} |" for name, (a, b) in result["summary"].items()]
    names = ["SDPA-cuDNN", "SDPA-flash", "FlexAttention", *OURS]
    for which, factor in (("forward", 1.0), ("backward", 2.5)):
        lines += ["", f"## {which}", "", "| grid | mask | d | s | " + " | ".join(names) + " |"]
        lines.append("| --- |" * 1 + " --- |" * (3 + len(names)))
        for r in result["rows"]:
            shape = Shape(**{k: v for k, v in r.items() if k != "peers"})
            d = str(shape.d) if shape.d == shape.dv else f"{shape.d}/{shape.dv}"
            cells = []
            for name in names:
                ms = r["peers"].get(name, {}).get(which)
                cells.append("-" if ms is None else f"{factor * shape.flops / ms / 1e9:.0f}")
            mask = "causal" if shape.causal else "full"
            lines.append(f"| {shape.grid} | {mask} | {d} | {shape.s} | " + " | ".join(cells) + " |")
    lines += ["", "## Peak memory of forward and backward, MiB", ""]
    lines += ["| grid | mask | d | s | " + " | ".join(names) + " |"]
    lines.append("| --- |" + " --- |" * (3 + len(names)))
    for r in result["rows"]:
        if r["s"] != 4096:
            continue
        cells = [str(r["peers"].get(n, {}).get("peak_mib", "-")) for n in names]
        mask = "causal" if r["causal"] else "full"
        lines.append(f"| {r['grid']} | {mask} | {r['d']} | {r['s']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """TFLOP/s over sequence length, one panel a head dim and pass, causal."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in result["rows"] if r["grid"] == GRIDS[0] and r["causal"]]
    dims = sorted({r["d"] for r in rows})
    figure, axes = plt.subplots(2, len(dims), figsize=(4 * len(dims), 6), squeeze=False)
    for column, d in enumerate(dims):
        for row, (which, factor) in enumerate((("forward", 1.0), ("backward", 2.5))):
            axis = axes[row][column]
            for name in ("SDPA-cuDNN", "SDPA-flash", "none", "compensated"):
                points = [
                    (r["s"], factor * _flops(r) / r["peers"][name][which] / 1e9)
                    for r in rows
                    if r["d"] == d and which in r["peers"].get(name, {})
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=name)
            axis.set(
                xscale="log", title=f"d {d}, causal, {which}", ylabel="TFLOP/s", ylim=(0, None)
            )
            axis.set_xticks([1024, 4096, 16384], ["1k", "4k", "16k"])
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _flops(row: dict[str, Any]) -> float:
    return Shape(**{k: v for k, v in row.items() if k != "peers"}).flops


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "attention.json")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--flex", default="4096", help="lengths at which FlexAttention runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this long")
    parser.add_argument("--budget-ms", type=float, default=25.0, help="per peer, pass and round")
    parser.add_argument("--render-only", action="store_true")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = json.loads(args.out.read_text()) if args.render_only else run(args)
    args.out.with_suffix(".md").write_text(render(result))
    plot(result, args.out.with_suffix(".png"))
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()

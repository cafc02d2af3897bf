"""Search tile sizes, warps and stages for this GPU and print (or write) rows of configs.json.

    python benchmarks/search_tiles.py --out tiles.json [--write] [--passes dq] [--widths 128]

Candidates are first compiled in parallel processes (one launch each), so that the GPU is timed
without waiting for the compiler; those that do not fit are reported with the reason and dropped.
`--write` puts the winners into kernels/stable_attention/configs.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from machine import describe, fault, interval

from stable_attention import aot, configs
from stable_attention.configs import Tile
from stable_attention.problem import Extras, Problem
from stable_attention.triton.backward import launch_dkdv, launch_dq
from stable_attention.triton.forward import forward

TABLE = Path(configs.__file__).with_name("configs.json")
# bm,bn,warps,stages; C75xx and heavy spills were dropped with stable_attention.aot beforehand.
CANDIDATES = {
    ("forward", 64): (
        "64,64,4,2 64,64,4,3 64,64,4,4 64,128,4,2 64,128,4,3 128,64,4,2 128,64,4,3 "
        "128,64,8,3 128,128,8,2 128,128,8,3 64,32,4,4"
    ),
    ("forward", 96): (
        "64,64,4,2 64,64,4,3 64,128,4,2 64,128,4,3 64,32,4,4 128,64,8,2 128,64,8,3 128,128,8,2"
    ),
    ("forward", 128): (
        "64,64,4,2 64,64,4,3 64,128,4,2 64,128,4,3 64,32,4,3 64,32,4,4 128,64,8,2 128,64,8,3 "
        "128,128,8,2"
    ),
    ("forward", 192): (
        "128,64,8,2 128,64,8,3 128,128,8,2 128,32,8,3 64,64,4,2 64,64,4,3 64,128,4,2 64,32,4,3"
    ),
    ("forward", 256): "128,64,8,2 128,32,8,2 128,32,8,3 64,64,4,2 64,32,4,2 64,32,4,3 64,64,8,2",
    ("dkdv", 64): (
        "64,128,8,2 64,128,8,3 128,128,8,2 64,64,4,2 64,64,4,3 128,64,4,2 128,64,4,3 32,64,4,3"
    ),
    ("dkdv", 96): "64,64,4,2 64,64,4,3 64,128,8,2 64,128,8,3 128,64,8,2 32,64,4,3",
    ("dkdv", 128): (
        "64,64,4,2 64,64,4,3 64,128,8,2 64,128,8,3 32,64,4,2 32,64,4,3 64,64,8,2 64,64,8,3"
    ),
    ("dkdv", 192): "64,64,8,2 64,64,8,3 32,64,8,2 32,64,8,3 64,64,4,2 64,128,8,2",
    ("dkdv", 256): "64,64,8,2 32,64,8,2 32,64,8,3 32,128,8,1 32,128,8,2 128,64,8,1 64,128,8,1",
    ("dq", 64): "128,64,4,2 128,64,4,3 128,64,8,3 128,128,8,2 64,64,4,3 64,128,4,2",
    ("dq", 96): "128,64,8,2 128,64,8,3 128,128,8,2 64,64,4,2 64,64,4,3 64,128,4,2",
    ("dq", 128): "128,64,8,2 128,64,8,3 128,128,8,2 64,64,4,2 64,64,4,3 64,128,4,2 128,32,8,3",
    ("dq", 192): "128,32,8,2 128,32,8,3 128,64,8,1 128,64,8,2 64,64,4,2 64,64,8,2 64,32,4,2",
    ("dq", 256): "64,32,4,2 64,64,4,1 64,64,8,2 128,32,8,2 128,32,8,3 128,64,8,1",
}


def value_width(width: int) -> int:
    """Head dim of v in the problem of a width: 192 is MLA's."""
    return 128 if width == 192 else width


def make_problem(
    width: int, *, banded: bool, stabilizer: str = "compensated", dropout_p: float = 0.0
) -> Problem:
    """4 x 4k tokens, hidden 2048 (or the most whole heads below)."""
    batch, s, heads = 4, 4096, 2048 // width
    sizes = {"batch": batch, "sq": s, "sk": s, "tq": batch * s, "tk": batch * s}
    sizes |= {"heads": heads, "kv_heads": heads, "d": width, "dv": value_width(width)}
    how: dict[str, Any] = {"layout": "bshd", "dtype": torch.bfloat16, "scale": width**-0.5}
    how |= {"stabilizer": stabilizer, "dropout_p": dropout_p}
    return Problem(**sizes, **how, window_right=0 if banded else -1)


class Bench:
    """Tensors of one problem and a launcher for each pass."""

    def __init__(self, problem: Problem, device: str = "cuda") -> None:
        self.problem = problem
        self.extras = Extras(seed=torch.zeros(1, dtype=torch.int64, device=device))
        rows = (problem.batch, problem.sq, problem.heads)
        q, k, v, dout = (
            torch.randn((*rows, d), device=device, dtype=problem.dtype)
            for d in (problem.d, problem.d, problem.dv, problem.dv)
        )
        done = forward(problem, q, k, v, extras=self.extras)
        self.forward_inputs = (q, k, v)
        lo = torch.empty_like(done.lse[0]) if problem.planes > 1 else None
        self.tensors = (q, k, v, dout, done.lse, torch.randn_like(done.lse), lo)
        self.grads = [torch.empty_like(x) for x in (q, k, v)]

    def run(self, which: str, tile: Tile) -> None:
        common: dict[str, Any] = {"extras": self.extras, "tile": tile, "add": False}
        dq, dk, dv = self.grads
        if which == "forward":
            forward(self.problem, *self.forward_inputs, extras=self.extras, config=tile)
        elif which == "dq":
            launch_dq(self.problem, self.tensors, dq, **common)
        else:
            launch_dkdv(self.problem, self.tensors, dk, dv, **common)

    def time(self, which: str, tile: Tile, repeats: int = 12) -> float:
        """Median milliseconds."""
        for _ in range(3):
            self.run(which, tile)
        times = [interval(lambda: self.run(which, tile)) for _ in range(repeats)]
        torch.cuda.synchronize()
        return statistics.median(elapsed() for elapsed in times)


_BENCHES: dict[tuple[int, bool, str], Bench] = {}


def bench_of(width: int, banded: bool, stabilizer: str) -> Bench:
    key = (width, banded, stabilizer)
    if key not in _BENCHES:
        _BENCHES.clear()
        _BENCHES[key] = Bench(make_problem(width, banded=banded, stabilizer=stabilizer))
    return _BENCHES[key]


def compile_once(job: tuple[str, int, bool, str, Tile]) -> str:
    """Compile (and run once) in a worker process; returns "" or why it cannot run."""
    which, width, banded, stabilizer, tile = job
    try:
        bench_of(width, banded, stabilizer).run(which, tile)
        torch.cuda.synchronize()
    except Exception as error:
        return fault(error)
    return ""


def modes(which: str, width: int, tile: Tile) -> list[Tile]:
    """A tile in every way the forward kernel can sum up its products."""
    if which != "forward":
        return [tile]
    plain = replace(
        tile, segment=0 if width > 128 else 1024, ones=8, reverse=0, early=0, query_tma=0
    )
    late = replace(plain, segment=tile.bn)
    return [
        plain,
        replace(plain, early=1),
        replace(plain, ones=16),
        *(replace(late, ones=ones, query_tma=1) for ones in (8, 16)),
        *(
            replace(late, ones=ones, early=early, reverse=reverse, registers=registers)
            for ones, early in ((16, 0), (8, 0), (8, 1))
            for reverse in (0, 1)
            # Three programs of four warps on a processor, where the second accumulator is small.
            for registers in ((0, 168) if width == 64 and tile.warps == 4 else (0,))
        ),
    ]


def jobs_of(which: str, width: int) -> list[tuple[str, int, bool, str, Tile]]:
    """Every candidate of a pass at a head dim, with and without a mask."""
    return [
        (which, width, banded, "compensated", tile)
        for banded in (False, True)
        for fields in CANDIDATES[which, width].split()
        for tile in modes(which, width, Tile(*map(int, fields.split(",")), tma=True))
    ]


def search(pool: concurrent.futures.Executor, which: str, width: int) -> list[dict[str, Any]]:
    """Time all candidates of one pass and head dim; the pool's processes compile them first."""
    jobs = jobs_of(which, width)
    faults = list(pool.map(compile_once, jobs))
    records: list[dict[str, Any]] = []
    for job, failed in zip(jobs, faults, strict=True):
        banded, stabilizer, tile = job[2:]
        ms = None if failed else bench_of(width, banded, stabilizer).time(which, tile)
        records.append(
            {"pass": which, "width": width, "banded": banded, "stabilizer": stabilizer}
            | asdict(tile)
            | {"ms": ms, "fault": failed}
        )
        print(f"{which:8s} {width} {'band' if banded else 'full'} {tile} {ms} {failed}", flush=True)
    return records


def row_of(record: dict[str, Any]) -> list[int]:
    """A record's tile in the table's form."""
    fields = ["bm", "bn", "warps", "stages"]
    if record["pass"] == "forward":
        fields += ["segment", "ones", "registers", "reverse", "early", "query_tma"]
    return [int(record[x]) for x in fields]


def winners(records: list[dict[str, Any]], arch: str) -> dict[str, list[int]]:
    """Best row of each (pass, width, mask), in the table's form.

    Dropout takes a plain row that leaves its mask the shared memory (`dropout_fits`), and else has
    the fastest that does: NAME/dropout.
    """
    best: dict[str, list[int]] = {}
    dropout: dict[str, list[int]] = {}
    for r in sorted((r for r in records if r["ms"] is not None), key=lambda r: r["ms"]):
        widths = (r["width"], value_width(r["width"]))
        name, row = configs.key(r["pass"], widths, r["banded"]), row_of(r)
        best.setdefault(name, row)
        if name not in dropout and dropout_fits(r["pass"], r["width"], r["banded"], row, arch):
            dropout[name] = row
    return best | {f"{name}/dropout": row for name, row in dropout.items() if row != best[name]}


def dropout_fits(which: str, width: int, banded: bool, row: list[int], arch: str) -> bool:
    """Whether a tile leaves dropout's mask its shared memory; compiles, and needs no GPU."""
    with aot.capture(arch) as launches:
        bench = Bench(make_problem(width, banded=banded, dropout_p=0.1), device="meta")
        launches.clear()
        bench.run(which, Tile(*row, tma=arch in ("sm90", "sm100")))
    return aot.compile_launch(launches[0], arch).shared <= aot.SHARED_LIMIT[arch]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="tiles.json")
    parser.add_argument("--passes", default=",".join(configs.PASSES))
    parser.add_argument("--widths", default="64,128,256,192,96", help="head dims, in this order")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--minutes", type=float, default=60.0, help="start nothing new after this")
    parser.add_argument("--write", action="store_true", help="update configs.json")
    args = parser.parse_args()
    begin = time.monotonic()
    tasks = [(which, int(w)) for which in args.passes.split(",") for w in args.widths.split(",")]
    result: dict[str, Any] = describe() | {"rows": {}, "records": [], "left": tasks}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        for i, (which, width) in enumerate(tasks, 1):
            if time.monotonic() - begin > args.minutes * 60:
                print(f"out of time before {which} {width}", flush=True)
                break
            records = search(pool, which, width)
            best = winners(records, configs.arch_of(torch.device("cuda")))
            result["records"] += records
            result["rows"] |= best
            result["left"] = tasks[i:]
            Path(args.out).write_text(json.dumps(result, indent=1))
            minutes = (time.monotonic() - begin) / 60
            print(f"{i} of {len(tasks)} done after {minutes:.1f} min", flush=True)
    print(json.dumps(result["rows"], indent=1))
    if args.write:
        table = json.loads(TABLE.read_text())
        rows = table.setdefault(configs.arch_of(torch.device("cuda")), {})
        for name in result["rows"]:
            rows.pop(name + "/dropout", None)
        rows.update(result["rows"])
        TABLE.write_text(render(table))


def render(table: dict[str, dict[str, list[int]]]) -> str:
    """configs.json with one row a line."""
    archs = []
    for arch, rows in table.items():
        lines = ",\n".join(f'    "{name}": {json.dumps(row)}' for name, row in rows.items())
        archs.append(f'  "{arch}": {{\n{lines}\n  }}')
    return "{\n" + ",\n".join(archs) + "\n}\n"


if __name__ == "__main__":
    main()

# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)
"""Run the correctness grid on a GPU and count: systematic cases, random cases, vendor ratios.

    PYTHONPATH=kernels python benchmarks/kernel_grid.py --minutes 9 [--out DIR] [--resume DIR]

writes ``kernel_grid.json`` (counts per part, every failure with its one-line reproduction, the
distribution of our error over PyTorch's) and ``kernel_grid_state.jsonl``, one record a case. A run
that finds a state file of the same kernels, tests, GPU and versions in ``--out`` or ``--resume``
does the cases that are missing there, so several short runs make one result. Several worker
processes share the GPU, because compiling is what takes the time; groups of cases that share a
compilation stay together. ``--device cpu --parts small --limit 4`` tries the script in Triton's
interpreter; ``--workers 0`` stays in this process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / p) for p in ("benchmarks", "tests", "tests/kernels")]
if "--device=cpu" in sys.argv or "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter_shim

    interpreter_shim.install_on_import()

import torch.multiprocessing as mp
from kernel_peers import over_peers
from kernel_workers import Group, Pool, Record, judge
from machine import describe_kernels, same_origin

STATE = "kernel_grid_state.jsonl"
# What decides whether a case passes, besides the kernels.
RULES = ("error_rule.py", "attention_cases.py", "grid.py")
SHOWN_FAILURES = 100


def rules_digest() -> str:
    """Digest of the cases and of the rule they are judged by."""
    joined = hashlib.sha256()
    for name in RULES:
        joined.update((ROOT / "tests" / "kernels" / name).read_bytes())
    joined.update((ROOT / "tests" / "memory_poison.py").read_bytes())
    return joined.hexdigest()[:16]


def read_state(path: Path, head: dict[str, Any]) -> list[Record]:
    """Records of an earlier run that belong to this one; says why if there are none."""
    if not path.exists():
        return []
    first, *rest = path.read_text().splitlines() or ["{}"]
    old = json.loads(first)
    why = "no header" if "machine" not in old else same_origin(old, head)
    if not why and old["rules"] != head["rules"]:
        why = "other cases or rules"
    if why:
        print(f"not resuming from {path}: {why}", flush=True)
        return []
    # A line cut short by the end of a run is that case undone.
    lines = (line for line in rest if line.endswith("}"))
    found = {(r["part"], r["case"]): r for r in map(json.loads, lines)}
    return list(found.values())


def without(groups: list[Group], done: set[tuple[str, str]]) -> list[Group]:
    """``groups`` without the cases that are done."""
    left = [(part, [c for c in group if (part, str(c)) not in done]) for part, group in groups]
    return [task for task in left if task[1]]


def summary(records: list[Record], planned: Counter[str]) -> dict[str, Any]:
    """Counts, failures and the distribution of ratios."""
    from attention_cases import Case

    parts = {}
    for part in planned:
        mine = [r for r in records if r["part"] == part]
        failed = sum(bool(r["problems"]) for r in mine)
        parts[part] = {"planned": planned[part], "run": len(mine), "failed": failed}
    ratios: dict[str, list[float]] = {}
    for record in records:
        for name, (top, rms) in record["ratios"].items():
            if rms < 1e6:  # PyTorch exact: no ratio
                ratios.setdefault(name + " max", []).append(top)
                ratios.setdefault(name + " rms", []).append(rms)
    spread = {}
    for name, values in sorted(ratios.items()):
        values.sort()
        at = [values[int(p * (len(values) - 1))] for p in (0.5, 0.99, 1.0)]
        shown = (float(f"{x:.4g}") for x in at)
        spread[name] = dict(zip(("median", "p99", "worst"), shown, strict=True))
    failures = [
        {"case": r["case"], "problems": r["problems"], "repro": Case.parse(r["case"]).repro()}
        for r in records
        if r["problems"]
    ]
    return {
        "parts": parts,
        "ratios": spread,
        "peer_comparisons": peer_summary(records),
        "failures": failures[:SHOWN_FAILURES],
        "complete": len(records) == sum(planned.values()),
    }


def peer_summary(records: list[Record]) -> dict[str, Any]:
    """How many tensors were held against which vendor, and those above 1.02x the better one."""
    by_vendor = Counter(
        who for r in records for rms in r.get("peers", {}).values() for who in rms if who != "ours"
    )
    return {
        "run": sum(len(r.get("peers", {})) for r in records),
        "by_vendor": dict(by_vendor),
        "over": [entry for r in records for entry in over_peers(r)],
    }


def plan(args: argparse.Namespace) -> list[Group]:
    """(part, group) in a seeded random order, those with vendors' kernels first."""
    from grid import grid_groups, large_groups, random_groups, small_groups

    if args.parts == "small":
        return [("small", g) for g in small_groups(args.seed, args.limit or 20)]
    rest = [("grid", g) for g in grid_groups()]
    rest += [("random", g) for g in random_groups(args.seed, args.random)]
    random.Random(args.seed).shuffle(rest)
    tasks = [("large", g) for g in large_groups()] + rest
    if args.parts:
        tasks = [t for t in tasks if t[0] in args.parts.split(",")]
    return tasks[: args.limit] if args.limit else tasks


class Progress:
    """Keeps records, appends them to the state file, rewrites the result now and then."""

    def __init__(
        self, args: argparse.Namespace, head: dict[str, Any], planned: Counter[str]
    ) -> None:
        self.args, self.head, self.planned = args, head, planned
        self.records: list[Record] = []
        self.target = args.out / "kernel_grid.json"
        self.saved = self.began = time.monotonic()
        args.out.mkdir(parents=True, exist_ok=True)

    def resume(self, wanted: set[tuple[str, str]]) -> None:
        """Take over what an earlier run did, and start the state file with it."""
        for folder in (self.args.out, self.args.resume):
            if folder and not self.records:
                old = read_state(folder / STATE, self.head)
                self.records = [r for r in old if (r["part"], r["case"]) in wanted]
        lines = [self.head, *self.records]
        path = self.args.out / STATE
        path.write_text("".join(json.dumps(x) + "\n" for x in lines))
        self.state = path.open("a")

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.state.write(json.dumps(record) + "\n")
        self.state.flush()
        if record["problems"]:
            from attention_cases import Case

            repro = Case.parse(record["case"]).repro()
            print("FAILED", repro, *record["problems"], sep="\n    ", flush=True)

    def tick(self) -> None:
        if time.monotonic() - self.saved > 15:
            self.save()
            left = self.args.minutes - (time.monotonic() - self.began) / 60
            total, failed = (
                sum(self.planned.values()),
                sum(bool(r["problems"]) for r in self.records),
            )
            print(
                f"{len(self.records)} of {total} cases, {failed} failed, {left:.1f} min left",
                flush=True,
            )
            self.saved = time.monotonic()

    def save(self) -> dict[str, Any]:
        figures = summary(self.records, self.planned)
        self.target.write_text(
            json.dumps({**self.head, **figures}, indent=1, sort_keys=True) + "\n"
        )
        return figures


def report(figures: dict[str, Any], crashes: int, target: Path) -> int:
    """Print the verdict; 0 if nothing failed (a run that was cut short included)."""
    print(json.dumps({k: figures[k] for k in ("parts", "complete")}), "crashes:", crashes)
    peers = figures["peer_comparisons"]
    print(f"vendor comparisons {peers['run']} {peers['by_vendor']}, over: {len(peers['over'])}")
    for entry in peers["over"]:
        print("  over:", entry)
    for name, spread in figures["ratios"].items():
        print(f"  {name:24s} {spread}")
    for failure in figures["failures"][:20]:
        print("FAILED", failure["repro"], *failure["problems"], sep="\n    ")
    print("results in", target, flush=True)
    return 1 if figures["failures"] or crashes or peers["over"] else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--resume", type=Path, default=None, help="folder of an earlier state")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", type=int, default=2000, help="number of random cases")
    parser.add_argument("--workers", type=int, default=max(1, min(15, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--parts", default="", help="of large, grid, random (default all); or small"
    )
    parser.add_argument("--limit", type=int, default=0, help="number of groups")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds a case may take")
    args = parser.parse_args(argv)
    stop = time.monotonic() + 60 * args.minutes
    groups = plan(args)
    planned = Counter[str]()
    for part, group in groups:
        planned[part] += len(group)
    head = describe_kernels() | {"seed": args.seed, "rules": rules_digest()}
    progress = Progress(args, head, planned)
    progress.resume({(part, str(case)) for part, group in groups for case in group})
    left = without(groups, {(r["part"], r["case"]) for r in progress.records})
    print(f"{len(progress.records)} cases done before; {len(left)} groups to go", flush=True)
    pool = Pool(mp.get_context("spawn"), args.device, stop, progress.add, progress.tick)
    pool.patience = args.patience
    if args.workers:
        pool.run(left, args.workers)
    else:
        for part, group in left:
            for case in group:
                if time.monotonic() < stop:
                    progress.add(judge(part, case, args.device))
                    progress.tick()
    return report(progress.save(), pool.crashes, progress.target)


if __name__ == "__main__":
    sys.exit(main())

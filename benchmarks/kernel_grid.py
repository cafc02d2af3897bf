# ruff: noqa: E402  (the interpreter is chosen before Triton is imported)
"""Run the correctness grid on a GPU and count: systematic cases, random cases, vendor ratios.

    PYTHONPATH=kernels python benchmarks/kernel_grid.py --out docs/results --minutes 5 --seed 0

writes ``kernel_grid.json``: counts per part, every failure with its one-line reproduction, and the
distribution of our error over PyTorch's. Several worker processes share the GPU, because compiling
is what takes the time; groups of cases that share a compilation stay together. The file is
rewritten while the run goes on. ``--device cpu --limit 4`` tries the script in the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / p) for p in ("benchmarks", "tests", "tests/kernels")]

import torch
import torch.multiprocessing as mp
from machine import describe

PEER_RATIO = 1.02
PEER_ELEMENTS = 1 << 16


def peer_results(case: Any, given: Any) -> dict[str, dict[str, torch.Tensor]]:
    """O and gradients of SDPA's flash and cuDNN backends; empty where they do not serve a case."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    plain = case.sinks == "none" and not case.softcap and not case.dropout and not case.dlse
    whole = case.layout == "bhsd" and case.left < 0 and case.right < 0 and not case.dv
    if not (plain and whole and (case.sq == case.sk or not case.causal)):
        return {}
    found = {}
    for name, backend in (
        ("SDPA-flash", SDPBackend.FLASH_ATTENTION),
        ("SDPA-cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
        try:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    is_causal=bool(case.causal),
                    scale=case.scale or None,
                    enable_gqa=case.hq != case.hk,
                )
                grads = torch.autograd.grad(out, (q, k, v), given.dout)
        except RuntimeError:
            continue
        found[name] = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    return found


def compare_peers(case: Any, given: Any, ours: Any) -> dict[str, Any]:
    """{tensor: {backend: RMS error}} for ours and the peers, where the sample is large enough."""
    from error_rule import run_oracle

    if ours.out.numel() < PEER_ELEMENTS:
        return {}
    peers = peer_results(case, given)
    if not peers:
        return {}
    truth = run_oracle(case, given, torch.float64)
    table: dict[str, Any] = {}
    for name in ("out", "dq", "dk", "dv"):
        true = getattr(truth, name)
        rms = {"ours": getattr(ours, name)} | {peer: x[name] for peer, x in peers.items()}
        table[name] = {
            who: float((x.double() - true).pow(2).mean().sqrt()) for who, x in rms.items()
        }
    return table


def run_group(part: str, group: list[Any], device: str, stop: float) -> Iterator[dict[str, Any]]:
    """Records of one group; stops between cases when time is up."""
    from attention_cases import make_inputs
    from error_rule import Report, compare, run_ours

    for case in group:
        if time.monotonic() > stop:
            break
        given = make_inputs(case, device)
        record: dict[str, Any] = {"part": part, "case": str(case)}
        try:
            ours = run_ours(case, given)
            report = compare(case, given, ours)
            if part == "large":
                record["peers"] = compare_peers(case, given, ours)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            report = Report(case, [text])
        record |= {"problems": report.problems, "ratios": report.ratios}
        yield record
        if "CUDA error" in str(report.problems):
            raise SystemExit(3)  # the context is lost; the main process starts a new worker


def worker(tasks: Any, results: Any, device: str, stop: float) -> None:
    """Take groups until none are left or time is up."""
    torch.set_num_threads(1)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        import interpreter_shim

        interpreter_shim.install_on_import()
    while time.monotonic() < stop:
        try:
            part, group = tasks.get(timeout=0.5)
        except queue.Empty:
            return
        for record in run_group(part, group, device, stop):
            results.put(record)


def summary(records: list[dict[str, Any]], planned: Counter[str]) -> dict[str, Any]:
    """Counts, failures and the distribution of ratios."""
    from attention_cases import Case

    parts = {}
    for part in planned:
        mine = [r for r in records if r["part"] == part]
        parts[part] = {
            "planned": planned[part],
            "run": len(mine),
            "failed": sum(bool(r["problems"]) for r in mine),
        }
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
        spread[name] = dict(
            zip(("median", "p99", "worst"), (float(f"{x:.4g}") for x in at), strict=True)
        )
    peers, over = 0, []
    for record in records:
        for tensor, rms in record.get("peers", {}).items():
            peers += 1
            limit = PEER_RATIO * min(x for who, x in rms.items() if who != "ours")
            if rms["ours"] > limit:
                over.append({"case": record["case"], "tensor": tensor, "rms": rms})
    return {
        "parts": parts,
        "ratios": spread,
        "peer_comparisons": {"run": peers, "over": over},
        "failures": [
            {"case": r["case"], "problems": r["problems"], "repro": Case.parse(r["case"]).repro()}
            for r in records
            if r["problems"]
        ],
    }


def plan(args: argparse.Namespace) -> list[tuple[str, list[Any]]]:
    """(part, group) in a seeded random order, the large ones first."""
    from grid import grid_groups, large_groups, random_groups

    rest = [("grid", g) for g in grid_groups()]
    rest += [("random", g) for g in random_groups(args.seed, args.random)]
    random.Random(args.seed).shuffle(rest)
    tasks = [("large", g) for g in large_groups()] + rest
    if args.parts:
        tasks = [t for t in tasks if t[0] in args.parts.split(",")]
    return tasks[: args.limit] if args.limit else tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", type=int, default=2000, help="number of random cases")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default="", help="of large, grid, random; default all")
    parser.add_argument("--limit", type=int, default=0, help="number of groups")
    args = parser.parse_args()
    stop = time.monotonic() + 60 * args.minutes
    groups = plan(args)
    planned = Counter[str]()
    for part, group in groups:
        planned[part] += len(group)
    context = mp.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for task in groups:
        tasks.put(task)
    start = {"target": worker, "args": (tasks, results, args.device, stop), "daemon": True}
    workers = [context.Process(**start) for _ in range(min(args.workers, len(groups)))]
    for process in workers:
        process.start()
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "kernel_grid.json"
    head = describe() | {"seed": args.seed}
    records: list[dict[str, Any]] = []

    def save() -> dict[str, Any]:
        figures = summary(records, planned)
        figures["complete"] = len(records) == sum(planned.values())
        target.write_text(json.dumps({**head, **figures}, indent=1, sort_keys=True) + "\n")
        return figures

    saved = time.monotonic()
    crashes = 0
    while len(records) < sum(planned.values()) and time.monotonic() < stop + 20:
        try:
            record = results.get(timeout=1.0)
        except queue.Empty:
            alive = [p for p in workers if p.is_alive()]
            lost = [p for p in workers if not p.is_alive() and p.exitcode not in (0, None)]
            workers = alive
            for _ in lost:
                crashes += 1
                if crashes <= 20 and time.monotonic() < stop:
                    workers.append(context.Process(**start))
                    workers[-1].start()
            if not workers and results.empty():
                break
            continue
        records.append(record)
        if record["problems"]:
            print("FAILED", record["case"], *record["problems"], sep="\n    ", flush=True)
        if time.monotonic() - saved > 10:
            save()
            saved = time.monotonic()
    for process in workers:
        process.terminate()
    figures = save()
    print(json.dumps({k: figures[k] for k in ("parts", "complete")}), "crashes:", crashes)
    over = figures["peer_comparisons"]["over"]
    print(f"vendor comparisons {figures['peer_comparisons']['run']}, over 1.02x: {len(over)}")
    for entry in over:
        print("  over:", entry)
    for name, spread in figures["ratios"].items():
        print(f"  {name:24s} {spread}")
    print("results in", target)
    return 1 if figures["failures"] or crashes or over else 0


if __name__ == "__main__":
    sys.exit(main())

"""The measured tables of the manual: docs/assets/*.json into the marked places of its pages.

    python benchmarks/tables.py [--check] [--plots]

A page marks a place with ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; NAME is a key of
`TABLES`, other names are not this script's. ``--check`` changes nothing and exits with 1 where a
page differs from its results. ``--plots`` draws the plots of docs/assets anew.

Arithmetic that benchmarks need too (speeds of rows, equal work, the fullest rank) is here, because
this module needs no torch.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
from machine import RESULTS, ROOT, context_digest, functions_digest

from megatron_patch.runtime.environment import short_commit

Row = dict[str, Any]
Parts = dict[str, dict[str, Any]]
"""A file of docs/assets: results by name."""
GRIDS = ("hidden 2048", "MLA", "GQA 64/8")
PASSES = ("forward", "backward")
OURS = ("none", "compensated", "compensated int8")
PEERS = ("SDPA-cuDNN", "SDPA-flash", "FlexAttention")
DEFAULT = "compensated"
README_SHAPE = {"grid": GRIDS[0], "s": 4096, "d": 128, "causal": True}
REGIMES = ("tie2s", "tie2", "tie3", "near2", "near8w", "one", "diffuse", "kbias", "gauss")
BACKENDS = (
    "compensated", "compensated, int8", "none", "SDPA-flash", "SDPA-cuDNN", "FlexAttention",
    "float32 O",
)  # fmt: skip
SYSTEMS = (
    "p2p", "all_gather", "a2a", "a2a+p2p", "all-gather + SDPA", "torch, allgather",
    "torch, alltoall", "torch, allgather, heads repeated", "torch, allgather, flash",
)  # fmt: skip
WRONG = 0.05
"""Relative RMS error from which an output is not that of attention."""
SHOWN_TOKENS = (8192, 32768, 524288, 131072)
"""Lengths of the table of context parallelism; the last one also on fewer GPUs than all."""
SMALL_MS = 1.5
"""Kinds of kernels below this are one row of a step's profile."""
GIB = 2**30


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown; the first column left-aligned, the others right-aligned."""
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "| --- |" + " ---: |" * (len(names) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def gpu_of(result: dict[str, Any]) -> str:
    """H200 of NVIDIA H200, H100 of NVIDIA H100 80GB HBM3; CPU where there was no GPU."""
    name = result["machine"].get("gpu", "CPU").removeprefix("NVIDIA ")
    return name.removesuffix(" 80GB HBM3")


def page_table(results: Iterable[dict[str, Any]], body: str, *notes: str) -> str:
    """A table with machine, day and commit of its results above and its notes below."""
    told = [f"{gpu_of(r)}, {r['utc'][:10]}, {short_commit(r['commit'])}" for r in results]
    above = f"Measured: {'; '.join(dict.fromkeys(told))}."
    below = [note for note in notes if note]
    return "\n".join([above, "", body, *(["", *below] if below else [])])


def versions(files: Iterable[Path]) -> str:
    """Versions of software that GPU results were measured with."""
    found: dict[str, set[str]] = {}
    for path in files:
        for result in json.loads(path.read_text()).values():
            if "gpu" in result["machine"]:
                for name, version in result["versions"].items():
                    found.setdefault(name, set()).add(version)
    told = [
        f"{name} {' or '.join(sorted(found[name]))}"
        for name in ("torch", "triton", "cudnn", "nccl", "megatron-core")
        if name in found
    ]
    return f"Software of all GPU measurements: {', '.join(told)}."


# Attention


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def title(row: Row) -> str:
    """A shape in words."""
    mask = "causal" if row["causal"] else "full"
    return f"{row['grid']}, d {_dims(row)}, {mask}, {row['s']} keys"


def _dims(row: Row) -> str:
    return str(row["d"]) if row["d"] == row["dv"] else f"{row['d']}/{row['dv']}"


def speed(rows: list[Row], ours: str, peer: str, which: str) -> dict[str, float]:
    """Shape -> the peer's time over ours, where both were measured."""
    pairs = ((title(r), r["peers"].get(ours, {}), r["peers"].get(peer, {})) for r in rows)
    return {name: b[which] / a[which] for name, a, b in pairs if which in a and which in b}


def summary(rows: list[Row]) -> dict[str, list[float]]:
    """Geometric mean and worst shape of our speed over each peer, and of the stabilizer's cost."""
    found: dict[str, list[float]] = {}
    for which in PASSES:
        for ours in OURS:
            for peer in PEERS:
                if values := list(speed(rows, ours, peer, which).values()):
                    found[f"{which}: {ours} speed / {peer}"] = [geometric_mean(values), min(values)]
        for ours in OURS[1:]:
            if values := list(speed(rows, "none", ours, which).values()):
                found[f"{which}: {ours} time / none"] = [geometric_mean(values), max(values)]
    return {name: [round(x, 3) for x in pair] for name, pair in found.items()}


@functools.cache
def _this_tree() -> str:
    return functions_digest()


def _changed(result: dict[str, Any]) -> str:
    if result.get("functions") == _this_tree():
        return ""
    return "**The kernels have changed since**: these are the figures of the commit named."


def _queueing(rows: list[Row], limit: float) -> str:
    """How many intervals contain host time: calls that took the host longer than ``limit`` ms."""
    host = [cell.get("host", 0.0) for r in rows for cell in r["peers"].values()]
    slow = sum(ms > limit for ms in host)
    return f"{slow} of {len(host)} intervals may contain host time." if slow else ""


def _both(rows: list[Row], ours: str, peer: str) -> str:
    """Geometric means of ``peer``'s time over ``ours``, "forward / backward"."""
    found = [list(speed(rows, ours, peer, which).values()) for which in PASSES]
    return ", ".join(f"{geometric_mean(x):.2f}" for x in found) if all(found) else "-"


def kernel_speed(parts: Parts) -> str:
    """Speed beside each peer and cost of the stabilizer, a row a head dim."""
    result = parts["speed"]
    kinds: dict[str, list[Row]] = {}
    for row in sorted(result["rows"], key=lambda r: (r["grid"] != GRIDS[0], r["grid"], r["d"])):
        grid = "" if row["grid"] == GRIDS[0] else f"{row['grid']}, "
        kinds.setdefault(f"{grid}d {_dims(row)}", []).append(row)
    kinds["all"] = result["rows"]
    body = [
        [kind, str(len(rows)), *(_both(rows, DEFAULT, peer) for peer in PEERS)]
        + [_both(rows, "none", DEFAULT)]
        for kind, rows in kinds.items()
    ]
    head = ["forward, backward", "shapes", *(f"speed / {peer}" for peer in PEERS)]
    head.append("time / `none`")
    notes = [_queueing(result["rows"], result["queued_ms"]), _changed(result)]
    notes += [] if result["complete"] else ["The run was stopped before its end."]
    return page_table([result], table(head, body), *notes)


def readme_cost(parts: Parts) -> str:
    """Time and memory of the stabilizer at one shape."""
    result = parts["speed"]
    (row,) = (r for r in result["rows"] if README_SHAPE.items() <= r.items())
    cells = row["peers"]
    body = []
    for name in ("SDPA-cuDNN", "none", DEFAULT):
        extra = _stabilizers()[name].saved_bytes(128) - 260 if name in OURS else 0
        label = f"`stable_flash`, `{name}`" if name in OURS else "cuDNN (SDPA)"
        body.append([label, *(f"{cells[name][p]:.2f} ms" for p in PASSES), f"{extra / 128:g}"])
    head = [f"{row['b']} x {row['s']} tokens, {row['h']} heads, d {row['d']}, causal", *PASSES]
    head.append("bytes kept per element of O, beyond O and LSE")
    return page_table([result], table(head, body), _changed(result))


def _stabilizers() -> Any:
    sys.path.append(str(ROOT / "kernels"))
    from stable_attention.stabilizers import STABILIZERS

    return STABILIZERS


def saved_bytes(_: Parts) -> str:
    """Bytes each stabilizer keeps for the backward, from the table the kernels read."""
    rows = []
    for s in _stabilizers().values():
        for residual in ("bf16", "int8") if s.keeps_residual else ("bf16",):
            name = f"`{s.name}`" + (f", {residual}" if s.keeps_residual else "")
            own = s.saved_bytes(128, residual) - (2 * 128 + 4)
            per = "0" if own == 0 else f"{own // 128} x d_v"
            rows.append([name, per, str(own), str(s.saved_bytes(128, residual))])
    head = ["stabilizer", "extra bytes per token and head", "at d_v = 128", "with O and LSE"]
    return table(head, rows)


def kernel_host(parts: Parts) -> str:
    """Microseconds that the host needs to launch a call; of compared checkouts the newest."""
    result = parts["host"]
    cells = {n.removeprefix("new "): c for n, c in result["microseconds"].items()}
    body = [
        [name, *(f"{cell[which]:,.0f}" for which in ("forward", "both"))]
        for name, cell in cells.items()
        if not name.startswith("old ")
    ]
    b, s, h, d = (result["shape"][x] for x in "bshd")
    head = [f"microseconds; b {b}, s {s}, {h} heads, d {d}", "forward", "forward and backward"]
    return page_table([result], table(head, body))


def kernel_float32(parts: Parts) -> str:
    """What attention in float32 takes beside `compensated`."""
    result = parts["float32"]
    told = {"split": "float32, split products (research)", "torch": "float32, PyTorch"}
    b, s, h, d = result["shape"]
    rows = [[told.get(n, f"`{n}`"), f"{t['both_ms']:.2f}"] for n, t in result["times"].items()]
    head = [f"b {b}, s {s}, {h} heads, d {d}", "forward and backward, ms"]
    return page_table([result], table(head, rows))


# Accuracy


def accuracy_delta(parts: Parts, n: str = "2048") -> str:
    """RMS error of delta over that of delta, a row a regime."""
    result = parts["delta"]
    rows = [
        [regime, *(_rms(result["cells"][regime][n].get(name, {})) for name in BACKENDS)]
        for regime in REGIMES
        if n in result["cells"].get(regime, {})
    ]
    gates = result["gates"]
    held = f"{sum(g['ok'] for g in gates)} of {len(gates)} gates hold, at 512 to 32,768 keys."
    head = [f"{int(n):,} keys, d 64", *BACKENDS]
    return page_table([result], table(head, rows), held, _changed(result))


def _rms(cell: dict[str, Any]) -> str:
    return f"{cell['rms']:.1e}" if "rms" in cell else "-"


def accuracy_context(parts: Parts) -> str:
    """Error on several ranks over that on one: the largest over regimes and numbers of ranks."""
    result = parts["context_parallel"]
    one = {c["regime"]: c for c in result["cells"].values() if c["ranks"] == 1}
    many: dict[str, list[dict[str, Any]]] = {}
    for cell in result["cells"].values():
        if cell["ranks"] > 1:
            many.setdefault(cell["mode"], []).append(cell)
    names = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV", "delta": "delta"}
    rows = [
        [mode]
        + [f"{max(c[x]['rms'] / one[c['regime']][x]['rms'] for c in cells):.3f}" for x in names]
        for mode, cells in many.items()
    ]
    ranks = sorted({c["ranks"] for cells in many.values() for c in cells})
    head = [f"{', '.join(map(str, ranks))} ranks over one", *names.values()]
    return page_table([result], table(head, rows))


# Context parallelism


def context_flops(problem: dict[str, Any], tokens: int, causal: bool) -> float:
    """Operations of forward and backward over a whole sequence."""
    full = 3.5 * 4.0 * problem["heads"] * tokens * tokens * problem["d"]
    return full / 2 if causal else full


def same_work(tokens: int, ranks: int, block: int) -> int:
    """Length whose attention on one GPU is a rank's share of ``tokens`` over ``ranks``."""
    return max(block, round(tokens / math.sqrt(ranks) / block) * block)


class Speeds:
    """TFLOP/s per GPU of the cells of one result."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.problem, self.block = result["problem"], result["block"]
        self.cells = {
            (c["system"], c["ranks"], c["tokens"], c["causal"]): c for c in result["cells"].values()
        }
        measured = {c["system"] for c in result["cells"].values() if "total_ms" in c}
        self.systems = [system for system in SYSTEMS if system in measured]

    def cell(self, system: str, ranks: int, tokens: int) -> dict[str, Any]:
        return self.cells.get((system, ranks, tokens, True), {})

    def speed(self, system: str, ranks: int, tokens: int) -> float | None:
        """TFLOP/s per GPU of forward and backward, causal; None where it was not measured."""
        ms = self.cell(system, ranks, tokens).get("total_ms")
        return None if ms is None else context_flops(self.problem, tokens, True) / ranks / ms / 1e9

    def alone(self, ranks: int, tokens: int) -> float | None:
        """The same of the kernel on one GPU with a rank's share of the work."""
        return self.speed("kernel", 1, same_work(tokens, ranks, self.block))

    def places(self) -> list[tuple[int, int]]:
        """(ranks, tokens) at which anything parallel was measured, in order."""
        found = {(n, s) for x, n, s, causal in self.cells if n > 1 and causal and x in SYSTEMS}
        return sorted(found, key=lambda p: (-p[0], p[1]))

    def wrong(self) -> dict[str, float]:
        """Systems whose output is not that of attention, with the largest relative error of O."""
        errors: dict[str, float] = {}
        for (system, *_), cell in self.cells.items():
            if cell.get("error_out", 0.0) > WRONG:
                errors[system] = max(errors.get(system, 0.0), cell["error_out"])
        return errors


def thousand(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def context_speed(parts: Parts) -> str:
    """TFLOP/s per GPU beside the kernel alone; peak memory at one length."""
    result = parts["speed"]
    speeds = Speeds(result)
    wrong, most = speeds.wrong(), max(ranks for ranks, _ in speeds.places())
    systems = [system for system in speeds.systems if system not in wrong]
    rows = []
    for ranks, tokens in speeds.places():
        if tokens in (SHOWN_TOKENS if ranks == most else SHOWN_TOKENS[-1:]):
            rates = [speeds.alone(ranks, tokens)]
            rates += [speeds.speed(system, ranks, tokens) for system in systems]
            cells = ["-" if rate is None else f"{rate:.0f}" for rate in rates]
            rows.append([f"{thousand(tokens)}, {ranks} GPUs", *cells])
    named = SHOWN_TOKENS[-1]
    memory = [speeds.cell(system, most, named).get("peak_mib") for system in systems]
    cells = ["-" if mib is None else f"{mib:,.0f}" for mib in memory]
    rows.append([f"MiB, {thousand(named)}, {most} GPUs", "", *cells])
    note = "; ".join(f"{name} ({error:.2f})" for name, error in wrong.items())
    note = note and f"Left out, wrong output (relative error of O): {note}."
    changed = result["sources"] != context_digest()
    since = "**The code has changed since**: these are the figures of the commit named." * changed
    head = ["TFLOP/s per GPU", "one GPU, same work", *systems]
    return page_table([result], table(head, rows), note, since)


# Training


def _beginning(parts: Parts, start: str) -> Parts:
    return {name: result for name, result in parts.items() if name.startswith(start)}


def training_speed(parts: Parts) -> str:
    """Tokens/s and MFU of GPT-2 124M, the trainer beside plain PyTorch, a column a GPU count."""
    results = _beginning(parts, "gpt2_124m")
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, result in results.items():
        for run in (run for run in result["runs"] if "error" not in run):
            cells.setdefault(run["system"], {}).setdefault(name, []).append(run)
    rows = []
    for system, by_result in cells.items():
        row = [system]
        for name in results:
            runs = by_result.get(name, [])
            row.append(_span([r["tokens_per_s"] for r in runs], "{:,.0f}"))
            row.append(_span([100 * r["mfu"] for r in runs], "{:.1f}"))
        rows.append(row)
    head = ["medians"]
    for name in results:
        head += [f"{name.split(', ')[1]}: tokens/s", "MFU, %"]
    first = next(iter(results.values()))
    note = (
        f"{first['global_batch']} sequences of 1,024 tokens a step, {first['micro_batch']} at once."
    )
    return page_table(results.values(), table(head, rows), note)


def _span(values: list[float], form: str) -> str:
    """A value, or the lowest and highest of several."""
    ends = dict.fromkeys(form.format(x) for x in (min(values), max(values))) if values else ["-"]
    return "–".join(ends)


def training_long(parts: Parts) -> str:
    """Tokens/s, MFU and memory of training at long context."""
    results = _beginning(parts, "long context")
    rows = []
    for result in results.values():
        for run in (run for run in result["runs"] if "error" not in run):
            rows.append(
                [
                    f"`{result['config']}`, {thousand(result['seq_length'])}, {run['mode']}",
                    f"{run['gpus']}",
                    f"{run['tokens_per_s']:,.0f} ({run['planned_tokens_per_s']:,.0f})",
                    "-" if run["mfu"] is None else f"{100 * run['mfu']:.1f} %",
                    f"{run['memory_gib']:.2f} ({run['planned_memory_gib']:.2f})",
                ]
            )
    head = ["measured (planned)", "GPUs", "tokens/s", "MFU", "GiB a GPU"]
    return page_table(results.values(), table(head, rows))


def training_backends(parts: Parts) -> str:
    """Distance of loss curves to `sdpa_cudnn`, beside that of two runs of `sdpa_cudnn`."""
    result = parts["first steps"]
    counts = sorted(name for name in result if name.endswith("_gpu"))
    distances = {n: result[n]["distance_to_sdpa_cudnn"] for n in counts}
    rows = [
        [name]
        + [
            form.format(distances[n][name][what])
            for n in counts
            for what, form in (("mean", "{:.4f}"), ("last_quarter_signed", "{:+.4f}"))
        ]
        for name in distances[counts[0]]
    ]
    head = [f"loss against `sdpa_cudnn`, {result['steps']} steps"]
    for n in counts:
        head += [f"{n[0]} GPU{'s' * (n[0] != '1')}: mean distance", "signed, last quarter"]
    return page_table([result], table(head, rows))


def step_parts(parts: Parts) -> str:
    """Milliseconds of a step by kind of kernel, a column a profile."""
    profiles = list(parts.values())
    kinds = sorted(
        {kind for p in profiles for kind in p["parts_ms"]},
        key=lambda kind: -max(p["parts_ms"].get(kind, 0.0) for p in profiles),
    )
    large = [k for k in kinds if max(p["parts_ms"].get(k, 0.0) for p in profiles) >= SMALL_MS]
    rows = [[kind, *(f"{p['parts_ms'].get(kind, 0.0):.1f}" for p in profiles)] for kind in large]
    rest = [sum(ms for k, ms in p["parts_ms"].items() if k not in large) for p in profiles]
    rows.append(["other kernels", *(f"{ms:.1f}" for ms in rest)])
    rows.append(["no kernel runs", *(f"{p['step_ms'] - p['busy_ms']:.1f}" for p in profiles)])
    rows.append(["**step**, not profiled", *(f"**{p['step_ms']:.1f}**" for p in profiles)])
    return page_table(profiles, table(["ms a step", *parts], rows))


def telemetry(parts: Parts) -> str:
    """Cost of an observation in runs as they were made, a row a kind and number of GPUs."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in parts["runs"]["attempts"]:
        gpu = gpu_of({"machine": {"gpu": row["gpu"]}})
        groups.setdefault((row["world_size"], gpu), []).append(row)
    rows = []
    for (count, gpu), found in sorted(groups.items()):
        times = [_span([1e3 * f[f"{x}_seconds"] for f in found], "{:.1f}") for x in _TIMES]
        share = _span([100 * row["share"] for row in found], "{:.2f}")
        rows.append([f"{count} x {gpu}", str(len(found)), *times, share])
    head = ["observed every 50 steps", "runs", "step, ms", "observation, ms", "% of a step"]
    return page_table([parts["runs"]], table(head, rows))


_TIMES = ("step", "observation")


def layouts_agree(parts: Parts) -> str:
    """Largest relative difference of each model to one process, and the bitwise resumes."""
    rows, notes = [], []
    for name, result in parts.items():
        by_model: dict[str, list[dict[str, Any]]] = {}
        for row in result["layouts"]:
            by_model.setdefault(row["model"], []).append(row)
        for model, found in by_model.items():
            good = sum(bool(row["agrees"]) for row in found)
            worst = [f"{max(row[x] for row in found):.1e}" for x in ("loss", "grad_norm")]
            rows.append([f"{model}, up to {name}", *worst, f"{good} of {len(found)}"])
        names = ", ".join(dict.fromkeys(row["layout"] for row in result["layouts"]))
        same = sum(bool(row["bitwise"]) for row in result["resume"])
        notes += [f"Layouts: {names}.", f"Bitwise resumes: {same} of {len(result['resume'])}."]
    head = ["model", "loss", "gradient norm", "agree"]
    return page_table(parts.values(), table(head, rows), *notes)


# Planning


def fullest(by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every stage the rank with the highest peak: the one that a plan must hold for.

    They differ where experts are not given the same number of tokens.
    """
    found: dict[int, dict[str, Any]] = {}
    for rank in by_rank:
        best = found.setdefault(rank["stage"], rank)
        if (rank["allocated"] or 0) > (best["allocated"] or 0):
            found[rank["stage"]] = rank
    return list(found.values())


def plan_memory(parts: Parts) -> str:
    """A row a case: of its stages' fullest ranks the one that the plan misses most."""
    result = parts["memory"]
    rows = []
    for case in result["cases"]:
        name = [f"{case['model']} {case['layout']}", str(case["ranks"])]
        ranks = fullest(case.get("by_rank", []))
        if "error" in case or any(r["ratio"] is None for r in ranks):
            rows.append([*name, "-", "did not run" if "error" in case else "not measured", "-"])
            continue
        worst = max(ranks, key=lambda r: abs(r["ratio"] - 1))
        cells = [f"{worst[key] / GIB:.2f}" for key in ("planned", "allocated")]
        rows.append([*name, *cells, f"{worst['ratio']:.3f}"])
    good = len(result["cases"]) - len(result["off"])
    held = f"{good} of {len(result['cases'])} cases within {result['tolerance']:.0%}."
    if "planned_at" in result:
        held += f" Planned at {short_commit(result['planned_at'])}."
    head = ["model and layout", "GPUs", "planned GiB", "measured GiB", "ratio"]
    return page_table([result], table(head, rows), held)


# Marker -> (file of docs/assets, named as the script that writes it, or ""; how the name of the
# part begins that must be there; renderer).
TABLES: dict[str, tuple[str, str, Callable[[Parts], str]]] = {
    "cost": ("attention", "speed", readme_cost),
    "kernel-speed": ("attention", "speed", kernel_speed),
    "kernel-host": ("attention", "host", kernel_host),
    "kernel-float32": ("attention", "float32", kernel_float32),
    "stabilizer-bytes": ("", "", saved_bytes),
    "accuracy-delta": ("accuracy", "delta", accuracy_delta),
    "accuracy-context": ("accuracy", "context_parallel", accuracy_context),
    "context-speed": ("context_parallel", "speed", context_speed),
    "training-speed": ("training", "gpt2_124m", training_speed),
    "training-long": ("training", "long context", training_long),
    "training-backends": ("training", "first steps", training_backends),
    "step-parts": ("step_profile", "", step_parts),
    "telemetry-cost": ("telemetry_cost", "runs", telemetry),
    "layouts-agree": ("layouts", "", layouts_agree),
    "planned-memory": ("plan", "memory", plan_memory),
}


def content(name: str, results: Path) -> str:
    """The text that belongs between a marker's lines."""
    if name == "versions":
        return versions(sorted(results.glob("*.json")))
    file, part, render = TABLES[name]
    path = results / f"{file}.json"
    parts = json.loads(path.read_text()) if path.is_file() else {}
    if file and not _beginning(parts, part):
        return f"Not measured yet: `python benchmarks/{file}.py --help` says how."
    return render(parts)


def fill(text: str, results: Path = RESULTS) -> str:
    """``text`` with every known marker's content renewed; ValueError for a marker without end."""
    for name in ("versions", *TABLES):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin not in text:
            continue
        before, rest = text.split(begin, 1)
        if end not in rest:
            raise ValueError(f"marker {begin!r} has no {end!r} after it")
        text = f"{before}{begin}\n{content(name, results)}\n{end}{rest.split(end, 1)[1]}"
    return text


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


Lines = dict[str, list[tuple[float, float]]]


def attention_panels(result: dict[str, Any]) -> dict[str, Lines]:
    """TFLOP/s by sequence length, a panel a head dim and pass, causal."""
    rows = [r for r in result["rows"] if r["grid"] == GRIDS[0] and r["causal"]]
    rows.sort(key=lambda r: r["s"])
    panels: dict[str, Lines] = {}
    for which, factor in (("forward", 1.0), ("backward", 2.5)):
        for r in sorted(rows, key=lambda r: r["d"]):
            lines = panels.setdefault(f"d {r['d']}, causal, {which}", {})
            flops = factor * 2 * r["b"] * r["h"] * r["s"] ** 2 * r["d"]
            for name in (*PEERS, "none", DEFAULT):
                if ms := r["peers"].get(name, {}).get(which):
                    lines.setdefault(name, []).append((r["s"], flops / ms / 1e9))
    return panels


def context_panels(result: dict[str, Any]) -> dict[str, Lines]:
    """TFLOP/s per GPU by sequence length, a panel a number of GPUs."""
    speeds, panels = Speeds(result), {}
    for ranks, tokens in speeds.places():
        lines: Lines = panels.setdefault(f"{ranks} GPUs, causal", {})
        rates = {"kernel, one GPU, same work": speeds.alone(ranks, tokens)}
        rates |= {name: speeds.speed(name, ranks, tokens) for name in speeds.systems}
        for name, rate in rates.items():
            if rate is not None:
                lines.setdefault(name, []).append((tokens, rate))
    return panels


def plot(panels: dict[str, Lines], rows: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = len(panels) // rows
    size = (4.5 * columns, 3.5 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    for axis, (name, lines) in zip(axes.flat, panels.items(), strict=True):
        for label, points in lines.items():
            axis.plot(*zip(*points, strict=True), "k--" if "kernel" in label else "o-", label=label)
        axis.set(
            xscale="log", ylim=(0, None), title=name, xlabel="tokens", ylabel="TFLOP/s per GPU"
        )
        ticks = sorted({x for points in lines.values() for x, _ in points})[::2]
        axis.set_xticks(ticks, [thousand(int(x)) for x in ticks], minor=False)
    axes.flat[-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


PLOTS = {"attention": (attention_panels, 2), "context_parallel": (context_panels, 1)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a page differs")
    parser.add_argument("--plots", action="store_true", help="draw the plots of docs/assets, too")
    args = parser.parse_args(arguments)
    stale = []
    for page in pages():
        old = page.read_text()
        new = fill(old)
        if new != old:
            stale.append(page.relative_to(ROOT))
            if not args.check:
                page.write_text(new)
    for page in stale:
        print(f"{'differs' if args.check else 'wrote'}: {page}")
    for name, (panels, rows) in PLOTS.items() if args.plots else ():
        result = json.loads((RESULTS / f"{name}.json").read_text())["speed"]
        plot(panels(result), rows, RESULTS / f"{name}.png")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

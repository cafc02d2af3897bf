"""The manual's tables of training: speed, losses, parts of a step, telemetry, layouts, plans.

A renderer takes the parts of a file of docs/assets; tables.py says which. Needs no torch.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from machine import Parts, Table, fullest, gpu_of, span, thousand

from megatron_patch.runtime.environment import short_commit

SMALL_MS = 16.0
"""Kinds of kernels below this are one row of a step's profile."""
KINDS = {"PP": "pipeline", "EP": "experts", "CP": "context", "TP": "tensor", "DP": "data"}
"""Axis -> column of the planned memory; a layout of several axes counts in the first."""


def training_speed(parts: Parts) -> Table:
    """Tokens/s, a row a shape and number of GPUs, a column a system."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, result in parts.items():
        for run in (run for run in result["runs"] if "error" not in run):
            more = f", {run['gpus']} GPUs" if run["gpus"] > 1 else ""
            cells = found.setdefault(name.split(", ")[1] + more, {})
            cells.setdefault(run["system"], []).append(run["tokens_per_s"])
    systems = list(dict.fromkeys(system for cells in found.values() for system in cells))
    rows = [
        [x, *(span(cells.get(y, []), "{:,.0f}") for y in systems)] for x, cells in found.items()
    ]
    return ["tokens/s", *systems], rows, []


def training_long(parts: Parts) -> Table:
    """Tokens/s, MFU and memory of training at long context."""
    rows = [
        [
            f"`{result['config']}`, {thousand(result['seq_length'])}, {run['mode']}",
            f"{run['gpus']}",
            f"{run['tokens_per_s']:,.0f} ({run['planned_tokens_per_s']:,.0f})",
            "-" if run["mfu"] is None else f"{100 * run['mfu']:.1f} %",
            f"{run['memory_gib']:.2f} ({run['planned_memory_gib']:.2f})",
        ]
        for result in parts.values()
        for run in result["runs"]
        if "error" not in run
    ]
    return ["measured (planned)", "GPUs", "tokens/s", "MFU", "GiB a GPU"], rows, []


def training_backends(parts: Parts) -> Table:
    """Mean distance of losses to those of `sdpa_cudnn`, and the signed one of the last quarter."""
    found: dict[str, dict[str, str]] = {}
    for part, result in parts.items():
        losses = {run["system"].split(", ")[-1]: run["losses"] for run in result["runs"]}
        exact = losses.pop("sdpa_cudnn")
        for name, own in losses.items():
            gaps = [x - y for x, y in zip(own, exact, strict=True)]
            last = statistics.mean(gaps[-(len(gaps) // 4) :])
            cells = found.setdefault({"trainer": "stable_flash"}.get(name, name), {})
            cells[part] = f"{statistics.mean(map(abs, gaps)):.4f} ({last:+.4f})"
    what = f"mean of {len(exact)} losses in {result['steps']} steps (signed, last quarter)"
    rows = [[name, *(cells.get(part, "-") for part in parts)] for name, cells in found.items()]
    return [what, *(part.split(", ")[1] for part in parts)], rows, []


def step_parts(parts: Parts) -> Table:
    """Milliseconds of a step by kind of kernel, a column a profile."""
    profiles = list(parts.values())
    most = {k: max(p["parts_ms"].get(k, 0.0) for p in profiles) for p in profiles
            for k in p["parts_ms"]}  # fmt: skip
    large = sorted(
        (k for k, ms in most.items() if ms >= SMALL_MS and k != "other"), key=lambda k: -most[k]
    )
    rows = [[kind, *(f"{p['parts_ms'].get(kind, 0.0):.1f}" for p in profiles)] for kind in large]
    rest = [sum(ms for k, ms in p["parts_ms"].items() if k not in large) for p in profiles]
    idle = [p["step_ms"] - p["busy_ms"] for p in profiles]
    rows += [["other kernels", *(f"{ms:.1f}" for ms in rest)]]
    rows += [["no kernel runs", *(f"{ms:.1f}" for ms in idle)]]
    rows += [["**step**, not profiled", *(f"**{p['step_ms']:.1f}**" for p in profiles)]]
    return ["ms a step", *parts], rows, []


def telemetry(parts: Parts) -> Table:
    """Cost of an observation in runs as they were made, a row a kind and number of GPUs."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in parts["runs"]["attempts"]:
        gpu = gpu_of({"machine": {"gpu": row["gpu"]}})
        groups.setdefault((row["world_size"], gpu), []).append(row)
    rows = []
    for (count, gpu), found in sorted(groups.items()):
        steps = span([1e3 * f["step_seconds"] for f in found], "{:.1f}")
        extra = span([1e3 * f["observation_seconds"] for f in found], "{:.1f}")
        share = span([100 * f["share"] for f in found], "{:.2f}")
        rows.append([f"{count} x {gpu}", str(len(found)), steps, extra, share])
    head = ["observed every 50 steps", "runs", "step, ms", "observation, ms", "% of a step"]
    return head, rows, []


def layouts_agree(parts: Parts) -> Table:
    """Largest relative difference of each model to one process, and the bitwise resumes."""
    rows, notes = [], []
    for name, result in parts.items():
        for model in dict.fromkeys(row["model"] for row in result["layouts"]):
            found = [row for row in result["layouts"] if row["model"] == model]
            good = sum(bool(row["agrees"]) for row in found)
            worst = [f"{max(row[x] for row in found):.1e}" for x in ("loss", "grad_norm")]
            rows.append([f"{model}, up to {name}", *worst, f"{good} of {len(found)}"])
        kinds = dict.fromkeys(x["layout"] for x in result["layouts"])
        notes.append(f"Layouts: {', '.join(kinds)}.")
        same = sum(bool(row["bitwise"]) for row in result["resume"])
        notes.append(f"Bitwise resumes: {same} of {len(result['resume'])}.")
    return ["model", "loss", "gradient norm", "agree"], rows, notes


def plan_memory(parts: Parts) -> Table:
    """Planned over measured peak by model and kind of layout: the worst ratio, number of cases."""

    def worst(ratios: list[float]) -> float:
        return max(ratios, key=lambda ratio: abs(ratio - 1))

    result = parts["memory"]
    found: dict[str, dict[str, list[float]]] = {}
    for case in result["cases"]:
        kind = next((of for axis, of in KINDS.items() if axis in case["layout"]), "1 GPU")
        ratios = [r["ratio"] for r in fullest(case.get("by_rank", [])) if r["ratio"] is not None]
        cases = found.setdefault(case["model"], {}).setdefault(kind, [])
        cases.append(worst(ratios) if ratios else math.inf)  # inf: it did not run
    kinds = ["1 GPU", *reversed(KINDS.values())]
    rows = [
        [model, *(f"{worst(x[kind]):.3f} ({len(x[kind])})" if kind in x else "-" for kind in kinds)]
        for model, x in found.items()
    ]
    good = len(result["cases"]) - len(result["off"])
    held = f"{good} of {len(result['cases'])} cases within {result['tolerance']:.0%}."
    if "planned_at" in result:
        held += f" Planned at {short_commit(result['planned_at'])}."
    return ["planned / measured (cases)", *kinds], rows, [held]

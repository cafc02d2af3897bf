"""Tables of docs/planning.md: planned and measured memory."""

from __future__ import annotations

from typing import Any

from table_text import Tables, kept_from, origin, table

from megatron_patch.runtime.environment import short_commit

GIB = 2**30


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


def memory(result: dict[str, Any]) -> str:
    """A row a case: of its stages' fullest ranks the one that the plan misses most."""
    rows = []
    for case in result["cases"]:
        name = [case["model"], case["layout"], str(case["ranks"])]
        if "error" in case:
            rows.append([*name, "-", "-", "did not run", "-"])
            continue
        ranks = fullest(case["by_rank"])
        if any(r["ratio"] is None for r in ranks):
            rows.append([*name, f"{ranks[0]['planned'] / GIB:.2f}", "-", "not measured", "-"])
            continue
        worst = max(ranks, key=lambda r: abs(r["ratio"] - 1))
        cells = [f"{worst[key] / GIB:.2f}" for key in ("planned", "allocated")]
        reserved = worst["planned_reserved"] / worst["reserved"]
        rows.append([*name, *cells, f"{worst['ratio']:.3f}", f"{reserved:.3f}"])
    head = ["model", "layout", "GPUs", "planned GiB", "measured GiB", "ratio", "reserved, ratio"]
    good = len(result["cases"]) - len(result["off"])
    held = f"{good} of {len(result['cases'])} cases within {result['tolerance']:.0%}."
    if result["missing"]:
        held += f" {result['missing']} more cases were not reached."
    if "planned_at" in result:
        held += f" Planned at commit {short_commit(result['planned_at'])}."
    named = [(f"{case['model']} {case['layout']}", case) for case in result["cases"]]
    held += kept_from(named, "Measured")
    return "\n".join([origin(result), held, "", table(head, rows)])


def tables() -> Tables:
    """Markers of the page, as `render_tables.TABLES` wants them."""
    return {"plan-memory": ("plan_memory_8gpu", memory, "plan_memory.py --gpus 8")}

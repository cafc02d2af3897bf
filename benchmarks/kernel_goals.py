"""What a table of attention timings means: geometric means, costs, goals with pass or fail.

Pure functions of the rows of ``attention.json``, used when the file is written and when a page is
made from it. A row is a shape (grid, b, s, h, kv_heads, d, dv, causal) with ``peers``: name ->
{"forward": ms, "backward": ms, "peak_mib": MiB} or {"error": why}.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

Row = dict[str, Any]
PASSES = ("forward", "backward")
OURS = ("none", "compensated", "compensated int8")
PEERS = ("SDPA-cuDNN", "SDPA-flash", "FlexAttention")
DEFAULT = "compensated"
# Bytes of O's low-order part per element.
RESIDUAL_BYTES = {"none": 0, "compensated": 2, "compensated int8": 1}
MIN_CUDNN = {"forward": 0.80, "backward": 0.70}
MAX_COST = 1.03
# The allocator rounds every tensor up to 512 bytes, and figures are stored to 0.1 MiB.
MEMORY_SLACK_MIB = 0.25


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def title(row: Row) -> str:
    """A shape in words."""
    d = str(row["d"]) if row["d"] == row["dv"] else f"{row['d']}/{row['dv']}"
    mask = "causal" if row["causal"] else "full"
    return f"{row['grid']}, d {d}, {mask}, {row['s']} keys"


def speed(rows: list[Row], ours: str, peer: str, which: str) -> dict[str, float]:
    """Shape -> the peer's time over ours, where both were measured."""
    pairs = ((title(r), r["peers"].get(ours, {}), r["peers"].get(peer, {})) for r in rows)
    return {name: b[which] / a[which] for name, a, b in pairs if which in a and which in b}


def residual_mib(row: Row, name: str) -> float:
    """MiB of O's low-order part that a stabilizer of ours keeps for a shape."""
    return RESIDUAL_BYTES[name] * row["b"] * row["s"] * row["h"] * row["dv"] / 2**20


def summary(rows: list[Row]) -> dict[str, list[float]]:
    """Geometric mean and worst shape of our speed over each peer, and of the stabilizer's cost."""
    found: dict[str, list[float]] = {}
    for which in PASSES:
        for name in OURS:
            for peer in PEERS:
                values = list(speed(rows, name, peer, which).values())
                if values:
                    mean, low = geometric_mean(values), min(values)
                    found[f"{which}: {name} speed / {peer}"] = [round(mean, 3), round(low, 3)]
        for name in OURS[1:]:
            values = list(speed(rows, "none", name, which).values())
            if values:
                mean, high = geometric_mean(values), max(values)
                found[f"{which}: {name} time / none"] = [round(mean, 3), round(high, 3)]
    return found


def goals(rows: list[Row], planned: int) -> list[dict[str, Any]]:
    """The goals of the first step: what, value, limit, ok, and the shapes that miss it."""
    found = []
    for which in PASSES:
        ratio = geometric_mean(list(speed(rows, DEFAULT, "SDPA-cuDNN", which).values()))
        found.append(
            _goal(f"{which}: {DEFAULT} speed / SDPA-cuDNN", ratio, MIN_CUDNN[which], more=True)
        )
    for which in PASSES:
        cost = geometric_mean(list(speed(rows, "none", DEFAULT, which).values()))
        found.append(_goal(f"{which}: {DEFAULT} time / none", cost, MAX_COST, more=False))
    for which in PASSES:
        ratios = speed(rows, DEFAULT, "SDPA-flash", which)
        slow = [f"{name}: {x:.2f}" for name, x in ratios.items() if x <= 1]
        worst = min(ratios.values(), default=math.nan)
        goal = _goal(f"{which}: {DEFAULT} faster than SDPA-flash everywhere", worst, 1.0, more=True)
        found.append(goal | {"misses": slow, "ok": bool(ratios) and not slow})
    found += [_memory_goal(rows, "SDPA-flash"), _memory_goal(rows, "none")]
    failed = [
        f"{title(r)}: {name}: {r['peers'].get(name, {}).get('error', 'not measured')}"
        for r in rows
        for name in OURS
        if "backward" not in r["peers"].get(name, {})
    ]
    done = _goal("shapes measured", len(rows), planned, more=True)
    return [*found, done | {"misses": failed, "ok": len(rows) >= planned and not failed}]


def _goal(what: str, value: float, limit: float, *, more: bool) -> dict[str, Any]:
    known = not math.isnan(value)
    return {
        "what": what,
        "value": round(value, 4) if known else None,
        "limit": limit,
        "at": "least" if more else "most",
        "ok": known and (value >= limit if more else value <= limit),
        "misses": [],
    }


def _memory_goal(rows: list[Row], base: str) -> dict[str, Any]:
    """Peak memory over that of ``base``: at most (SDPA-flash) or exactly (none) the residual."""
    excess, misses = [], []
    for row in rows:
        ours, theirs = (row["peers"].get(x, {}).get("peak_mib") for x in (DEFAULT, base))
        if ours is None or theirs is None:
            continue
        over = ours - theirs - residual_mib(row, DEFAULT)
        excess.append(over)
        if over > MEMORY_SLACK_MIB or (base == "none" and over < -MEMORY_SLACK_MIB):
            misses.append(f"{title(row)}: {over:+.1f} MiB")
    how = "exactly" if base == "none" else "at most"
    what = f"peak memory: {how} {base}'s plus the low-order part (MiB above it)"
    goal = _goal(what, max(excess, default=math.nan), 0.0, more=False)
    return goal | {"misses": misses, "ok": bool(excess) and not misses}

"""Tables of docs/kernels.md: speed, cost of the stabilizer, memory, and verdicts of the GPU checks.

Each function takes the JSON object its benchmark wrote and returns Markdown; ``render_tables.py``
puts it between the markers of a page. What a file does not vouch for is said in its text: kernels
that are not the tree's, host time inside intervals, a run that was cut short.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

from kernel_goals import DEFAULT, OURS, PASSES, geometric_mean, goals, speed, title
from machine import device_digest, functions_digest, sources_digest
from table_text import Tables, origin, table

SHAPES = 39
"""Shapes of the grid of benchmarks/attention.py; a test compares."""
PEERS = ("SDPA-cuDNN", "SDPA-flash", "FlexAttention")
NAMED = 6
"""Intervals that a page names; of more it gives the number."""


@functools.cache
def _this_tree() -> tuple[str, str, str]:
    return sources_digest(), device_digest(), functions_digest()


def state(result: dict[str, Any]) -> str:
    """Origin, and whether the kernels measured are those of this tree."""
    known, (whole, device, functions) = result.get("kernels"), _this_tree()
    if known is None:
        said = (
            "The file does not say which kernel sources ran (it predates that): read these figures "
            "as those of the commit named, not of the present kernels."
        )
    elif known == whole:
        said = "The kernels measured are those of this tree."
    elif result.get("device") == device:
        said = (
            "The kernels measured are those of this tree; what checks a call's arguments on the "
            "host before it has changed since."
        )
    elif result.get("functions") == functions:
        said = (
            "The kernels measured are those of this tree, with its tiles; the Python that launches "
            "them has changed since."
        )
    else:
        said = (
            "**The kernels have changed since**: read these figures as those of the commit named."
        )
    return f"{origin(result)} {said}"


def _mean(values: dict[str, float]) -> str:
    return f"{geometric_mean(list(values.values())):.2f}" if values else "-"


def _kinds(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by grid and head dims, in the order of the page."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: (r["grid"] != "hidden 2048", r["grid"], r["d"])):
        d = str(row["d"]) if row["d"] == row["dv"] else f"{row['d']}/{row['dv']}"
        grid = "" if row["grid"] == "hidden 2048" else f"{row['grid']}, "
        found.setdefault(f"{grid}d {d}", []).append(row)
    return found


def _queueing(result: dict[str, Any]) -> list[str]:
    """What the intervals contain besides the GPU's work."""
    cells = [(title(r), n, c) for r in result["rows"] for n, c in r["peers"].items()]
    timed = [(shape, name, cell) for shape, name, cell in cells if "forward" in cell]
    if not any("host" in cell for _, _, cell in timed):
        return [
            "Launches were not queued in this run: forward times of short sequences (below 4k "
            "keys) include the 0.35 to 0.4 ms that Python spent on a call."
        ]
    limit = result.get("queued_ms", 0.0)
    slow = [x for x in timed if x[2].get("host", 0.0) > limit > 0]
    if not slow:
        return []
    if len(slow) <= NAMED:
        names = "; ".join(f"{shape}: {name}" for shape, name, _ in slow)
        return [f"Intervals that contain host time: {names}."]
    longest = max(cell["host"] for _, _, cell in slow)
    whose = collections.Counter(name for _, name, _ in slow).most_common()
    return [
        f"A slow host: {len(slow)} of {len(timed)} calls took it longer than the {limit:.2f} ms of "
        f"queued work that an interval waits behind (up to {longest:.2f} ms), and their intervals "
        f"may contain host time: {', '.join(f'{name} {count}' for name, count in whose)}."
    ]


def speed_table(result: dict[str, Any]) -> str:
    """Geometric means of our speed over each peer, by head dim and pass."""
    rows = result["rows"]
    body = []
    for which in PASSES:
        for kind, mine in [*_kinds(rows).items(), ("all shapes", rows)]:
            cells = [_mean(speed(mine, DEFAULT, peer, which)) for peer in PEERS]
            plain = _mean(speed(mine, "none", "SDPA-cuDNN", which))
            cost = _mean(speed(mine, "none", DEFAULT, which))
            eight = _mean(speed(mine, "none", "compensated int8", which))
            body.append([f"{which}, {kind}", str(len(mine)), *cells, plain, cost, eight])
    head = ["geometric mean", "shapes", *(f"{DEFAULT} / {p}" for p in PEERS), "none / SDPA-cuDNN"]
    head += ["time, bf16 low part / none", "time, int8 low part / none"]
    notes = _queueing(result)
    if len(rows) < SHAPES:
        notes.append(f"The run covers {len(rows)} of {SHAPES} shapes.")
    notes.append("Speeds are ratios of times on the same tensors: above 1 is faster than the peer.")
    return "\n".join([state(result), *notes, "", table(head, body)])


def goal_table(result: dict[str, Any]) -> str:
    """The goals of the first step, met or missed, and which shapes miss them."""
    found = goals(result["rows"], SHAPES)
    body = [
        [
            goal["what"],
            "-" if goal["value"] is None else f"{goal['value']:.4g}",
            f"at {goal['at']} {goal['limit']:g}",
            "met" if goal["ok"] else "**missed**",
        ]
        for goal in found
    ]
    missed = [
        f"- {goal['what']}: {'; '.join(goal['misses'][:12])}"
        + (f"; and {len(goal['misses']) - 12} more" if len(goal["misses"]) > 12 else "")
        for goal in found
        if goal["misses"]
    ]
    lines = [table(["goal", "value", "limit", "verdict"], body)]
    return "\n".join([*lines, "", "Shapes that miss a goal:", "", *missed] if missed else lines)


def memory_table(result: dict[str, Any]) -> str:
    """Peak memory of forward and backward beyond the inputs, at 4k keys."""
    names = ("SDPA-flash", "SDPA-cuDNN", *OURS)
    body = []
    for row in sorted(result["rows"], key=title):
        cells = [row["peers"].get(name, {}).get("peak_mib") for name in names]
        if row["s"] == 4096 and any(cells):
            body.append([title(row), *("-" if x is None else f"{x:.0f}" for x in cells)])
    return table(["MiB", *names], body)


def sanitizer_line(result: dict[str, Any]) -> str:
    """The verdict of compute-sanitizer."""
    if not result["available"]:
        return f"{state(result)} compute-sanitizer was not on that machine: not checked."
    control = result["control"]
    if control["unusable"]:
        why = control["unusable"]
        return (
            f"{state(result)} compute-sanitizer did not work on that machine ({why}): not checked."
        )
    found = "found" if result["finds_errors"] else "**not found**, so that nothing below says much"
    lines = [f"{state(result)} A planted out-of-bounds store was {found}."]
    for name, run in result["checkers"].items():
        errors = "no verdict" if run["errors"] is None else f"{run['errors']} errors"
        late = ", stopped for time" if run["timed_out"] else ""
        failed = f", {len(run['failed'])} of them raised" if run["failed"] else ""
        lines.append(
            f"{name}: {errors} in {run['cases'] + len(run['failed'])} of {result['planned']} calls "
            f"(forward and backward){failed}{late}."
        )
    return " ".join(lines)


WAYS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "segments of 1024, synchronous product": lambda r: r["segment"] == 1024 and r["ones"] == 8,
    "late, asynchronous product": lambda r: r["segment"] == r["bn"] and r["ones"] == 16,
    "late, float32 additions": lambda r: r["segment"] == r["bn"] and r["ones"] == 0,
}
"""How the forward sums the rounded P, as a test of a record of benchmarks/search_tiles.py."""


def row_sum_table(result: dict[str, Any]) -> str:
    """Time of the fastest tile of each way to sum the rounded P over that of "none"."""
    body = []
    for d in (64, 128):
        for mask in ("full", "band"):
            row = f"forward/{d}/{mask}"
            records = [
                r
                for r in result["records"]
                if r["width"] == d
                and r["banded"] == (mask == "band")
                and r["ms"]
                and not r.get("ahead")  # a loop of earlier kernels, in the records of their search
            ]
            none = min(
                r["ms"]
                for r in result["variants"]
                if r["row"] == row and r["stabilizer"] == "none" and r["ms"]
            )
            fastest = [
                min((r["ms"] for r in records if test(r)), default=None) for test in WAYS.values()
            ]
            name = f"{'causal' if mask == 'band' else 'full'}, d {d}"
            body.append(
                [name, f"{none:.3f} ms", *(f"{ms / none:.2f}" if ms else "-" for ms in fastest)]
            )
    return "\n".join([origin(result), "", table(["4 x 4k tokens", "none", *WAYS], body)])


def compared_table(result: dict[str, Any]) -> str:
    """Geometric means of a run of compare_trees.py; a version's own tiles stand behind its name."""
    base = next(key for key in result if key.startswith("speed over "))
    means, body = result[base], []
    for name, version in result["compared"].items():
        tiles = ", ".join(f"{row}={tile}" for row, tile in version["tiles"].items())
        cells = [means[f"{name} {s}"] for s in ("compensated", "none")]
        figures = [f"{cell[p]:.3f}" for p in ("forward", "backward") for cell in cells]
        body.append([f"{name} {tiles}".strip(), *figures])
    head = ["version", "forward", "forward, none", "backward", "backward, none"]
    shapes = f"{base[0].upper()}{base[1:]}, {len(result['rows'])} shapes."
    if not result["complete"]:
        shapes += " The run was stopped before its end."
    return "\n".join([f"{origin(result)} {shapes}", "", table(head, body)])


FLOAT32 = {"split": "split products", "torch": "PyTorch, float32", "compensated": "`compensated`"}
FLOAT32_OF = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}


def float32_attention(result: dict[str, Any]) -> str:
    """Errors against float64 and times of attention in float32, a line an implementation."""
    times = result.get("times", {})
    body = []
    for name, told in FLOAT32.items():
        found, took = result["errors"][name], times.get(name, {})
        both = f"{took['both_ms']:.2f} ms" if took else "-"
        body.append([told, both, *(f"{found[tensor]:.1e}" for tensor in FLOAT32_OF)])
    b, s, h, d = result["shape"]
    where = f"b {b}, s {s:,}, {h} heads, d {d}, causal; relative RMS errors."
    head = ["implementation", "forward and backward", *FLOAT32_OF.values()]
    return "\n".join([f"{origin(result)} {where}", "", table(head, body)])


def host_time(result: dict[str, Any]) -> str:
    """Microseconds of the host for a call, a line an implementation."""
    cells = result["microseconds"]
    body = [[name, *(f"{cell[which]:,.0f}" for which in ("forward", "both"))]
            for name, cell in cells.items()]  # fmt: skip
    b, s, h, d = (result["shape"][x] for x in "bshd")
    known = {v["kernels"]: name for name, v in result["compared"].items()}
    now = known.get(_this_tree()[0])
    said = (
        f"`{now}` is this tree." if now else "Neither version is this tree: it has changed since."
    )
    where = f"b {b}, s {s}, {h} heads, d {d}, causal, BF16. {said}"
    head = ["microseconds of host time", "forward", "forward and backward"]
    return "\n".join([f"{origin(result)} {where}", "", table(head, body)])


def tables() -> Tables:
    """Marker -> (result file, renderer, command that measures it)."""
    return {
        "attention-speed": ("attention", speed_table, "attention.py"),
        "attention-goals": ("attention", goal_table, "attention.py"),
        "attention-memory": ("attention", memory_table, "attention.py"),
        "row-sum": ("tile_search", row_sum_table, "search_tiles.py"),
        **{
            f"compared-{name.replace('_', '-')}": (
                f"compare_trees_{name}",
                compared_table,
                "compare_trees.py",
            )
            for name in ("own_tiles", "l2", "sums")
        },
        "host-time": ("host_time", host_time, "host_time.py old=... new=."),
        "host-time-python": (
            "host_time_python",
            host_time,
            "host_time.py --without-launches old=... new=.",
        ),
        "float32-attention": (
            "float32_attention",
            float32_attention,
            "float32_attention.py",
        ),
        "sanitizer": ("sanitizer", sanitizer_line, "kernel_sanitizer.py"),
    }

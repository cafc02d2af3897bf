"""Which answers of a preflight name a bad node.

``compare`` reads on one node what ``preflight.measure`` wrote on every node and ``probe.py``
measured between them, prints a table and leaves the bad nodes in ``<out>/bad_nodes``. Differences
between nodes are found by majority, slow parts against the median.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatron_patch.launcher.preflight import VERSIONS, writing

if TYPE_CHECKING:
    from megatron_patch.schema.run import RunConfig

REPORTED = {"node", "index", "versions", "gpus", "free", "clock_skew", "write_seconds"}
MAY_BE_UNKNOWN = {"commit": ("unknown", None), "driver": (None,)}
"""A node that cannot say these (no git, a busy nvidia-smi) need not differ from the others."""
LINKS = "links.json"  # probe.py's
EVERY_NODE = "every_node_failed"  # the batch script stops for good where it exists
NOBODY = "-"  # a failure that names no node
SHOWN = 5  # slow links in one line


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a check on a node."""

    node: str
    check: str
    passed: bool
    text: str
    note: bool = False
    """Passed, but a person should read it: it gets a line of its own."""


def compare(run: RunConfig, out: Path, expected: list[str], stream: TextIO | None = None) -> int:
    """Print the table of all nodes; 0 when all passed, 1 otherwise.

    Args:
        run: configuration.
        out: directory with one report a node; ``bad_nodes`` is written there.
        expected: names of the nodes that must have reported; empty: those that did.
        stream: where the table goes; default: standard output.

    Raises:
        SharedDirectoryError: ``out`` is no directory, or ``bad_nodes`` cannot be written.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    rows, nodes = _read_reports(out, expected)
    checks = (_check_gpus, _check_speed, _check_versions, _check_agent, _check_clock, _check_disk)
    for check in checks:
        rows += check(run, nodes)
    rows += _check_links(run, nodes, out / LINKS)
    print(render_table(rows), file=stream or sys.stdout, flush=True)
    failed = [row for row in rows if not row.passed]
    bad = list(dict.fromkeys(row.node for row in failed if row.node != NOBODY))
    if not failed:
        return 0
    measured = {node["node"] for node in nodes}
    if not bad or len(bad) == len({*bad, *expected, *measured}) > 1:
        # Excluding every node would leave the job waiting for ever.
        if bad and measured >= {*bad, *expected}:
            # By what they measured, not by their silence: a retry would find the same.
            (out / EVERY_NODE).write_text("".join(f"{node}\n" for node in bad), encoding="utf-8")
        text = "every node failed" if bad else "failed, on no node in particular"
        print(f"preflight: {text}; no node is excluded", file=stream or sys.stdout, flush=True)
        return 1
    with writing(out):
        (out / "bad_nodes").write_text("".join(f"{node}\n" for node in bad), encoding="utf-8")
    print(f"preflight: bad node(s): {', '.join(bad)}", file=stream or sys.stdout, flush=True)
    return 1


def _read_reports(out: Path, expected: list[str]) -> tuple[list[Row], list[dict[str, Any]]]:
    """Failures of nodes without a report that can be read; the other reports, in order of nodes."""
    rows, reports, damaged = [], {}, set()
    for path in sorted(p for p in out.glob("*.json") if p.name != LINKS):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            missing = REPORTED - set(report)
        except (OSError, ValueError, TypeError) as error:
            missing, reason = REPORTED, f"{type(error).__name__}: {error}"
        else:
            reason = f"no {', '.join(sorted(missing))} in it"
        if missing:
            damaged.add(path.stem)
            text = f"its report cannot be read ({path.name}, {' '.join(reason.split())[:120]})"
            rows.append(Row(path.stem, "report", False, text))
        else:
            reports[report["node"]] = report
    rows += [
        Row(node, "report", False, "wrote no report into the shared directory")
        for node in expected
        if node not in reports and node not in damaged
    ]
    if not rows and not reports:
        rows.append(Row(NOBODY, "report", False, f"no node wrote a report into {out}"))
    return rows, sorted(reports.values(), key=lambda report: report["index"])


def render_table(rows: list[Row]) -> str:
    """Failures first, then notes, then one line a check with the nodes that passed it."""
    lines = [f"{'result':<7} {'check':<18} {'node':<16} finding"]
    lines += [f"{'FAILED':<7} {r.check:<18} {r.node:<16} {r.text}" for r in rows if not r.passed]
    lines += [f"{'note':<7} {r.check:<18} {r.node:<16} {r.text}" for r in rows if r.note]
    for check in dict.fromkeys(row.check for row in rows):
        passed = [row for row in rows if row.check == check and row.passed and not row.note]
        if passed:
            texts = list(dict.fromkeys(row.text for row in passed))
            text = texts[0] if len(texts) == 1 else f"{texts[0]} ... {texts[-1]}"
            names = passed[0].node if len(passed) == 1 else f"{len(passed)} nodes"
            lines.append(f"{'ok':<7} {check:<18} {names:<16} {text}")
    return "\n".join(lines)


def _check_gpus(run: RunConfig, nodes: list[dict[str, Any]]) -> Iterator[Row]:
    wanted = run.cluster.gpus_per_node
    for node in nodes:
        name, gpus = node["node"], node["gpus"]
        if run.training.device == "cpu":
            yield Row(name, "gpus", True, "CPU run (training.device: cpu): not looked at")
            continue
        ill = [g for g in gpus if g["uncorrected"]]
        used = [g for g in gpus if g["free_gb"] < 0.9 * g["total_gb"]]
        if len(gpus) != wanted:
            yield Row(
                name, "gpus", False, f"{len(gpus)} visible, cluster.gpus_per_node is {wanted}"
            )
        elif ill:
            text = ", ".join(f"GPU {g['index']}: {g['uncorrected']}" for g in ill)
            yield Row(name, "gpus", False, f"uncorrected memory errors: {text}")
        elif used:
            text = ", ".join(f"GPU {g['index']}: {g['free_gb']:.0f} GB free" for g in used)
            yield Row(name, "gpus", False, f"memory is in use by somebody else: {text}")
        else:
            yield Row(name, "gpus", True, f"{wanted} x {gpus[0]['name'] if gpus else '?'}")


def _check_speed(run: RunConfig, nodes: list[dict[str, Any]]) -> Iterator[Row]:
    yield from _outliers(
        run,
        nodes,
        check="gemm",
        unit="TFLOP/s BF16",
        values=lambda node: [(f"GPU {g['index']}", g["tflops"]) for g in node["gpus"]],
    )


def _check_links(run: RunConfig, nodes: list[dict[str, Any]], file: Path) -> Iterator[Row]:
    if run.training.device == "cuda" and run.cluster.preflight.communication and not file.exists():
        text = "the collectives did not end; see the rank logs beside the reports"
        yield Row(NOBODY, "bandwidth", False, text)
        return
    try:
        rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    except (OSError, ValueError) as error:
        text = f"{file.name} cannot be read ({type(error).__name__}); the probe was interrupted"
        yield Row(NOBODY, "bandwidth", False, text)
        return
    inside = [row for row in rows if row["kind"] == "node"]
    network = [row for row in rows if row["kind"] == "network"]
    if inside or not rows:  # not: one GPU a node
        yield from _outliers(
            run,
            nodes,
            check="bandwidth node" if inside else "bandwidth",
            unit="GB/s all-reduce inside a node",
            values=lambda node: [
                (row["what"], row["gb_per_s"]) for row in inside if row["node"] == node["node"]
            ],
        )
    if network:
        yield from _check_network(run, nodes, network)


def _check_network(
    run: RunConfig, nodes: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> Iterator[Row]:
    """Blames the node that is slow with every partner: a pair is as slow as the slower of its two.

    Its rate is therefore that of its best pair.
    """
    check, known = "bandwidth network", {node["node"] for node in nodes}
    rows = [row for row in rows if row["node"] in known]
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["node"], row["what"]
        best[key] = max(best.get(key, 0.0), row["gb_per_s"])
    found = list(
        _outliers(
            run,
            nodes,
            check=check,
            unit="GB/s with the best of its partners",
            values=lambda node: [
                (what, rate) for (name, what), rate in best.items() if name == node["node"]
            ],
        )
    )
    bad = {row.node for row in found if not row.passed}
    if not best:
        return
    median, least = _limits(run, list(best.values()))
    slow = _slow_links(rows, least)
    if bad and len({frozenset((row["node"], row["peer"])) for row in rows}) == 1:
        text = f"link between {'; '.join(slow)} GB/s slow; the median is {_figure(median)}"
        yield Row(NOBODY, check, False, f"{text}; of two nodes, neither can be singled out")
        return
    yield from found
    slow = _slow_links([row for row in rows if not bad & {row["node"], row["peer"]}], least)
    if slow:
        more = f" and {len(slow) - SHOWN} more" if len(slow) > SHOWN else ""
        text = f"link between {'; '.join(slow[:SHOWN])}{more} GB/s slow; the median is "
        text += f"{_figure(median)}; each is fast with another node"
        yield Row(NOBODY, check, True, text, note=True)


def _slow_links(rows: list[dict[str, Any]], least: float) -> list[str]:
    """The pairs slower than ``least``, the slowest first, each once with its GPUs."""
    links: dict[tuple[str, ...], dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: row["gb_per_s"]):
        if row["gb_per_s"] < least:
            gpus = links.setdefault(tuple(sorted((row["node"], row["peer"]))), {})
            gpus.setdefault(row["what"], f"{row['what']}: {_figure(row['gb_per_s'])}")
    return [f"{one} and {other} ({', '.join(g.values())})" for (one, other), g in links.items()]


def _figure(value: float) -> str:
    """Whole numbers, but two digits of a link that hardly moves anything."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _limits(run: RunConfig, values: list[float]) -> tuple[float, float]:
    """The median, and what is still fast enough."""
    median = statistics.median(values)
    return median, median * (1 - run.cluster.preflight.tolerance)


def _outliers(
    run: RunConfig, nodes: list[dict[str, Any]], *, check: str, unit: str, values: Any
) -> Iterator[Row]:
    """A value more than ``tolerance`` below the median of all nodes fails its node."""
    everything = [value for node in nodes for _, value in values(node)]
    if not everything:
        reason = "no GPU: not measured" if run.training.device == "cpu" else "nothing to measure"
        for node in nodes:
            yield Row(node["node"], check, True, reason)
        return
    median, least = _limits(run, everything)
    for node in nodes:
        slow = [(what, value) for what, value in values(node) if value < least]
        if slow:
            text = ", ".join(f"{what}: {_figure(value)}" for what, value in slow)
            yield Row(node["node"], check, False, f"{text} {unit}; the median is {_figure(median)}")
        else:
            yield Row(node["node"], check, True, f"median {_figure(median)} {unit}")


def _check_versions(run: RunConfig, nodes: list[dict[str, Any]]) -> Iterator[Row]:
    """What differs from the majority; the first node decides a draw."""
    usual: dict[str, str] = {}
    for key in VERSIONS:
        values = [node["versions"].get(key) for node in nodes]
        known = [str(v) for v in values if v not in MAY_BE_UNKNOWN.get(key, ())]
        usual[key] = Counter(known or ["unknown"]).most_common(1)[0][0]
    same = f"torch {usual['torch']}, driver {usual['driver']}, the same everywhere"
    for node in nodes:
        differs, silent = False, []
        for key in VERSIONS:
            value = node["versions"].get(key)
            if value in MAY_BE_UNKNOWN.get(key, ()):
                silent += [] if usual[key] == "unknown" else [key]
            elif str(value) != usual[key]:
                differs = True
                text = f"{key} {value}, others have {usual[key]}"
                yield Row(node["node"], "versions", False, text)
        if silent:
            text = f"{', '.join(silent)} unknown on this node, not compared"
            yield Row(node["node"], "versions", True, text, note=True)
        elif not differs:
            yield Row(node["node"], "versions", True, same)


def _check_agent(run: RunConfig, nodes: list[dict[str, Any]]) -> Iterator[Row]:
    """Whether what is to start the ranks is there."""
    if run.cluster.agent == "torchrun":
        return
    for node in nodes:
        found = node["versions"].get("nvidia-resiliency-ext")
        text = f"nvidia-resiliency-ext {found}"
        if found is None:
            text = (
                "cluster.agent is nvrx and nvidia-resiliency-ext is not installed: pip install "
                "nvidia-resiliency-ext in the environment of cluster.python, or set cluster.agent: "
                "torchrun"
            )
        yield Row(node["node"], "agent", found is not None, text)


def _check_clock(run: RunConfig, nodes: list[dict[str, Any]]) -> Iterator[Row]:
    limit = run.cluster.preflight.max_clock_skew_seconds
    if not nodes:
        return
    # A slow write says little about the clock: such a node must not move the yardstick either.
    sure = [node for node in nodes if node["write_seconds"] <= limit] or nodes
    middle = statistics.median(node["clock_skew"] for node in sure)
    for node in nodes:
        skew, wrote = node["clock_skew"] - middle, node["write_seconds"]
        passed = abs(skew) <= limit + wrote / 2
        if passed and max(abs(skew), wrote / 2) > limit:
            text = f"not known to {limit:g} s: writing into the shared directory took {wrote:.0f} s"
            yield Row(node["node"], "clock", True, text, note=True)
        else:
            text = f"within {limit:g} s" if passed else f"{skew:+.1f} s from the median clock"
            yield Row(node["node"], "clock", passed, text)


def _check_disk(run: RunConfig, nodes: list[dict[str, Any]]) -> Iterator[Row]:
    least = run.cluster.preflight.min_free_gb
    for node in nodes:
        free = node["free"]
        said = {n: "missing or not writable" if f is None else f"{f:.1f} GB free"
                for n, f in free.items()}  # fmt: skip
        short = [
            f"{name}: {said[name]}"
            for name in ("local_dir", "run_dir")
            if free[name] is None or free[name] < least
        ]
        if short:
            text = f"{', '.join(short)}; {least:g} GB are required"
            if free["local_dir"] is None:
                text += (
                    f"; make {run.cluster.local_dir} there, writable for the job's user, or set "
                )
                text += "cluster.local_dir to a directory that every node has"
            yield Row(node["node"], "disk", False, text)
        else:
            yield Row(node["node"], "disk", True, f"at least {least:g} GB free; shared directory "
                      "writable")  # fmt: skip

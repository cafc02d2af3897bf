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
from typing import Any, TextIO

from megatron_patch.launcher.preflight import VERSIONS, writing
from megatron_patch.schema.run import RunConfig

REPORTED = {"node", "index", "versions", "gpus", "free", "clock_skew", "write_seconds"}
MAY_BE_UNKNOWN = {"commit": ("unknown", None), "driver": (None,)}
"""A node that cannot say these (no git, a busy nvidia-smi) need not differ from the others."""
LINKS = "links.json"  # probe.py's
EVERY_NODE = "every_node_failed"  # the batch script stops for good where it exists
NOBODY = "-"  # a failure that names no node


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

    Raises SharedDirectoryError: ``out`` is no directory, or ``bad_nodes`` cannot be written.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    rows, nodes = _read_reports(out, expected)
    checks = (_check_gpus, _check_gemm, _check_versions, _check_agent, _check_clock, _check_disk)
    for check in checks:
        rows += check(run, nodes)
    rows += _check_links(run, nodes, out / LINKS)
    stream = stream or sys.stdout
    print(render_table(rows), file=stream, flush=True)
    failed = [row.node for row in rows if not row.passed]
    if not failed:
        return 0
    bad = [node for node in dict.fromkeys(failed) if node != NOBODY]
    measured = {node["node"] for node in nodes}
    if not bad or len(bad) == len({*bad, *expected, *measured}) > 1:
        # Excluding every node would leave the job waiting for ever.
        if bad and measured >= {*bad, *expected}:
            # By what they measured, not by their silence: a retry would find the same.
            (out / EVERY_NODE).write_text("".join(f"{node}\n" for node in bad), encoding="utf-8")
        text = "every node failed" if bad else "failed, on no node in particular"
        print(f"preflight: {text}; no node is excluded", file=stream, flush=True)
        return 1
    with writing(out):
        (out / "bad_nodes").write_text("".join(f"{node}\n" for node in bad), encoding="utf-8")
    print(f"preflight: bad node(s): {', '.join(bad)}", file=stream, flush=True)
    return 1


def _read_reports(out: Path, expected: list[str]) -> tuple[list[Row], list[dict[str, Any]]]:
    """Failures of nodes without a report that can be read; the other reports, in order of nodes."""
    failures: dict[str, str] = {}
    reports: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in out.glob("*.json") if p.name != LINKS):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            missing = REPORTED - set(report)
            reason = f"no {', '.join(sorted(missing))} in it" if missing else ""
        except (OSError, ValueError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            reason = " ".join(reason.split())[:120]
            failures[path.stem] = f"its report cannot be read ({path.name}, {reason})"
        else:
            reports[report["node"]] = report
    for node in expected:
        if node not in reports:
            failures.setdefault(node, "wrote no report into the shared directory")
    if not failures and not reports:
        failures[NOBODY] = f"no node wrote a report into {out}"
    rows = [Row(node, "report", False, text) for node, text in failures.items()]
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
        gpus = node["gpus"]
        ill = [f"GPU {g['index']}: {g['uncorrected']}" for g in gpus if g["uncorrected"]]
        low = [g for g in gpus if g["free_gb"] < 0.9 * g["total_gb"]]
        used = [f"GPU {g['index']}: {g['free_gb']:.0f} GB free" for g in low]
        wrong, text = "", "CPU run (training.device: cpu): not looked at"
        if run.training.device == "cuda":
            text = f"{wanted} x {gpus[0]['name'] if gpus else '?'}"
            if len(gpus) != wanted:
                wrong = f"{len(gpus)} visible, cluster.gpus_per_node is {wanted}"
            elif ill:
                wrong = f"uncorrected memory errors: {', '.join(ill)}"
            elif used:
                wrong = f"memory is in use by somebody else: {', '.join(used)}"
        yield Row(node["node"], "gpus", not wrong, wrong or text)


def _check_gemm(run: RunConfig, nodes: list[dict[str, Any]]) -> Iterator[Row]:
    rates = {n["node"]: [(f"GPU {g['index']}", g["tflops"]) for g in n["gpus"]] for n in nodes}
    yield from _outliers(run, rates, check="gemm", unit="TFLOP/s BF16")


def _check_links(run: RunConfig, nodes: list[dict[str, Any]], file: Path) -> Iterator[Row]:
    """All-reduce inside nodes, each against the median; over all nodes, as it is.

    Every node takes part in the second, so a slow one cannot be singled out.
    """
    if run.training.device == "cuda" and run.cluster.preflight.communication and not file.exists():
        text = "the collectives did not end; see the rank logs beside the reports"
        yield Row(NOBODY, "bandwidth", False, text)
        return
    try:
        measured = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    except (OSError, ValueError) as error:
        text = f"{file.name} cannot be read ({type(error).__name__}); the probe was interrupted"
        yield Row(NOBODY, "bandwidth", False, text)
        return
    rates: dict[str, list[tuple[str, float]]] = {node["node"]: [] for node in nodes}
    for row in measured:
        if row["kind"] == "node" and row["node"] in rates:
            rates[row["node"]].append((row["what"], row["gb_per_s"]))
        elif row["kind"] == "network":
            text = f"{_figure(row['gb_per_s'])} GB/s all-reduce over {row['what']}"
            yield Row(NOBODY, "bandwidth network", True, text)
    if any(rates.values()) or not measured:  # not: one GPU a node
        yield from _outliers(
            run, rates, check="bandwidth node", unit="GB/s all-reduce inside a node"
        )


def _figure(value: float) -> str:
    """Whole numbers, but two digits of a link that hardly moves anything."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _outliers(
    run: RunConfig, rates: dict[str, list[tuple[str, float]]], *, check: str, unit: str
) -> Iterator[Row]:
    """A rate more than ``tolerance`` below the median of all fails its node.

    ``rates``: node -> (part of it, rate).
    """
    everything = [rate for parts in rates.values() for _, rate in parts]
    if not everything:
        reason = "no GPU: not measured" if run.training.device == "cpu" else "nothing to measure"
        yield from (Row(node, check, True, reason) for node in rates)
        return
    median = statistics.median(everything)
    least = median * (1 - run.cluster.preflight.tolerance)
    for node, parts in rates.items():
        slow = [f"{part}: {_figure(rate)}" for part, rate in parts if rate < least]
        if slow:
            text = f"{', '.join(slow)} {unit}; the median is {_figure(median)}"
            yield Row(node, check, False, text)
        else:
            yield Row(node, check, True, f"median {_figure(median)} {unit}")


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
    least, local = run.cluster.preflight.min_free_gb, run.cluster.local_dir
    for node in nodes:
        short = []
        for name in ("local_dir", "run_dir"):
            free = node["free"][name]
            if free is None:
                short.append(f"{name}: missing or not writable")
            elif free < least:
                short.append(f"{name}: {free:.1f} GB free")
        text = f"at least {least:g} GB free; shared directory writable"
        if short:
            text = f"{', '.join(short)}; {least:g} GB are required"
        if node["free"]["local_dir"] is None:
            text += (
                f"; make {local} there, writable for the job's user, or set cluster.local_dir to a "
                "directory that every node has"
            )
        yield Row(node["node"], "disk", not short, text)

"""Markdown pieces that every generated table shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patch.runtime.environment import short_commit

Tables = dict[str, tuple[str, Callable[[dict[str, Any]], str], str]]
"""By marker of a page: result file or "", renderer, command that measures it."""


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown table; the first column left-aligned, the others right-aligned."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def origin(result: dict[str, Any]) -> str:
    """One line: machine, versions, commit, time."""
    machine, versions = result["machine"], result["versions"]
    named = [f"{p} {versions[p]}" for p in ("torch", "triton", "cuda", "cudnn") if p in versions]
    what = machine.get("gpu", f"CPU ({machine['cpu']})")
    commit, day = short_commit(result["commit"]), result["utc"][:10]
    return f"Measured on {what}; {', '.join(named)}; commit {commit}; {day}."


def run_origin(environment: dict[str, Any]) -> str:
    """The same of a run's own account of its environment, which may lack some of it."""
    named = [f"{n} {environment[n]}" for n in ("torch", "triton", "cuda") if environment.get(n)]
    what = environment.get("gpu") or "a CPU"
    commit = short_commit(str(environment.get("commit")))
    return f"Measured on {what}; {', '.join(named)}; commit {commit}."


def kept_from(rows: list[tuple[str, dict[str, Any]]], verb: str) -> str:
    """Which rows come from earlier results, by the commit they name; nothing for new rows."""
    told = ""
    for commit in sorted({row["commit"] for _, row in rows if "commit" in row}):
        names = [name for name, row in rows if row.get("commit") == commit]
        told += f" {verb} at commit {short_commit(commit)}: {'; '.join(names)}."
    return told


def by_capture(heads: list[dict[str, Any]]) -> list[tuple[tuple[str, int, int], list[Any]]]:
    """Captured heads of a result, a capture (run, step, layer) at a time, in that order."""
    found: dict[tuple[str, int, int], list[Any]] = {}
    for one in heads:
        found.setdefault((one["run"], one["step"], one["layer"]), []).append(one)
    return sorted(found.items())


def captures_kept(heads: list[dict[str, Any]]) -> str:
    """`kept_from` of captures."""
    first = {f"{run}, {step:,}": found[0] for (run, step, _), found in by_capture(heads)}
    return kept_from([*first.items()], "Computed")


def three_digits(value: float | None) -> str:
    """A figure of a table; - where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"

"""Runs that a folder of results has, and this machine has not or not as far: they are kept.

Records stay on the machine that made them unless somebody unpacks them. Results that are published
from another machine must not turn a finished run into one that was never started.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.verdict import Window

Entry = dict[str, Any]
FIGURES = ("loss", "grad_norm", "loss_max", "grad_norm_max")
DEFINITION = ("cell", "seed", "variant", "set")
"""What must be the same of a run for its earlier figures to stand in its row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """The results of a folder, as `publish` left them there."""

    file: Path
    result: dict[str, Any]
    curves: dict[str, list[Window]]


def read(folder: Path, name: str) -> Earlier | None:
    """Results of experiment ``name`` in ``folder``; None where there are none.

    Raises:
        ExperimentError: there are some, and they cannot be read: they would be overwritten.
    """
    file = folder / f"{name}.json"
    if not file.exists():
        return None
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(result["runs"], list) or not isinstance(result["explosion"], dict):
            raise ValueError("no list of runs")
        return Earlier(file=file, result=result, curves=_curves(file.with_suffix(".csv")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ExperimentError(
            f"{file} cannot be read as results of an experiment ({type(error).__name__}: {error}), "
            "and would be overwritten; move it away or name another --results-dir"
        ) from error


def join(result: dict[str, Any], curves: dict[str, list[Window]], earlier: Earlier | None) -> None:
    """Put what ``earlier`` has more of into a result (`results.collect`) and its curves.

    Where both have attempts at a run, the longer one counts and the other is ``repeated``, as in
    `archive.unpack`; of equal ones the present one counts.

    Raises:
        ExperimentError: the earlier results are of another experiment, or of other weights, batches
            or software, or have runs that this one has not.
    """
    if earlier is None:
        return
    old = earlier.result
    before = {run["run"]: run for run in old["runs"] if run.get("state") != "repeated"}
    gone = sorted(n for n, r in before.items() if r["steps"] and not _has(result, n))
    if gone:
        raise ExperimentError(
            f"{earlier.file} has runs that this protocol has not ({', '.join(gone)}), and would be "
            "overwritten; move it away or name another --results-dir"
        )
    kept, runs = set(), []
    for entry in result["runs"]:
        had = before.get(entry["run"])
        if had is None or had["steps"] <= entry["steps"]:
            runs.append(entry)
            continue
        _compare(entry, had, result, earlier)
        kept.add(entry["run"])
        runs.append({**had, "kept": _origin(old)} if "kept" not in had else had)
        curves[entry["run"]] = earlier.curves.get(entry["run"], [])
        if entry["steps"]:
            why = "an attempt of earlier results went further"
            again = {"repeat_of": entry["run"], "state": "repeated", "reason": why}
            runs.append({**entry, "run": f"{entry['run']}.shorter", **again})
    here = {run["run"] for run in runs}
    for run in old["runs"]:
        if run.get("repeat_of") in kept and run["run"] not in here:
            runs.append(run)
    result["runs"] = runs
    if kept and not result["environment"]:
        result["environment"] = old["environment"]
    for seed, digest in old.get("fingerprints", {}).items():
        result["fingerprints"].setdefault(seed, digest)


def _has(result: dict[str, Any], run: str) -> bool:
    return any(entry["run"] == run for entry in result["runs"])


def note(result: dict[str, Any]) -> str:
    """Which rows are earlier results, and where their origin differs; "" where none is."""
    kept = [run for run in result["runs"] if "kept" in run]
    if not kept:
        return ""
    present = _origin(result)
    text = []
    for run in kept:
        other = {k: v for k, v in run["kept"].items() if present.get(k) != v}
        made = ", ".join(f"{name} {value}" for name, value in sorted(other.items()))
        text.append(f"{run['run']} ({made})" if made else run["run"])
    return f"Kept from earlier results, their records are not here: {', '.join(text)}."


def _origin(result: dict[str, Any]) -> dict[str, Any]:
    """Software and device of a result; every run names its own commit."""
    return {k: v for k, v in result["environment"].items() if k != "commit"}


def _compare(entry: Entry, had: Entry, result: dict[str, Any], earlier: Earlier) -> None:
    """Refuse to put the earlier attempt at a run beside runs it cannot be compared with."""
    old, seed = earlier.result, str(entry["seed"])
    differ = [name for name in DEFINITION if entry.get(name) != had.get(name)]
    differ += [name for name in ("name", "explosion") if result[name] != old[name]]
    prints = [x.get("fingerprints", {}).get(seed) for x in (result, old)]
    if None not in prints and prints[0] != prints[1]:
        differ.append(f"weights, batches, software or device of seed {seed}")
    if differ:
        raise ExperimentError(
            f"{earlier.file} has {had['steps']:,} steps of {entry['run']}, but with another "
            f"{', another '.join(differ)}; move it away or name another --results-dir"
        )


def _curves(path: Path) -> dict[str, list[Window]]:
    """Window means by run; empty without a file."""
    found: dict[str, list[Window]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                figures = {name: float(row[name]) for name in FIGURES}
                window = Window(step=int(row["step"]), **figures)
                found.setdefault(row["run"], []).append(window)
    return found

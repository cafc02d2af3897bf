"""What the analysis scripts share: result files and their origin, names of runs, Markdown tables.

A file in research/results holds sections; each says machine, versions, commit and time of its
figures. A script replaces its section and keeps runs of it whose records are gone: such a run
names the commit that it was read at.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_patch.runtime.environment import commit, devices
from megatron_patch.stability import record

RESULTS = Path(__file__).resolve().parent.parent / "results"
APART = {
    "_bf16_residual": "BF16 stream",
    "attribution_continued": "continued",
    "rescue_late": "late rescue",
}
"""Ends of protocol names whose runs have the names of other protocols' runs, and what is added."""


def describe() -> dict[str, Any]:
    """Machine (never a host name), versions, commit and UTC time of a measurement."""
    named = ("torch", "triton", "megatron-core", "numpy")
    versions = {"python": platform.python_version()} | {n: metadata.version(n) for n in named}
    told = devices()
    versions |= {n: str(told[n]) for n in ("cuda", "cudnn", "nccl", "driver") if told.get(n)}
    machine = {"cpu": platform.machine()} | ({"gpu": told["gpu"]} if told.get("gpu") else {})
    utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"machine": machine, "versions": versions, "commit": commit(), "utc": utc}


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The sections of ``<folder>/<name>.json``; none if there is no such file."""
    path = folder / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(name: str, sections: dict[str, Any], folder: Path) -> Path:
    """Replace sections of ``<folder>/<name>.json``, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.json"
    draft = target.with_name(f"{target.name}.tmp")
    whole = read(name, folder) | sections
    draft.write_text(json.dumps(whole, indent=1, sort_keys=True, allow_nan=False) + "\n")
    draft.replace(target)
    return target


def add_runs(name: str, section: str, runs: dict[str, Any], folder: Path, **facts: Any) -> Path:
    """Put runs into a section beside those that are there.

    Raises:
        SystemExit: those that are there were read with other ``facts``, as `steps`.
    """
    old = read(name, folder).get(section, {})
    for key, value in facts.items():
        if old and old.get(key) != value:
            raise SystemExit(f"{name}.json: {section} has {key} {old.get(key)}, not {value}")
    kept = {run: {"commit": old["commit"]} | one for run, one in old.get("runs", {}).items()}
    return write(name, {section: describe() | facts | {"runs": kept | runs}}, folder)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--out``."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: research/results")
    return parser


def telemetry(name: Path | str) -> record.Telemetry:
    """The telemetry of a run directory.

    Raises:
        SystemExit: there is none, or no record in it.
    """
    try:
        found = record.read(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{name} is no run directory with telemetry: {error}") from None
    if not len(found.records):
        raise SystemExit(f"{name} has no records yet")
    return found


def run_name(run: Path | str) -> str:
    """``none-s1``, or ``none-s1, BF16 stream``: the directory's name, and what sets it apart."""
    run = Path(run)
    try:
        protocol = json.loads((run.resolve().parents[1] / "experiment.json").read_text())["name"]
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        return run.name
    return ", ".join([run.name, *(t for end, t in APART.items() if str(protocol).endswith(end))])


def finite(value: Any) -> float | None:
    """A number that JSON can say; None for others."""
    return float(value) if value is not None and math.isfinite(value) else None


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the first column left-aligned, the others right-aligned."""
    head = [*head]
    lines = ["|".join(["", *head, ""]), "|---|" + "--:|" * (len(head) - 1)]
    return "\n".join(lines + ["|".join(["", *row, ""]) for row in rows])


def number(value: float | None, digits: int = 3) -> str:
    """A figure with some significant digits; - where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def step(value: int | None) -> str:
    """A step; - for one that never came."""
    return "-" if value is None else f"{value:,}"

"""The measured tables of the manual: docs/assets/*.json into the marked places of its pages.

    python benchmarks/tables.py [--check]

A page marks a place with ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; NAME is a key of
`TABLES`, other names are not this script's. ``--check`` changes nothing and exits with 1 where a
page differs from its results. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import kernel_tables
import training_tables
from machine import RESULTS, ROOT, Parts, Table, markdown, versions

# Marker -> (file of docs/assets, named as the script that writes it; how the names of the parts
# begin that are rendered and must be there; renderer).
TABLES: dict[str, tuple[str, str, Callable[[Parts], Table]]] = {
    "cost": ("attention", "speed", kernel_tables.readme_cost),
    "kernel-speed": ("attention", "speed", kernel_tables.kernel_speed),
    "kernel-host": ("attention", "host", kernel_tables.kernel_host),
    "kernel-float32": ("attention", "float32", kernel_tables.kernel_float32),
    "kernel-features": ("attention", "features", kernel_tables.kernel_features),
    "accuracy-delta": ("accuracy", "delta", kernel_tables.accuracy_delta),
    "accuracy-dq": ("accuracy", "delta", kernel_tables.accuracy_dq),
    "projection-errors": ("projection", "errors", kernel_tables.projection_errors),
    "projection-logits": ("projection", "logits", kernel_tables.projection_logits),
    "projection-captures": ("projection", "captures", kernel_tables.projection_captures),
    "projection-layers": ("projection", "worst_heads", kernel_tables.projection_layers),
    "projection-time": ("projection", "times", kernel_tables.projection_time),
    "int8-errors": ("int8", "errors", kernel_tables.int8_errors),
    "borrowed": ("borrowed", "", kernel_tables.borrowed),
    "int8-speed": ("int8", "speed", kernel_tables.int8_speed),
    "accuracy-context": ("accuracy", "context_parallel", kernel_tables.accuracy_context),
    "context-speed": ("context_parallel", "speed", kernel_tables.context_speed),
    "training-speed": ("training", "rounds", training_tables.training_speed),
    "training-long": ("training", "long context", training_tables.training_long),
    "training-backends": ("training", "first steps", training_tables.training_backends),
    "step-parts": ("step_profile", "", training_tables.step_parts),
    "telemetry-cost": ("telemetry_cost", "runs", training_tables.telemetry),
    "layouts-agree": ("layouts", "", training_tables.layouts_agree),
    "planned-memory": ("plan", "memory", training_tables.plan_memory),
}


def content(name: str, results: Path) -> str:
    """The text that belongs between a marker's lines."""
    if name == "versions":
        return versions(sorted(results.glob("*.json")))
    file, part, render = TABLES[name]
    path = results / f"{file}.json"
    stored = json.loads(path.read_text()) if path.is_file() else {}
    parts = {key: result for key, result in stored.items() if key.startswith(part)}
    if not parts:
        return f"Not measured yet: `python benchmarks/{file}.py --help` says how."
    return markdown(parts.values(), render(parts))


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a page differs")
    args = parser.parse_args(arguments)
    stale = []
    readmes = (ROOT / "README.md", ROOT / "kernels" / "README.md")
    for page in (*readmes, *sorted((ROOT / "docs").glob("*.md"))):
        old = page.read_text()
        new = fill(old)
        if new != old:
            print(f"{'differs' if args.check else 'wrote'}: {page.relative_to(ROOT)}")
            stale.append(page)
            if not args.check:
                page.write_text(new)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

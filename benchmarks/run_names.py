"""What results call a run: its directory's name, and what sets its protocol apart.

Protocols that differ in one thing have runs of the same names. Another attempt at a run that the
results have takes its place there, unless it is given by a symbolic link: a link names the run.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

STREAM = "BF16 stream"
AGAIN = "again"
"""Said of a later attempt at a run, where the first has the plain name in what was read from it."""
CONTINUED = "continued"
LATE = "late rescue"
APART = {
    "_bf16_residual": STREAM,
    "attribution_continued": CONTINUED,
    "rescue_late": LATE,
}
"""Ends of protocol names, and how results say it."""


def run_name(run: Path | str) -> str:
    """``none-s1``, or ``none-s1, BF16 stream``; a run of no experiment has its directory's name."""
    run = Path(run)
    try:
        protocol = json.loads((run.resolve().parents[1] / "experiment.json").read_text())
        name = str(protocol["name"])
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        return run.name
    said = [text for end, text in APART.items() if name.endswith(end)]
    return ", ".join([run.name, *said])


def by_attempt(name: str, runs: Collection[str]) -> str:
    """What a protocol's results (names ``runs``) call the attempt that others call ``name``.

    There the attempt that counts has the run's name, and others are ``<run>.attempt_<n>``: of
    ``runs``, which have no attempts that were cut before anything was to be compared, the first
    such one is meant.
    """
    plain = name.removesuffix(f", {AGAIN}")
    other = _other(plain, runs)
    return other if name == plain and other is not None else plain


def of_attempt(name: str, runs: Collection[str]) -> str:
    """`by_attempt` the other way round."""
    plain, _, other = name.partition(".attempt_")
    return plain if other or _other(plain, runs) is None else f"{plain}, {AGAIN}"


def _other(plain: str, runs: Collection[str]) -> str | None:
    return min((run for run in runs if run.startswith(f"{plain}.attempt_")), default=None)

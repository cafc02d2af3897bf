"""What results call a run: its directory's name, and what sets its protocol apart.

Protocols that differ in one thing have runs of the same names.
"""

from __future__ import annotations

import json
from pathlib import Path

STREAM = "BF16 stream"
APART = {"_bf16_residual": STREAM}
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

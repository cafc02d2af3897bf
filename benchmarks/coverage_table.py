"""Which cells of the experiment on stability were made, with which seeds, and which are missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from table_text import table

from megatron_patch.experiments.store import EXPLODED, FINISHED, NONFINITE, PAUSED, WAITING

ROOT = Path(__file__).resolve().parent.parent
CONTINUED = "attribution_continued"
STREAMS = {
    "FP32": ("baselines", "attribution"),
    "BF16": ("baselines_bf16_residual", "attribution_bf16_residual"),
}
"""Residual streams, and the protocols whose runs have them from step 0: controls, attribution."""
COLUMNS = {"FP32": STREAMS["FP32"], "continued": (CONTINUED,), "BF16": STREAMS["BF16"]}
ROW_ORDER = ("attribution", "baselines", CONTINUED, *STREAMS["BF16"])
"""Rows stand as the cells of these protocols do, one after the other, but for `FIRST`."""
FIRST = ("none", "compensated")
"""What everything else is compared with."""
ENDED = (FINISHED, EXPLODED, NONFINITE)
ENDS = {FINISHED: "", PAUSED: ", cut", WAITING: ", unfinished"}
"""How a run ended that has records and lost no loss; any other state is said as it is."""
FP32_STREAM = "model.fp32_residual_connection=true"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocols:
    """What is known of protocols by name: handed in, since its place imports this module."""

    experiment: Callable[[str], Any]
    """The protocol and its runs."""
    asked: Callable[[Any, str], str]
    """What a run of a protocol computes."""
    controls: Callable[..., dict[str, Row]]
    """By run of a protocol, the run of its baselines that is what it asks for."""

    def cells(self, name: str) -> dict[str, list[Any]]:
        """Runs by cell, without the run that only others continue from."""
        found: dict[str, list[Any]] = {}
        for run in self.experiment(name).runs:
            if name != CONTINUED or run.base is not None:
                found.setdefault(run.cell.name, []).append(run)
        return found

    def computes(self, runs: list[Any], name: str) -> str:
        """What tells a cell from others, whatever its residual stream: of its lowest seed."""
        first = min(runs, key=lambda run: run.seed)
        alike = dataclasses.replace(first, overrides=(*first.overrides, FP32_STREAM))
        return self.asked(alike, name)


def rendered(protocols: Protocols) -> Callable[[dict[str, Any]], str]:
    """A line a cell, a column a seed of each way to run it; then how many runs there are."""

    def render(_: dict[str, Any]) -> str:
        cells = _cells(protocols)
        columns = [(group, seed) for group in COLUMNS for seed in _seeds(cells, group)]
        asked = {
            (cell, *column): text
            for cell, runs in cells.items()
            for column in columns
            if (text := _told(runs, *column)) is not None
        }
        rows = [[cell, *(asked.get((cell, *c), "-") for c in columns)] for cell in cells]
        head = ["cell", *(f"{group}, seed {seed}" for group, seed in columns)]
        counts = "; ".join(_count(protocols, stream, asked) for stream in STREAMS)
        return (
            f"{table(head, rows)}\n\nRuns from step 0 that were made, at least in part: {counts}."
        )

    return render


def _cells(protocols: Protocols) -> dict[str, list[tuple[str, Any]]]:
    """Protocol and run of every cell, by its names in all protocols, in the order of the table."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for name in ROW_ORDER:
        for runs in protocols.cells(name).values():
            key = protocols.computes(runs, name)
            found.setdefault(key, []).extend((name, run) for run in runs)
    in_columns = [name for names in COLUMNS.values() for name in names]
    named = {}
    for runs in found.values():
        # A cell has the name that it has in the first column that asks it.
        runs.sort(key=lambda run: in_columns.index(run[0]))
        names = [*dict.fromkeys(run.cell.name for _, run in runs)]
        others = f" ({', '.join(f'`{name}`' for name in names[1:])})" if names[1:] else ""
        place = FIRST.index(names[0]) if names[0] in FIRST else len(FIRST)
        told = f"`{names[0]}`{others}"
        if told in named:  # the same name, and something else that it computes
            told += f" of `{runs[0][0]}`"
        named[told] = (place, runs)
    return {told: runs for told, (_, runs) in sorted(named.items(), key=lambda item: item[1][0])}


def _seeds(cells: dict[str, list[tuple[str, Any]]], group: str) -> list[int]:
    """Seeds that any cell has in a group of columns."""
    every = (run for runs in cells.values() for run in runs)
    return sorted({run.seed for name, run in every if name in COLUMNS[group]})


def _told(runs: list[tuple[str, Any]], group: str, seed: int) -> str | None:
    """Entry of one cell; None where no protocol asks it."""
    here = [(name, run.id) for name, run in runs if name in COLUMNS[group] and run.seed == seed]
    if not here:
        return None
    if group == "continued":
        return _continued(here[0][1])
    made = [(row, _result(name)["explosion"]) for name, run in here if (row := _row(name, run))]
    return entry(*max(made, key=lambda one: _far(one[0]))) if made else "missing"


def entry(row: Row, rule: dict[str, Any]) -> str:
    """What became of a run from step 0, by its row of the results and their ``explosion``."""
    if not row["steps"]:
        return "missing" if row["state"] == WAITING else f"missing ({row['state']})"
    if row["exploded_at"] is not None:
        return f"lost at {row['exploded_at']:,}"
    end = ENDS.get(row["state"], f", {row['state']}")
    end += ", records incomplete" if row.get("incomplete") else ""
    if (first := row["first_large_gradient"]) is not None:
        until = f"cut at {row['steps']:,}" if end == ENDS[PAUSED] else f"to {row['steps']:,}{end}"
        return f"norm above {rule['grad_norm']:g} from {first:,}, {until}"
    if row["steps"] < rule["from_step"]:  # nothing was judged yet, so it is not flat either
        return f"to {row['steps']:,}{end}"
    return f"flat to {row['steps']:,}{end}"


def _continued(run: str) -> str:
    """Verdict of a run that continues another one, by the heads that run away."""
    row = _row(CONTINUED, run)
    if row is None or not row["steps"]:
        return "missing"
    heads = _read("continued_heads")
    verdict = heads["runs"].get(run, {}).get("verdict") if heads else None
    if verdict in (None, "untold") and row["state"] != FINISHED:
        return ENDS.get(row["state"], str(row["state"])).removeprefix(", ")
    return verdict or "not judged"


def _count(protocols: Protocols, stream: str, asked: dict[tuple[str, str, int], str]) -> str:
    """How many runs of the attribution a stream has, and of all its columns."""
    baselines, name = STREAMS[stream]
    runs = protocols.experiment(name).runs
    # Of a seed of which nothing was made here no batches could differ: those runs count too.
    taken = protocols.controls(name, _result(name), alone=True)
    own = {run.id: _row(name, run.id) for run in runs}
    made = taken | {run: row for run, row in own.items() if row and row["steps"]}
    notes = [f"{len(taken)} as runs of `{baselines}`"] if taken else []
    if made:
        ended = sum(_ended(row) for row in made.values())
        notes.append(f"{ended} to the end or until the loss was lost")
    text = f"stream in {stream}, {len(made)} of the {len(runs)} that `{name}` asks for"
    text += f" ({', '.join(notes)})" if notes else ""
    told = [entry for (_, group, _), entry in asked.items() if group == stream]
    there = sum(not entry.startswith("missing") for entry in told)
    return f"{text}, {there} of the {len(told)} in the table"


def _row(name: str, run: str) -> Row | None:
    """The attempt at a run that counts; it has the run's name."""
    rows = _result(name)["runs"]
    return next((row for row in rows if row["run"] == run and row["state"] != "repeated"), None)


def _far(row: Row) -> tuple[bool, int]:
    """The same run made for two protocols: one that came to its end, or went further."""
    return _ended(row), row["steps"]


def _ended(row: Row) -> bool:
    """Whether there is nothing left to see: at its end, or its loss lost, cut after that or not."""
    return row["state"] in ENDED or row["exploded_at"] is not None


def _result(name: str) -> dict[str, Any]:
    """Results of a protocol; without runs if it was never run."""
    return _read(f"stability_{name}") or {"runs": [], "fingerprints": {}}


def _read(file: str) -> dict[str, Any] | None:
    path = ROOT / "docs" / "results" / f"{file}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found

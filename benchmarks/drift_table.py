"""Tables of `gradient_drift.py`: medians and the head with the largest coherence; every head."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from table_text import kept_from, origin, table

SIDES = ("q", "k")
MEDIANS = {
    "scatter of a walk's": "walk_sd",
    "ahead": "ahead",
    "cross": "cross",
    "line": "line",
    "rank one": "rank_one",
    "growth": "growth",
}
PLAIN = "none"
SURE = 1e-3
"""Heads are counted whose coherence random signs reach less often; none of 2^15 is 3e-5."""


def figures(runs: Mapping[str, Mapping[str, Any]], sides: Sequence[str] = SIDES) -> str:
    """A line a checkpoint and layer, side and kind: medians over heads, and the worst head."""
    rows = []
    for name, facts in runs.items():
        for side in sides:
            for kind, heads in sorted(facts[side].items(), key=lambda item: _place(facts, item[0])):
                middle = functools.partial(_median, heads)
                worst = max(heads, key=lambda head: _or(head["coherence"], -math.inf))
                value, error, p = (_text(worst[k]) for k in ("coherence", "coherence_se", "walk_p"))
                sure = sum(_or(head["walk_p"], 1.0) < SURE for head in heads)
                row = [name, f"W_{side.upper()}", kind, middle("relative"), middle("coherence")]
                row += [f"head {worst['head']}: {value} +- {error}", p, f"{sure} of {len(heads)}"]
                rows.append([*row, *(middle(key) for key in MEDIANS.values())])
    head = ["checkpoint", "side", "kind", "relative", "coherence", "the largest", "its p"]
    return table([*head, f"heads with p < {SURE:g}", *MEDIANS], rows)


def rendered(result: dict[str, Any]) -> str:
    """For a page: where it comes from, how much was looked at, and the figures."""
    runs = result["runs"]
    told = "; ".join(
        f"{name}: {one['batches']} batches of {one['sequences']} sequences"
        + (f", {one['repeated_sequences']} seen before" if one["repeated_sequences"] else "")
        for name, one in runs.items()
    )
    where = "W_Q (W_K is in the result file); medians over heads, but for the largest coherence. "
    where += f"{told}." + kept_from([*runs.items()], "Measured")
    return "\n".join([f"{origin(result)} {where}", "", figures(runs, ("q",))])


def by_head(result: dict[str, Any]) -> str:
    """For a page: what `rendered` has, and the coherence of every head under every kind."""
    rows = []
    kinds = ["true", *dict.fromkeys(k for one in result["runs"].values() for k in one["kinds"])]
    for name, facts in result["runs"].items():
        for side in SIDES:
            for i, plain in enumerate(facts[side][PLAIN]):
                known = [facts[side][kind][i] if kind in facts[side] else None for kind in kinds]
                cells = ["-" if one is None else _sure_is_bold(one) for one in known]
                cells += [_text(plain["relative"]), _text(plain["growth"])]
                rows.append([name, f"W_{side.upper()}", str(plain["head"]), *cells])
    head = ["checkpoint", "side", "head", *kinds, f"relative, {PLAIN}", f"growth, {PLAIN}"]
    told = f"Coherence by head; bold where random signs reach it with p < {SURE:g}."
    return "\n".join([rendered(result), "", told, "", table(head, rows)])


def _sure_is_bold(head: Mapping[str, Any]) -> str:
    sure = _or(head["walk_p"], 1.0) < SURE
    return f"**{_text(head['coherence'])}**" if sure else _text(head["coherence"])


def _place(facts: Mapping[str, Any], kind: str) -> int:
    """The true gradient first, then as asked for: a result file has names in their own order."""
    kinds = facts.get("kinds", [])
    return kinds.index(kind) if kind in kinds else -1


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _median(heads: Sequence[Mapping[str, Any]], name: str) -> str:
    known = [head[name] for head in heads if head.get(name) is not None]
    return _text(statistics.median(known)) if known else "-"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"

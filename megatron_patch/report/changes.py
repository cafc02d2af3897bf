"""When the early warning changed its mind: the beginning, the end, and what matters between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_patch.report.markup import Markup, table

if TYPE_CHECKING:
    from megatron_patch.stability.record import Telemetry

FIRST, LAST = 6, 6
"""Changes that are shown of the beginning and of the end of a run."""
SWITCH = "switch"


class Change(NamedTuple):
    """A line of the table."""

    step: int
    what: str
    """ok, watch, danger or `SWITCH`."""
    reason: str


def build(telemetry: Telemetry) -> Markup:
    """The table of verdicts."""
    found = sorted([*_verdicts(telemetry), *_switches(telemetry)], key=lambda change: change.step)
    kept = _kept(found)
    rows, next_index = [], 0
    for i in [*kept, len(found)]:
        if i > next_index:
            between = found[next_index:i]
            span = f"from step {between[0].step:,} to step {between[-1].step:,}"
            rows.append(("...", "", f"{len(between)} changes {span} are left out"))
        rows += [(f"{c.step:,}", c.what, c.reason) for c in found[i : i + 1]]
        next_index = i + 1
    left_out = f" ({len(kept)} of {len(found)} changes)" if len(kept) < len(found) else ""
    caption = f"Early warning, by the rule of the run{left_out}"
    return table(("from step", "verdict", "reason"), rows, caption=caption)


def _kept(found: Sequence[Change]) -> list[int]:
    """Places of the changes that are shown."""
    count = len(found)
    kept = {i for i, c in enumerate(found) if i < FIRST or i >= count - LAST or c.what == SWITCH}
    kept.update([i for i, c in enumerate(found) if c.what == "danger"][:1])
    # A line that says that one line is left out would take the place of that line.
    return [i for i in range(count) if i in kept or {i - 1, i + 1} <= kept]


def _verdicts(telemetry: Telemetry) -> Iterator[Change]:
    before = None
    for step, verdict in telemetry.verdicts():
        if verdict.level != before:
            yield Change(step, verdict.level, verdict.reason)
            before = verdict.level


def _switches(telemetry: Telemetry) -> Iterator[Change]:
    """Where the numerics were exchanged, by the guard or at a resume: the rule starts anew there.

    Records tell of a switch from the one that made the guard decide it on.
    """
    from megatron_patch.stability.record import attention_at

    before = 0.0
    for value in telemetry.scalars.get("switched", ()):
        if value > 0 and value != before:
            reason = "the guard exchanged the numerics after this step; the rule starts anew"
            yield Change(int(value), SWITCH, reason)
        before = float(value)
    for until, name in telemetry.meta.get("earlier", ()):
        now = attention_at(telemetry.meta, int(until) + 1)
        reason = f"resumed with {now} in place of {name}; the rule starts anew"
        yield Change(int(until), SWITCH, reason)

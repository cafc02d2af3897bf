"""What an experiment will cost, before it costs anything: the text of ``--dry-run``."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_patch.experiments.protocol import Experiment, Run
from megatron_patch.monitor.metrics import duration

NAMED = 6
"""Runs that are cut and named."""


def describe(
    experiment: Experiment,
    *,
    steps: int,
    gpus: int,
    minutes: float | None,
    only: Sequence[str],
    widen: bool = False,
) -> str:
    """The runs in the order they start, and what a time budget is enough for."""
    protocol = experiment.protocol
    runs = [r for r in experiment.runs if r.among(only)]
    lines = [f"{protocol.name}: {len(runs)} runs of {steps:,} steps, in this order:"]
    width = max((len(run.id) for run in runs), default=0)
    for run in runs:
        keys = " ".join([*run.cell.set, f"variant={run.cell.variant}"])
        lines.append(f"  {run.id:<{width}}  {keys}  {run.cell.asks}".rstrip())
    side_by_side = gpus * protocol.runs_per_gpu // protocol.gpus_per_run
    lines.append(
        f"{gpus} GPU(s) (or CPU seats), {protocol.gpus_per_run} a run, "
        f"{protocol.runs_per_gpu} run(s) a GPU: {side_by_side} side by side"
    )
    for run in runs:
        if experiment.gpus_of(run) != protocol.gpus_per_run:
            lines.append(f"{run.id} takes {experiment.gpus_of(run)} GPU(s)")
    if widen:
        lines.append("--widen: runs also take idle GPUs, so they may end earlier than said here")
    speed = protocol.steps_per_second
    if speed is None:
        lines.append("the speed of a run is not known (steps_per_second)")
        return "\n".join(lines)
    times = timetable(experiment, runs, steps=steps, seats=gpus * protocol.runs_per_gpu)
    end = max((end for _, _, end in times), default=0.0)
    lines.append(
        f"at {speed:g} steps/s one run takes {duration(steps / speed)}, all of them "
        f"{duration(end)}; a run that explodes ends earlier"
    )
    if minutes is not None:
        lines.append(_cut(experiment, times, steps=steps, minutes=minutes))
    return "\n".join(lines)


def timetable(
    experiment: Experiment, runs: Sequence[Run], *, steps: int, seats: int
) -> list[tuple[Run, float, float]]:
    """(run, start, end) in seconds from now, as the runner would give out its seats.

    A continued run waits for the one it continues, and makes its own steps only. A run that needs
    more seats than there are is counted as if it had them.
    """
    named = {run.id for run in runs}
    found: list[tuple[Run, float, float]] = []
    free = [0.0] * seats  # when each seat is given back
    ends: dict[str, float] = {}
    for run in sorted(runs, key=lambda run: run.base in named):
        wanted = min(experiment.gpus_of(run), seats)
        free.sort()
        start = max([ends.get(run.base or "", 0.0), *free[:wanted]])
        ends[run.id] = end = start + steps_of(run, steps) / _speed(experiment, run)
        free[:wanted] = [end] * wanted
        found.append((run, start, end))
    return found


def steps_of(run: Run, steps: int) -> int:
    """Steps a run makes itself, at most: nobody knows yet when its own event comes."""
    if run.base is None or run.cell.follow is None:
        return steps
    return min(steps, max(0, run.cell.before + run.cell.follow))


def _speed(experiment: Experiment, run: Run) -> float:
    """Steps per second on the GPUs the run is given."""
    protocol = experiment.protocol
    assert protocol.steps_per_second is not None
    return protocol.steps_per_second * experiment.gpus_of(run) / protocol.gpus_per_run


def _cut(
    experiment: Experiment,
    times: list[tuple[Run, float, float]],
    *,
    steps: int,
    minutes: float,
) -> str:
    """What ``minutes`` are enough for."""
    kept = experiment.protocol.save_seconds
    usable = max(0.0, 60 * minutes - kept)
    late = [(run, start) for run, start, end in times if end > usable]
    text = f"{minutes:g} minutes, {kept:g} s of them for saving: "
    text += f"{len(times) - len(late)} of {len(times)} run(s) come to their end"
    for run, start in late[:NAMED]:
        done = int(max(0.0, usable - start) * _speed(experiment, run))
        text += f"; {run.id} is at {done:,} of {steps_of(run, steps):,} steps"
    if len(late) > NAMED:
        text += f"; and {len(late) - NAMED} more"
    return text + ("" if not late else "; the same command goes on from their checkpoints")

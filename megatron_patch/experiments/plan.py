"""What an experiment will cost, before it costs anything: the text of ``--dry-run``."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_patch.experiments.protocol import Experiment
from megatron_patch.monitor.metrics import duration


def describe(
    experiment: Experiment, *, steps: int, gpus: int, minutes: float | None, only: Sequence[str]
) -> str:
    """The runs in the order they start, and what a time budget is enough for."""
    protocol = experiment.protocol
    runs = [r for r in experiment.runs if not only or {r.cell.name, r.id} & set(only)]
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
    speed = protocol.steps_per_second
    if speed is None:
        lines.append("the speed of a run is not known (steps_per_second)")
        return "\n".join(lines)
    one = steps / speed
    lines.append(
        f"at {speed:g} steps/s one run takes {duration(one)}, all of them "
        f"{duration(one * -(-len(runs) // max(1, side_by_side)))}"
    )
    if minutes is not None:
        usable = max(0.0, 60 * minutes - protocol.save_seconds)
        done = int(usable * speed)
        lines.append(
            f"{minutes:g} minutes are {done:,} steps of each of {min(side_by_side, len(runs))} "
            f"run(s) after {protocol.save_seconds:g} s for saving"
            + ("" if done >= steps else ": not one run is finished; it goes on from its checkpoint")
        )
    return "\n".join(lines)

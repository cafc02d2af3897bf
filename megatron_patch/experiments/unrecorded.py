"""What runs came to while nobody wrote it down: their launcher was killed, or states.json is lost.

A run's own directory says it: the trainer marks the end, and a checkpoint is where a run goes on.
"""

from __future__ import annotations

from megatron_patch.experiments import origin
from megatron_patch.experiments.store import FINISHED, PAUSED, WAITING, Store


def catch_up(store: Store) -> list[str]:
    """Bring the states up to date with the run directories; one line for each that changed."""
    lines = []
    for run in store.experiment.runs:
        state, last = store.states[run.id], store.last_step(run)
        if state.state not in (WAITING, PAUSED) or not last:
            continue
        marked = (store.run_dir(run) / "FINISHED").exists()
        if marked or origin.completion(store, run):
            new = FINISHED
        elif state.state == WAITING and store.has_checkpoint(run):
            new = PAUSED
        else:
            continue
        state.state, state.reason = new, "as its directory says: its launcher did not record it"
        lines.append(f"{run.id} is {new} after step {last:,}, {state.reason}")
    if lines:
        store.save()
    return lines

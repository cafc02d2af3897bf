"""Where a run starts that continues another one: so many steps before (or after) its event.

The *event* of a run is the first window, after ``explosion.from_step``, with a mean gradient norm
above ``explosion.grad_norm``. Nobody knows beforehand when it comes, so a run with ``from_cell``
waits until its base has shown it and has a checkpoint at the distance asked for. The base may still
be running then: that it goes on to explode is what the continued run is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patch.experiments.store import FAILED, REFUSED, newest_checkpoint
from megatron_patch.experiments.verdict import judge

if TYPE_CHECKING:
    from megatron_patch.experiments.protocol import Run
    from megatron_patch.experiments.store import Store


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run starts."""

    base: str
    """Id of the run it continues."""
    event: int
    """First step of the base with large gradients."""
    step: int
    """Step of the checkpoint."""
    path: Path

    def as_dict(self) -> dict[str, object]:
        """For states.json."""
        return {"base": self.base, "event": self.event, "step": self.step}


def find(store: Store, run: Run) -> Origin | None:
    """The checkpoint ``run`` starts from; None while its base is not so far.

    Once a run can go on, its own record says where: the base's later steps change nothing. One that
    begins again, on another machine, say, may find another attempt at its base there.
    """
    assert run.base is not None
    base = store.experiment.by_id(run.base)
    folder = store.run_dir(base) / "checkpoints"
    known = store.states[run.id].origin
    if known is not None and store.reached(run):
        event, step = int(known["event"]), int(known["step"])
        path = newest_checkpoint(folder, at_most=step)
        return None if path is None or path[0] != step else Origin(base.id, event, *path)
    event_at = event_of(store, base)
    if event_at is None:
        return None
    wanted = event_at - run.cell.before
    path = newest_checkpoint(folder, at_most=wanted)
    # A step is logged before its checkpoint is written: wait until the base has gone on.
    if path is None or (wanted >= store.last_step(base) and not store.is_final(base)):
        return None
    return Origin(base.id, event_at, *path)


def event_of(store: Store, run: Run) -> int | None:
    """First step of a run with large gradients; None if there is none yet."""
    return judge(store.rows(run), store.experiment.protocol.explosion).first_large_gradient


def end_of(store: Store, run: Run, *, limit: int) -> int:
    """Step at which a run is complete: the protocol's, or ``follow`` steps after the event.

    That is its base's event, or its own if it continues none; until it is known, ``limit``.
    """
    if run.cell.follow is None:
        return limit
    known = store.states[run.id].origin
    if run.base is None:
        event = event_of(store, run)
    else:
        event = None if known is None else int(known["event"])
    return limit if event is None else min(limit, event + run.cell.follow)


def completion(store: Store, run: Run) -> str:
    """How a run with ``follow`` came to its end, a checkpoint to show for it; "" if it has not."""
    follow = run.cell.follow
    whole = end_of(store, run, limit=store.experiment.protocol.steps)
    if follow is None or store.reached(run) < whole:
        return ""
    return f"{follow:,} steps after the event"


def unstartable(store: Store, run: Run) -> str | None:
    """Why a run can never start; None while it still may."""
    assert run.base is not None
    base = store.experiment.by_id(run.base)
    if not store.is_final(base):
        return None
    event, state = event_of(store, base), store.states[base.id].state
    if event is None and state in (FAILED, REFUSED):
        return f"{base.id}, which it continues, is {state}"
    if event is None:
        return f"{base.id} ended without a gradient norm above the limit: there is nothing to save"
    return f"{base.id} has no checkpoint at step {event - run.cell.before:,} or before"

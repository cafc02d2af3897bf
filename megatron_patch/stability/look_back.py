"""What the early warning knows of the steps before a start: this run's records, or those of the
run whose checkpoint it starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.stability import record
from megatron_patch.stability.history import History
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer


@dataclass(kw_only=True)
class LookBack:
    """The past of a run that goes on after ``step``; first rank only.

    Args:
        directory: of the run; writer: of its records.
        rule: thresholds of the run.
        step: steps done; reach: how many before it the rule looks back on.
        compensated: whether the run computes with what the guard switches to, given the step of its
            switch.
        log: takes a line.
    """

    directory: Path
    writer: Writer
    rule: Rule
    step: int
    reach: int
    compensated: Callable[[int], bool]
    log: Callable[[str], None]

    def history(
        self, switched_at: int, *, parent: Path | None
    ) -> tuple[History, int, tuple[int, np.ndarray] | None]:
        """(history, step of the guard's switch, step and largest logits of the last record)."""
        rule, step = self.rule, self.step
        last = None
        try:
            # What lies further back the rule does not look at, and weeks of it are gigabytes.
            start = max(0, step - self.reach)
            found = record.read(self.directory, after=start).until(step)
            if step and parent is not None and self._take_from(parent, found.meta):
                found = record.read(self.directory, after=start).until(step)
            if len(found.records):
                last = int(found.steps[-1]), found.heads["max_logit"][-1]
            if found.switched_at and found.switched_at > step and not switched_at:
                # A checkpoint of the very step whose record made the guard switch, one step later.
                switched_at = found.switched_at
            after = max(switched_at, start)
            history = found.since(after).history(rule, after=after)
        except (OSError, ValueError, KeyError) as error:
            if self.writer.begun:
                raise
            # They say more where an attempt could not begin.
            self.log(f"early warning: begins anew at step {step:,} ({error})")
            return History(rule, compensated=self.compensated(switched_at)), switched_at, last
        # Another guard setting has just taken its switch back: nothing is known of these numerics.
        if history.compensated != self.compensated(switched_at):
            history = History(rule, compensated=self.compensated(switched_at))
        return history, switched_at, last

    def _take_from(self, source: Path, meta: Mapping[str, Any]) -> bool:
        """At the first start from another run's checkpoint: whether its records are here now."""
        parent = {"run": str(source), "step": self.step}
        if meta.get("parent") == parent:
            return False
        try:
            found, records = history_from_parent(
                source, self.writer.meta, step=self.step, steps=self.reach
            )
            self.writer.begin_with(records, parent=parent)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.log(f"early warning: begins anew at step {self.step:,} ({source}: {error})")
            return False
        self.log(f"early warning: looks back on {found} before step {self.step:,}")
        return True


def history_from_parent(
    source: Path, meta: Mapping[str, Any], *, step: int, steps: int
) -> tuple[Path, np.ndarray]:
    """The other run's directory, and its last records, as `Writer.begin_with` takes them.

    Args:
        source: a checkpoint of the other run, the folder of its checkpoints, or its directory.
        meta: of the new run.
        step: of the checkpoint.
        steps: how far back the rule looks.

    Raises:
        FileNotFoundError: no telemetry of steps up to there is beside the checkpoint.
        ValueError: it is of another model, of other attention, or of another version.
    """
    found = directory_of(source)
    other = record.read(found, after=max(0, step - steps))
    theirs = other.meta | {"attention": record.attention_at(other.meta, step)}
    for key in ("attention", *record.LAYOUT):
        if theirs[key] != meta[key]:
            other_is = f"{theirs[key]!r:.80}, this run has {meta[key]!r:.80}"
            raise ValueError(f"{key} {other_is}")
    changed = [until for until, _ in other.meta.get("earlier", ()) if until < step]
    recent = other.since(max(changed, default=0)).until(step)
    records = np.concatenate([recent.records[:0], *recent.all_parts])
    records = records[: record.up_to(records, step)]
    if not len(records):
        raise FileNotFoundError(f"no telemetry of the steps up to {step:,}")
    return found, _in_order_of(meta, records, other.meta)


def _in_order_of(
    meta: Mapping[str, Any], records: np.ndarray, theirs: Mapping[str, Any]
) -> np.ndarray:
    """The records with the columns of this run; one that they lack is NaN."""
    found = np.zeros(len(records), record.record_dtype(meta))
    found["step"] = records["step"]
    parts = {"scalars": "scalars", "layers": "layer_metrics", "heads": "head_metrics"}
    for part, key in parts.items():
        for i, name in enumerate(meta[key]):
            known = name in theirs[key]
            found[part][:, i] = records[part][:, theirs[key].index(name)] if known else np.nan
    return found


def directory_of(source: Path) -> Path:
    """The run directory with telemetry that a checkpoint, or the folder of its checkpoints, is of.

    Raises FileNotFoundError: there is none.
    """
    for path in (source, *source.resolve().parents[:2]):
        if (path / record.FOLDER / "meta.json").is_file():
            return path
    raise FileNotFoundError("there is no telemetry beside it")

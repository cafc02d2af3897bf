"""What the early warning knows of the steps before a start: this run's records, or those of the
run whose checkpoint it starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.stability import record
from megatron_patch.stability.history import History
from megatron_patch.stability.warning import Rule
from megatron_patch.stability.writer import Writer


def look_back(
    writer: Writer, rule: Rule, *, step: int, reach: int, switched_at: int, silent: bool,
    parent: Path | None, compensated: Callable[[int], bool], log: Callable[[str], None],
) -> tuple[History, int, tuple[int, np.ndarray] | None]:  # fmt: skip
    """(history, step of the guard's switch, step and largest logits of the last record).

    Args:
        writer: of the run's records; first rank only.
        rule: thresholds of the run.
        step: steps done; reach: how many before it the rule looks back on.
        switched_at: step of the guard's switch, as far as it is known otherwise.
        silent: the checkpoint does not say whether it switched; the records do.
        parent: another run's checkpoint, from which this one starts.
        compensated: whether the run computes with what the guard switches to, given the step of its
            switch.
        log: takes a line.
    """
    directory, last = writer.folder.parent, None
    try:
        # What lies further back the rule does not look at, and weeks of it are gigabytes.
        start = max(0, step - reach)
        found = record.read(directory, after=start).until(step)
        told = {"run": str(parent), "step": step}
        # At the first start from another run's checkpoint.
        if step and parent is not None and found.meta.get("parent") != told:
            log(_take_from(writer, parent, told, step=step, reach=reach))
            found = record.read(directory, after=start).until(step)
        if len(found.records):
            last = int(found.steps[-1]), found.heads["max_logit"][-1]
        if found.switched_at and (found.switched_at > step or silent) and not switched_at:
            # A checkpoint of the very step whose record made the guard switch, one step later, or
            # of a program whose checkpoints know nothing of it.
            switched_at = found.switched_at
        after = max(switched_at, start)
        history = found.since(after).history(rule, after=after)
    except (OSError, ValueError, KeyError) as error:
        if writer.begun:
            raise
        # They say more where an attempt could not begin.
        log(f"early warning: begins anew at step {step:,} ({error})")
        return History(rule, compensated=compensated(switched_at)), switched_at, last
    # Another guard setting has just taken its switch back: nothing is known of these numerics.
    if history.compensated != compensated(switched_at):
        history = History(rule, compensated=compensated(switched_at))
    return history, switched_at, last


def _take_from(
    writer: Writer, source: Path, parent: dict[str, Any], *, step: int, reach: int
) -> str:
    """Begin with another run's records; a line about them."""
    try:
        found, records = history_from_parent(source, writer.meta, step=step, steps=reach)
        writer.begin_with(records, parent=parent)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"early warning: begins anew at step {step:,} ({source}: {error})"
    return f"early warning: looks back on {found} before step {step:,}"


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

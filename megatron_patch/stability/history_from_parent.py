"""History from the parent: what the early warning knows of the run whose checkpoint a new run
starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.stability import record


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
    for part, key in (
        ("scalars", "scalars"),
        ("layers", "layer_metrics"),
        ("heads", "head_metrics"),
    ):
        for i, name in enumerate(meta[key]):
            known = name in theirs[key]
            found[part][:, i] = records[part][:, theirs[key].index(name)] if known else np.nan
    return found


def directory_of(source: Path) -> Path:
    """The run directory with telemetry that a checkpoint, or the folder of its checkpoints, is of.

    Raises:
        FileNotFoundError: there is none.
    """
    for path in (source, *source.resolve().parents[:2]):
        if (path / record.FOLDER / "meta.json").is_file():
            return path
    raise FileNotFoundError("there is no telemetry beside it")

"""What the early warning knows of a run that starts from another run's checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_patch.runtime.files import write_whole
from megatron_patch.stability import record


def look_back(run_dir: Path, source: Path, *, step: int, steps: int) -> Path:
    """Keep, as before.bin, what the rule looks back on in the run that a new run continues.

    Args:
        run_dir: of the new run; its `Writer` exists, and nothing has been recorded yet.
        source: a checkpoint of the other run, the folder of its checkpoints, or its directory.
        step: of the checkpoint.
        steps: how far back the rule looks.

    Returns the other run's directory.

    Raises:
        FileNotFoundError: no telemetry of steps up to there is beside the checkpoint.
        ValueError: it is of another model, of other attention, or of another version.
    """
    kept_file = run_dir / record.FOLDER / "before.bin"
    kept_file.unlink(missing_ok=True)  # of an attempt that ended before its first record
    found = directory_of(source)
    other, meta = record.read(found), record.read(run_dir).meta
    theirs = dict(other.meta) | {"attention": record.attention_at(other.meta, step)}
    for key in ("attention", *record.MODEL):
        if theirs.get(key) != meta[key]:
            told = f"{theirs.get(key)!r:.80}, this run has {meta[key]!r:.80}"
            raise ValueError(f"{key} {told}")
    if not record.continues(other.meta, meta):
        raise ValueError("its records hold something that this version has no place for")
    changed = [until for until, _ in other.meta.get("earlier", ()) if until < step]
    recent = other.since(max(step - steps, *changed, 0))
    parts = [part[: record.up_to(part, step)] for part in (recent.before, recent.records)
             if part is not None]  # fmt: skip
    kept = record.relaid(np.concatenate(parts), other.meta, meta)
    if kept is None or not len(kept):
        raise FileNotFoundError(f"no telemetry of the steps up to {step:,}")
    write_whole(kept_file, kept.tobytes())
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

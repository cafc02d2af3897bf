"""The small JSON files of an experiment: damage has an answer, and writing is all or nothing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.runtime.files import write_whole

REMEDIES = {
    "states.json": "move it away: what its runs have come to is read from their directories then",
    "experiment.json": "restore it from an archive ('experiment unpack'), or use another --out",
}
OTHERWISE = "restore it from an archive ('experiment unpack'), or move it away"


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file.

    Raises:
        ExperimentError: the file is not one, with what to do.
        FileNotFoundError: there is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(found, dict):
        raise damaged(path, f"a {type(found).__name__} where a mapping should be")
    return found


def damaged(path: Path, why: str) -> ExperimentError:
    """The error for a file that is not what it should be, with what to do."""
    return ExperimentError(f"{path} is damaged ({why}): {REMEDIES.get(path.name, OTHERWISE)}")


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Replace a file by a mapping: durable before the old content is gone."""
    write_whole(path, json.dumps(tree, indent=1, sort_keys=True) + "\n")


def refuse_run(path: Path) -> None:
    """An experiment's ``--out`` is no run: its records would lie among those of that run, for good.

    Raises:
        ExperimentError: ``path`` is the directory of a training run.
    """
    if (path / "experiment.json").exists():
        return  # an experiment that somebody has trained a run into: its own runs go on
    # config.yaml alone may be anybody's; a run that has begun has a log beside it.
    if all((path / name).exists() for name in ("config.yaml", "train.log")):
        raise ExperimentError(f"--out {path}: is the directory of a run; name one of its own")


def make_folder(path: Path, option: str) -> None:
    """Create a directory to write into.

    Raises:
        ExperimentError: it cannot be made, or not written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Only trying tells: what the mode bits allow, a file system may refuse.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"{option} {path}: cannot be written ({reason}); name a directory that you can write"
        raise ExperimentError(text) from error

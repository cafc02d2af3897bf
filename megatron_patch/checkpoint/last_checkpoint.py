"""What a run directory remembers of its newest checkpoint: ``<run_dir>/last_checkpoint.json``.

An empty directory of checkpoints is what a new run has, and also what a run has whose file system
is not mounted. This file tells them apart. It is written after the commit, so it may name an older
checkpoint than the newest one, and never one that was not complete. Only that it exists counts:
which checkpoint is loaded is found out in the store.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from megatron_patch.checkpoint.errors import CheckpointError, describe, is_passing, no_checkpoint
from megatron_patch.runtime.files import sync_directory, write_whole

FILE = "last_checkpoint.json"

log = logging.getLogger(__name__)


def remember(run_dir: Path, path: Path, *, step: int) -> None:
    """Note a complete checkpoint. A failure is logged: the checkpoint counts without it."""
    try:
        facts = {"step": step, "path": os.path.abspath(path)}
        write_whole(run_dir / FILE, json.dumps(facts) + "\n")
        sync_directory(run_dir)
    except OSError as error:
        log.warning("checkpoint %s is complete, but %s: %s", path.name, FILE, describe(error))


def has_saved(run_dir: Path) -> bool:
    """Whether the run went on from a checkpoint of its own, or has saved one.

    Where it has not, and is beyond step 0, it is at the start from another run's checkpoint.
    """
    return (run_dir / FILE).exists()


def refuse_to_forget(run_dir: Path, root: Path) -> None:
    """Do not start a run at step 0 whose store ``root`` is empty and once was not.

    Raises CheckpointError: the run directory knows of a checkpoint; an UnavailableError where it
    cannot be asked this time.
    """
    file = run_dir / FILE
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise no_checkpoint(
            f"cannot read {file}: {describe(error)}", passing=is_passing(error)
        ) from None
    try:
        facts = json.loads(text)
        saved = f"step {int(facts['step']):,} was saved as {str(facts['path'])[:500]}"
    except (ValueError, KeyError, TypeError):
        saved = "checkpoints were saved (the file is damaged and does not tell where)"
    raise CheckpointError(
        f"there is no checkpoint in {os.path.abspath(root)}, but {file} says that {saved}: mount "
        "or put back the directory, or say in checkpoint.directory where it is now; to start anew "
        f"from step 0, delete {file}"
    )

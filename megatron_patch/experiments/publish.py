"""Copies of an experiment's results in one flat folder, which may outlive the machine.

``<name>.json``, ``.png`` and ``.csv`` are what the documentation's tables and plots are made from;
``<name>.<job>.<n>.zip`` are the records themselves (`archive.pack`), for ``experiment unpack``
elsewhere; several jobs may bring theirs into one folder. Each file is replaced whole: a reader, or
a copy made in between, never sees half of one. A copy may get archives of two calls: each names its
own, and ``unpack`` refuses a part of what a call wrote.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.experiments import archive, earlier, results
from megatron_patch.experiments.files import make_folder, read_json
from megatron_patch.experiments.store import Store, job_of
from megatron_patch.runtime.files import write_whole

WAIT_SECONDS = 60.0
"""For another job that writes its results into the same folder, which takes it a few."""
COPIES = {"verdicts.json": ".json", "curves.png": ".png", "curves.csv": ".csv"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where results go, and how much of the records with them."""

    folder: Path
    archives: int = 0
    """Archives of records at most; 0: none."""
    limit: int = int(15.5 * 2**20)
    """Bytes of one archive at most."""

    def make(self) -> None:
        """Make the folder.

        Raises:
            ExperimentError: it cannot be made, or not written.
        """
        make_folder(self.folder, "--results-dir")


def publish(store: Store, target: Target) -> Iterator[str]:
    """Bring the experiment's results up to date and copy them; yields what was left out.

    Runs that went further in the results which are there already are kept (`earlier`).

    Raises:
        ExperimentError: the small records alone do not fit into the archives, or the results that
            are there cannot be read or stand beside these.
    """
    target.make()
    with _alone(target.folder) as notes:
        yield from notes
        yield from _publish(store, target)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[list[str]]:
    """Nobody else's while the block runs: jobs side by side replace the same results, each with the
    rows of the others as it has read them. Yields what should be told.

    The directory itself is locked, so that nothing is left in it; where that cannot be it goes on.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _locked(handle, folder)
    finally:
        os.close(handle)


def _locked(handle: int, folder: Path) -> list[str]:
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return [
                    f"warning: another process has been writing results into {folder} for "
                    f"{WAIT_SECONDS:g} s; they are written all the same: look whether its runs are "
                    "in them"
                ]
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return []
        else:
            return []


def _publish(store: Store, target: Target) -> Iterator[str]:
    name = store.experiment.protocol.name
    results.write(store, earlier.read(target.folder, name))
    for source, suffix in COPIES.items():
        path = store.path / "results" / source
        if path.exists():
            write_whole(target.folder / f"{name}{suffix}", path.read_bytes())
    if target.archives:
        store.save()
        job = job_of(read_json(store.path / "experiment.json"))
        before = set(target.folder.glob(f"{name}.{job}.*.zip*"))  # drafts of a killed one too
        for line in archive.pack(
            store.path, target.folder, files=target.archives, limit=target.limit
        ):
            if line.startswith("left out"):
                yield line
            else:
                before.discard(Path(line.rsplit(": ", 1)[0]))
        for old in before:  # of a time when there was more: unpacked with the others it would mix
            old.unlink(missing_ok=True)

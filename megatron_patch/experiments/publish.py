"""Copies of an experiment's results in one flat folder, which may outlive the machine.

``<name>.json``, ``.png`` and ``.csv`` are what the documentation's tables and plots are made from;
``<name>.<job>.<n>.zip`` are the records themselves (`archive.pack`), for ``experiment unpack``
elsewhere; several jobs may bring theirs into one folder. Each file is replaced whole: a reader, or
a copy made in between, never sees half of one. A copy may get archives of two calls: each names its
own, and ``unpack`` refuses a part of what a call wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_patch.experiments import archive, earlier, results
from megatron_patch.experiments.files import make_folder, read_json
from megatron_patch.experiments.store import Store, job_of
from megatron_patch.runtime.files import write_whole

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
    name = store.experiment.protocol.name
    target.make()
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

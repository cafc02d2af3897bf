"""Writes the telemetry that `record` reads: the first rank's part. numpy only."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.runtime.files import write_whole
from megatron_patch.runtime.records import LAST_ROWS, AppendOnlyFile, gap
from megatron_patch.stability.record import (
    FIRST_ATTEMPT,
    FOLDER,
    LAYOUT,
    NAMES,
    RecordsError,
    attention_at,
    meta_of,
    record_dtype,
    records_of,
    story,
    up_to,
)

log = logging.getLogger(__name__)

NOT_THERE = "not there"


class Writer:
    """Appends records; the first rank has one. A full disk costs records, and never the run.

    Args:
        run_dir: of the run.
        meta: from `make_meta`.
        start_step: steps done; what earlier attempts recorded of later ones does not count any
            more, and stays in the file.

    Raises RecordsError: records of another version or model are there, or damaged ones.
    """

    def __init__(self, run_dir: Path, meta: dict[str, Any], *, start_step: int) -> None:
        self.folder, self.meta = run_dir / FOLDER, dict(meta)
        self._start_step, self._taken = start_step, False
        self._before: dict[str, Any] | None = None
        """meta.json as the attempt before left it."""
        self._steps: list[int] = []
        """Of the last records up to ``start_step``."""
        self._dtype = record_dtype(meta)
        self._file = AppendOnlyFile(
            self.folder / "records.bin", size=self._dtype.itemsize, begin=self._begin
        )
        self._file.begin()

    @property
    def begun(self) -> bool:
        """Whether the records that were there are continued."""
        return self._file.begun

    def _begin(self) -> None:
        """Begin an attempt; where that fails it is tried again at the next record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        records = records_of(self._file.path, self._dtype)
        attempts = []
        if (self.folder / "meta.json").exists():
            before = self._before = meta_of(self.folder)
            if any(before[key] != self.meta[key] for key in LAYOUT):
                raise RecordsError(
                    f"{self.folder}: its records are of a model with {before['layers']} layers of "
                    f"{before['heads']} heads, this one has {self.meta['layers']} of "
                    f"{self.meta['heads']}; move {self.folder} away and the run begins new records"
                )
            if any(before[key] != self.meta[key] for key in NAMES):
                # The version before has fewer: its file goes on as it is.
                self.meta |= {key: before[key] for key in NAMES}
                self._dtype = record_dtype(self.meta)
                self._file.size = self._dtype.itemsize
                records = records_of(self._file.path, self._dtype)
            attempts = before.get("attempts", [FIRST_ATTEMPT])
            for part in story(records, attempts):
                last = part[: up_to(part, self._start_step)][-LAST_ROWS:]
                self._steps += last["step"].tolist()
            self.meta["earlier"] = self._earlier(before)
            parent = before.get("parent")
            if parent is not None and parent["step"] <= self._start_step:
                self.meta["parent"] = parent
        else:
            self.meta["earlier"] = []
        self.meta["attempts"] = [*attempts, [len(records), self._start_step]]
        self._write_meta()

    def _earlier(self, before: dict[str, Any]) -> list[tuple[int, str]]:
        """What meta.json says of the attention of steps before."""
        step = self._start_step
        earlier = [(until, name) for until, name in before.get("earlier", ()) if until < step]
        at = attention_at(before, step)
        if at != self.meta["attention"] and self._steps:
            earlier.append((step, at))
        return earlier

    def _write_meta(self) -> None:
        write_whole(self.folder / "meta.json", json.dumps(self.meta, indent=1) + "\n")

    def begin_with(self, records: np.ndarray, *, parent: dict[str, Any]) -> None:
        """Put the last records of the run that this one continues in front of its own.

        Args:
            records: of the same layout, ascending.
            parent: which run and step they are of: ``{"run": ..., "step": ...}``.

        Raises OSError: they could not be written.
        """
        if not self._file.append(records.tobytes()):
            raise OSError(f"{self._file.path} cannot be written")
        count = self._file.path.stat().st_size // self._dtype.itemsize
        # Nothing before them counts, and they do once meta.json says so.
        attempts = [*self.meta["attempts"], [count - len(records), 0], [count, parent["step"]]]
        self.meta |= {"attempts": attempts, "parent": parent}
        self._write_meta()

    def messages(self, *, own: bool) -> list[str]:
        """What is to be logged of the records as they were found.

        ``own``: whether the run has checkpoints of its own; see `records.gap`.
        """
        if self._before is None:
            return []
        apart = max(int(self.meta["interval"]), int(self._before.get("interval", 0)))
        name = f"{FOLDER}/{self._file.path.name}"
        missing = gap(name, self._steps, self._start_step, apart=apart, own=own)
        return [line for line in (missing, self._other_rule(self._before.get("rule"))) if line]

    def _other_rule(self, before: Any) -> str | None:
        """A line if the records so far were judged by another rule: an alarm may come or go."""
        now = self.meta["rule"]
        if not isinstance(before, dict) or before == now or not self._start_step:
            return None
        changed = [f"{n} {now[n]} ({before.get(n, NOT_THERE)})" for n in now
                   if before.get(n, NOT_THERE) != now[n]]  # fmt: skip
        changed += [f"{n} {NOT_THERE} ({before[n]})" for n in before if n not in now]
        return (
            "early warning: another rule than before, by which earlier steps are judged now, too: "
            + ", ".join(changed)
        )

    def write(
        self,
        step: int,
        *,
        scalars: Mapping[str, float],
        layers: Mapping[str, np.ndarray],
        heads: Mapping[str, np.ndarray],
    ) -> None:
        """Append one record; what a mapping lacks is NaN."""
        if self._is_taken():
            return
        record = np.zeros((), self._dtype)
        record["step"] = step
        record["scalars"] = [scalars.get(name, math.nan) for name in self.meta["scalars"]]
        for part, found in (("layers", layers), ("heads", heads)):
            for i, name in enumerate(self.meta[f"{part[:-1]}_metrics"]):
                record[part][i] = found.get(name, np.float32(math.nan))
        self._file.append(record.tobytes())

    def _is_taken(self) -> bool:
        """Whether another attempt has begun here since; it has the records. Logs that once.

        A process that was given up and lives on, or another model's monitor in one directory.
        """
        if not self.begun or self._taken:
            return self._taken
        with suppress(OSError, ValueError, KeyError, TypeError):  # lost or damaged: nobody's
            found = json.loads((self.folder / "meta.json").read_text())["attempts"]
            self._taken = found != [*map(list, self.meta["attempts"])]
        if self._taken:
            log.error(
                "%s: another monitor has begun to record here, and this one records no more; give "
                "every monitor a directory of its own, and end the process if it was replaced",
                self.folder,
            )
        return self._taken

    def close(self) -> None:
        """Close the file."""
        self._file.close()

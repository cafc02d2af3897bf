"""Writes the telemetry that `record` reads: the first rank's part. numpy only."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.runtime.appending import Appended, Table
from megatron_patch.runtime.files import replacing, write_whole
from megatron_patch.runtime.growing import (
    LAST_ROWS,
    DamagedError,
    cut,
    falls_short,
    gap,
    lacks_after,
)
from megatron_patch.stability.names import HEAD_METRICS, LAYER_METRICS
from megatron_patch.stability.record import (
    FOLDER,
    FORMAT,
    attention_at,
    bias_to_signal,
    continues,
    largest,
    record_dtype,
    records_of,
    relaid,
    same_layout,
    up_to,
    worst,
)

BINARY = ("before.bin", "abandoned.bin", "records.bin")
"""Files that mean nothing without meta.json; records.bin, which a resume asks for, last."""
COLUMNS = ("step", "layer", *LAYER_METRICS, *HEAD_METRICS, "worst_head")
"""Of layers.csv."""
NOT_THERE = "not there"
STRETCH = 64
"""Records of an earlier layout that are held at a time."""


class Writer:
    """Appends records; the first rank has one. A full disk costs records, and never the run.

    Args:
        run_dir: of the run.
        meta: from `make_meta`.
        start_step: steps done; later records are moved to abandoned.bin. Records of an earlier
            version are continued if this one has a place for all they hold; otherwise they are
            kept under the name ``set_aside``.
    """

    def __init__(self, run_dir: Path, meta: dict[str, Any], *, start_step: int) -> None:
        self.folder, self.meta = run_dir / FOLDER, dict(meta)
        self.set_aside: str | None = None
        self.abandoned, self._start_step = 0, start_step
        self._rule_before: dict[str, Any] | None = None
        self._apart = int(meta["interval"])
        self._dtype = record_dtype(meta)
        self._rows: Table | None = None
        self.gaps: dict[str, int] = {}
        """File -> its last step (0: none), where those up to ``start_step`` are not all there."""
        self._file = Appended(
            self.folder / "records.bin",
            lines=False,
            size=self._dtype.itemsize,
            begin=self._begin,
        )
        self._file.begin()

    @property
    def begun(self) -> bool:
        """Whether what was there is taken over."""
        return self._file.begun

    def _begin(self) -> None:
        """Take over what is there; where that fails it is tried again at the next record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        continued = (self.folder / "meta.json").exists()
        self.abandoned, self.meta["earlier"] = self._take_over(self._start_step)
        text = json.dumps(self.meta, indent=1) + "\n"
        write_whole(self.folder / "meta.json", text.encode())
        # After the records: those of an earlier layout take the table with them.
        self._rows = Table(self.folder / "layers.csv", COLUMNS, start_step=self._start_step)
        if continued and self.set_aside is None:
            self.gaps = self._find_gaps()

    def notes(self, *, own: bool) -> list[str]:
        """Lines about what was found; ``own``: the steps before are this run's."""
        told = None if self._rows is None else self._rows.note(f"{FOLDER}/{self._rows.path.name}")
        found = self.gaps.items()
        lines = [gap(name, end, self._start_step) for name, end in found if end or own]
        lines += self._other_rule()
        return lines if told is None else [told, *lines]

    def _other_rule(self) -> list[str]:
        """A line if the records so far were judged by another rule: an alarm may come or go."""
        before, now = self._rule_before, self.meta["rule"]
        if before is None or before == now or not self._start_step:
            return []
        names = [name for name in now if before.get(name, NOT_THERE) != now[name]]
        changed = [f"{name} {now[name]} ({before.get(name, NOT_THERE)})" for name in names]
        changed += [f"{name} {NOT_THERE} ({before[name]})" for name in before if name not in now]
        return [
            "early warning: another rule than before, by which earlier steps are judged now, too: "
            + ", ".join(changed)
        ]

    def _find_gaps(self) -> dict[str, int]:
        last = records_of(self.folder / "records.bin", self._dtype)["step"][-LAST_ROWS:]
        table, step, apart = self.folder / "layers.csv", self._start_step, self._apart
        found = {
            "records.bin": falls_short(last[::-1].tolist(), step, apart=apart),
            "layers.csv": lacks_after(table, step, apart=apart),
        }
        return {f"{FOLDER}/{name}": end for name, end in found.items() if end is not None}

    def _meta_before(self) -> dict[str, Any]:
        """What an earlier attempt says of its records, which mean nothing without it."""
        file = self.folder / "meta.json"
        try:
            found = json.loads(file.read_text())
        except ValueError as error:
            found = error
        if not isinstance(found, dict):
            raise DamagedError(
                f"{file}: does not describe the records beside it ({found}): the file is damaged; "
                f"put it right, or move {self.folder} away and the run begins new records"
            )
        return found

    def _take_over(self, start_step: int) -> tuple[int, list[tuple[int, str]]]:
        """(records moved aside, what meta.json says of earlier attention)."""
        file = self.folder / "records.bin"
        if not (self.folder / "meta.json").exists() or not file.exists():
            return 0, []
        before = self._meta_before()
        past = self.folder / "before.bin"
        if before.get("format") != FORMAT or not continues(before, self.meta):
            # They have no place here: kept, but not continued.
            self.set_aside = f"records.until_{start_step}.bin"
            self._keep_aside(start_step, "layers.csv", *BINARY)
            return 0, []
        told = before.get("rule")
        self._rule_before = told if isinstance(told, dict) else None
        self._apart = max(self._apart, int(before.get("interval", 0)))
        dtype = record_dtype(before)
        records, looked_back = records_of(file, dtype), records_of(past, dtype)
        kept = up_to(records, start_step)
        dropped = len(records) - kept
        if same_layout(before, self.meta):
            aside = self.folder / "abandoned.bin" if dropped else None
            cut(file, len(records) * dtype.itemsize, None)  # a record that a crash tore
            cut(file, kept * dtype.itemsize, aside)
        else:
            self._keep_aside(start_step, *BINARY)
            if len(looked_back):
                self._rewrite(past, looked_back, before)
            if dropped:
                self._rewrite(self.folder / "abandoned.bin", records[kept:], before)
            self._rewrite(file, records[:kept], before)
        earlier = [(until, name) for until, name in before.get("earlier", ()) if until < start_step]
        at = attention_at(before, start_step)
        if at != self.meta["attention"] and kept:
            earlier.append((start_step, at))
        return dropped, earlier

    def _rewrite(self, path: Path, records: np.ndarray, before: dict[str, Any]) -> None:
        """``records`` of an earlier layout in this one, a stretch at a time."""
        with replacing(path, "wb") as out:
            for i in range(0, len(records), STRETCH):
                found = relaid(records[i : i + STRETCH], before, self.meta)
                assert found is not None  # `continues`
                out.write(found.tobytes())

    def _keep_aside(self, start_step: int, *names: str) -> None:
        """Rename files, meta.json last.

        meta.json must never lie beside a file of another layout, whenever this is killed: until
        records.bin is renamed the old ones are whole, and without it nothing is taken over.
        """
        for name in (*names, "meta.json"):
            old = self.folder / name
            if old.exists():
                os.replace(old, old.with_name(f"{old.stem}.until_{start_step}{old.suffix}"))

    def write(
        self,
        step: int,
        *,
        scalars: Mapping[str, float],
        layers: Mapping[str, np.ndarray],
        heads: Mapping[str, np.ndarray],
    ) -> None:
        """Append one record; what a mapping lacks is NaN."""
        record = np.zeros((), self._dtype)
        record["step"] = step
        record["scalars"] = [scalars.get(name, math.nan) for name in self.meta["scalars"]]
        for part, found in (("layers", layers), ("heads", heads)):
            for i, name in enumerate(self.meta[f"{part[:-1]}_metrics"]):
                record[part][i] = found.get(name, np.float32(math.nan))
        self._file.append(record.tobytes())
        if self._rows is not None:
            self._rows.rows(_layer_rows(step, layers, heads))

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._rows is not None:
            self._rows.close()


def _layer_rows(
    step: int, layers: Mapping[str, np.ndarray], heads: Mapping[str, np.ndarray]
) -> list[list[Any]]:
    """Of layers.csv: one row a layer; of every head metric the worst head."""
    found = {n: worst(n, v) for n, v in heads.items()}
    signal = bias_to_signal(heads["delta_error_mean"], heads["kappa"])
    known = np.isfinite(signal).any(axis=1)
    worst_heads = largest(signal)
    rows: list[list[Any]] = []
    for layer in range(signal.shape[0]):
        numbers = [layers[n][layer] if n in layers else math.nan for n in LAYER_METRICS]
        numbers += [found[n][layer] if n in found else math.nan for n in HEAD_METRICS]
        head = int(worst_heads[layer]) if known[layer] else ""
        rows.append([step, layer, *(f"{float(x):.6g}" for x in numbers), head])
    return rows

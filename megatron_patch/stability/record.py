"""The telemetry of a run on disk: ``<run_dir>/stability/``. numpy only, so any reader can use it.

meta.json       shapes and names, and where each attempt began
records.bin     fixed-size little-endian records: int64 step, float64 SCALARS, float32
                [layers] x LAYER_METRICS, float32 [layers, heads] x HEAD_METRICS

A record is appended when its step has been read back, so files can be read while the run goes on; a
part of one at the end is ignored. Nothing is cut back: meta.json's ``attempts`` says at which
record every attempt began and after which step, and `story` leaves out what was repeated. A run
that starts from another one's checkpoint begins with that one's last records, up to ``parent``'s
step. What could not be written is not there: steps may lie further apart than the interval.
"""

from __future__ import annotations

import bisect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.attention.capabilities import EXACT_DELTA
from megatron_patch.stability.history import READ, History
from megatron_patch.stability.names import HEAD_METRICS, LAYER_METRICS, LEVELS, SCALARS
from megatron_patch.stability.warning import FLICKER, Point, Rule, Verdict, verdicts

FORMAT = 2
READABLE = (1, FORMAT)
"""1 is the same without attempts; its records that were repeated are cut off."""
FOLDER = "stability"
LAYOUT = ("layers", "heads")
"""What must agree in two meta.json whose records are put together."""
NAMES = {"scalars": list(SCALARS), "layer_metrics": list(LAYER_METRICS),
         "head_metrics": list(HEAD_METRICS)}  # fmt: skip
"""What a record of this version holds, in order."""
OLDER = {"head_metrics": [n for n in HEAD_METRICS if n not in ("dk_sum", "dv_sum")]}
"""The same of the version before, whose records are read, and continued as they are."""
OLDER_RULE = ("watch_growth", "danger_growth", "norm_needs_head", "reference_steps", "smooth_steps")
"""Thresholds of the version before, which judged the growth of the gradient norm, too."""
FIRST_ATTEMPT = (0, 0)
"""Of `story`, where meta.json names none."""


def record_dtype(meta: Mapping[str, Any]) -> np.dtype[Any]:
    """One record, from meta.json."""
    layers, heads = int(meta["layers"]), int(meta["heads"])
    return np.dtype(
        [
            ("step", "<i8"),
            ("scalars", "<f8", (len(meta["scalars"]),)),
            ("layers", "<f4", (len(meta["layer_metrics"]), layers)),
            ("heads", "<f4", (len(meta["head_metrics"]), layers, heads)),
        ]
    )


def up_to(records: np.ndarray, step: int) -> int:
    """How many records are of steps up to this one; in order of steps, and few of them are read."""
    return bisect.bisect_right(range(len(records)), step, key=lambda i: int(records[i]["step"]))


def story(
    records: np.ndarray, attempts: Sequence[Sequence[int]], *, after: int = 0
) -> tuple[np.ndarray, ...]:
    """Records that count, in ascending steps: of every attempt those before the next one began.

    Slices of the given array, of which few records are read.

    Args:
        records: of all attempts, as they were appended.
        attempts: [number of its first record, steps done before it] of each, in order.
        after: records of steps up to this one are left out.
    """
    parts, end, limit = [], len(records), sys.maxsize
    for first, start in reversed(attempts):
        part = records[first:end]
        while len(part) and part[-1]["step"] == 0:  # zeros, left where power was lost
            part = part[:-1]
        # All of a damaged part, whose steps do not ascend, is left for the reader to see.
        part = part[up_to(part, after) if after else 0 : up_to(part, limit)]
        if len(part):
            parts.append(part)
        end, limit = min(first, end), min(start, limit)
    return tuple(parts[::-1])


def make_meta(*, rule: Rule, **about: int | str) -> dict[str, Any]:
    """What meta.json says; ``about``: layers, heads, interval, attention."""
    return {"format": FORMAT, **about, **NAMES, "rule": asdict(rule)}


def attention_at(meta: Mapping[str, Any], step: int) -> str:
    """Backend and stabilizer of a step: resumes may change them (``earlier``: until which step)."""
    names = (name for until, name in meta.get("earlier", ()) if step <= until)
    return str(next(names, meta["attention"]))


@dataclass(frozen=True)  # no slots: `records` and `judged` are kept
class Telemetry:
    """Everything recorded so far."""

    meta: dict[str, Any]
    parts: tuple[np.ndarray, ...]
    """Records that count, in ascending steps."""
    before: np.ndarray | None = None
    """Records of the run that this one continues, up to the checkpoint it began from."""

    @cached_property
    def records(self) -> np.ndarray:
        """`parts` in one array: in the file where they are one, else a copy in memory."""
        if len(self.parts) == 1:
            return self.parts[0]
        return np.concatenate([np.zeros(0, record_dtype(self.meta)), *self.parts])

    @property
    def steps(self) -> np.ndarray:
        """int64 [n]."""
        return np.asarray(self.records["step"])

    @property
    def scalars(self) -> dict[str, np.ndarray]:
        """float64 [n] by name."""
        return {n: self.records["scalars"][:, i] for i, n in enumerate(self.meta["scalars"])}

    @property
    def layers(self) -> dict[str, np.ndarray]:
        """float32 [n, layers] by name."""
        return {n: self.records["layers"][:, i] for i, n in enumerate(self.meta["layer_metrics"])}

    @property
    def heads(self) -> dict[str, np.ndarray]:
        """float32 [n, layers, heads] by name."""
        return {n: self.records["heads"][:, i] for i, n in enumerate(self.meta["head_metrics"])}

    @property
    def switched_at(self) -> int | None:
        """The step after which the guard exchanged the numerics, as the last record has it.

        Before the first record of a run that continues another one: as that one's last has it.
        """
        names = self.meta["scalars"]
        for part in reversed(self.all_parts):
            if len(part):
                switched = part[-1]["scalars"][names.index("switched")]
                return int(switched) if switched > 0 else None
        return None

    def signs_began(self, danger: int, *, until: int = 0) -> int:
        """Step of the first record of the stretch at `watch` or worse that led to this danger.

        What the run said at the time counts, so it is the same after a restart. Signs flicker: a
        stretch goes on over records at `ok` that span no more than `FLICKER` steps.

        Args:
            danger: step of the record at danger, which need not be written yet.
            until: how far back it matters; records of weeks need not be read.
        """
        level, began = self.meta["scalars"].index("level"), danger
        earlier = (
            one for part in reversed(self.parts) for one in part[::-1] if one["step"] < danger
        )
        for record in earlier:
            step = int(record["step"])
            if record["scalars"][level] >= LEVELS.index("watch"):
                began = step
            elif began - step > FLICKER:
                break
            if step <= until:
                break
        return began

    @property
    def rule(self) -> Rule:
        """The run's own, less what the version before knew of the gradient norm.

        Raises ValueError: its thresholds are not those of this version.
        """
        found = self.meta["rule"]
        if isinstance(found, dict):
            found = {n: v for n, v in found.items() if n not in OLDER_RULE}
        known = set(Rule.__dataclass_fields__)
        if not isinstance(found, dict) or set(found) != known:
            given = ", ".join(found) if isinstance(found, dict) else f"a {type(found).__name__}"
            raise ValueError(
                f"meta.json: the early warning's rule is of another version (it has {given}; this "
                f"version knows {', '.join(sorted(known))}); read it with the version that wrote it"
            )
        return Rule(**found)

    def history(self, rule: Rule | None = None, *, after: int = 0) -> History:
        """What the warning rule goes on from: the records after a step and the guard's last switch.

        ``rule`` default: the run's own, here and below.
        """
        return self._stretches(rule, after)[-1]

    def points(self, rule: Rule | None = None) -> list[Point]:
        """Every record as the rule reads it."""
        return [p for found in self._stretches(rule, 0) for p in found.points if self._own(p)]

    def verdicts(self, rule: Rule | None = None) -> list[tuple[int, Verdict]]:
        """(step, the rule's verdict after it) of every record."""
        judged = self.judged if rule is None else self._judge(rule)
        return [(point.step, verdict) for point, verdict in judged]

    @cached_property
    def judged(self) -> list[tuple[Point, Verdict]]:
        """Every record and the verdict after it, by the run's own rule."""
        return self._judge(self.rule)

    def _judge(self, rule: Rule) -> list[tuple[Point, Verdict]]:
        return [
            pair
            for found in self._stretches(rule, 0)
            for pair in zip(found.points, verdicts(found.points, rule), strict=True)
            if self._own(pair[0])
        ]

    def _own(self, point: Point) -> bool:
        return self.before is None or point.step > self.before["step"][-1]

    def _stretches(self, rule: Rule | None, after: int) -> list[History]:
        """Records after a step, in a new history from every switch of the guard on, as in the run.

        Other attention after a resume is another run, too, as far as the rule goes. Records of the
        run before come first. Never empty; a history may be.
        """
        rule = self.rule if rule is None else rule
        changes = [int(until) for until, _ in self.meta.get("earlier", ())]
        found, before = [self._stretch(rule, 0)], 0
        names = self.meta["scalars"]
        at = names.index("switched")
        metrics = {name: i for i, name in enumerate(self.meta["head_metrics"])}
        for one in chain.from_iterable(self.all_parts):
            step = int(one["step"])
            now = int(np.nan_to_num(one["scalars"][at]))
            # The record that made the guard switch was read in that step or the next, is judged
            # with those before it, and tells of the switch already.
            last = now != before and step <= now <= step + 1
            passed = bool(changes) and step > changes[0]
            if passed:
                changes = [until for until in changes if step <= until]
            if passed or (now != before and not last):
                found.append(self._stretch(rule, step, switched=now > 0 and not last))
            before = now
            if step > after:
                found[-1].add(
                    step=step,
                    scalars=dict(zip(names, map(float, one["scalars"]), strict=True)),
                    heads={name: one["heads"][metrics[name]] for name in READ},
                )
            if last:
                found.append(self._stretch(rule, step, switched=True))
        return [*found, self._stretch(rule, changes[-1] + 1)] if changes else found

    @property
    def all_parts(self) -> tuple[np.ndarray, ...]:
        """Every record, those of the run before first; not in one array, which may be too big."""
        return self.parts if self.before is None else (self.before, *self.parts)

    def until(self, step: int) -> Telemetry:
        """The records up to a step alone."""
        parts = tuple(part[: up_to(part, step)] for part in self.parts)
        return Telemetry(self.meta, parts, self.before)

    def since(self, step: int) -> Telemetry:
        """The records after a step alone; the others are not read."""
        before = self.before
        if before is not None:
            before = before[up_to(before, step) :]
        parts = tuple(part[up_to(part, step) :] for part in self.parts)
        return Telemetry(self.meta, parts, before if before is not None and len(before) else None)

    def _stretch(self, rule: Rule, step: int, *, switched: bool = False) -> History:
        """Of records from ``step`` on."""
        configured = attention_at(self.meta, step)
        return History(rule, compensated=switched or configured.startswith(EXACT_DELTA))


class RecordsError(ValueError):
    """Records that this version neither reads nor continues; the text says what to do."""

    exit_code = 2


def meta_of(folder: Path) -> dict[str, Any]:
    """``meta.json`` of records of this version.

    Raises:
        FileNotFoundError: there is none.
        RecordsError: it is damaged, or of another version.
    """
    file = folder / "meta.json"
    try:
        meta = json.loads(file.read_text())
    except ValueError as error:
        meta = error
    if isinstance(meta, dict) and not isinstance(meta.get("attention"), str):
        meta = f"attention is {meta.get('attention')!r:.40}, expected text"
    if not isinstance(meta, dict):
        raise RecordsError(
            f"{file}: does not describe the records beside it ({meta!s:.80}): the file is damaged; "
            f"put it right, or move {folder} away and the run begins new records"
        )
    odd = [] if meta.get("format") in READABLE else [f"format {meta.get('format')!r}"]
    for key, names in NAMES.items():
        found = meta.get(key)
        if found not in (names, OLDER.get(key, names)):
            there = found if isinstance(found, list) else []
            odd += [f"no {name}" for name in names if name not in there]
            odd += [f"an unknown {name!r:.40}" for name in there if name not in names]
            odd += [f"{key} in another order"] if set(map(str, there)) == set(names) else []
    if odd:
        raise RecordsError(
            f"{folder}: records of another version of the telemetry ({', '.join(odd)[:200]}); read "
            "them with the version that wrote them, which environment.json names, or move "
            f"{folder} away and the run begins new records"
        )
    return meta


def read(run_dir: Path | str, *, after: int = 0) -> Telemetry:
    """The telemetry of a run, also of one that is going on.

    Arrays lie in the file (memory-mapped), but `Telemetry.records` of several attempts.

    Args:
        run_dir: of the run.
        after: records of steps up to this one are left out, and not read.

    Raises:
        FileNotFoundError: nothing was recorded there.
        RecordsError: written by another version of this program, or damaged.
    """
    folder = Path(run_dir) / FOLDER
    meta = meta_of(folder)
    dtype, attempts = record_dtype(meta), meta.get("attempts", [FIRST_ATTEMPT])
    parts = story(records_of(folder / "records.bin", dtype), attempts, after=after)
    if "parent" in meta:
        step = int(meta["parent"]["step"])
        before = np.concatenate(
            [np.zeros(0, dtype), *(part[: up_to(part, step)] for part in parts)]
        )
        parts = tuple(part[up_to(part, step) :] for part in parts)
    else:  # format 1 kept the parent's records in a file of their own
        before = records_of(folder / "before.bin", dtype)
        before = before[up_to(before, after) :]
    return Telemetry(meta, tuple(filter(len, parts)), before if len(before) else None)


def records_of(file: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """The whole records of a file; none if there is no file."""
    count = file.stat().st_size // dtype.itemsize if file.exists() else 0
    if count == 0:
        return np.zeros(0, dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=(count,))

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
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.stability.names import (
    EXACT_DELTA,
    HEAD_METRICS,
    LAYER_METRICS,
    LEVELS,
    SCALARS,
)
from megatron_patch.stability.warning import NOWHERE, Point, Rule, Spot, Verdict, verdicts

FORMAT = 2
READABLE = (1, FORMAT)
"""1 is the same without attempts; its records that were repeated are cut off."""
FOLDER = "stability"
LAYOUT = ("layers", "heads")
"""What must agree in two meta.json whose records are put together."""
NAMES = {"scalars": list(SCALARS), "layer_metrics": list(LAYER_METRICS),
         "head_metrics": list(HEAD_METRICS)}  # fmt: skip
"""What a record of this version holds, in order."""
FIRST_ATTEMPT = (0, 0)
"""Of `story`, where meta.json names none."""
# Of these the smallest head is the one to look at; of the others the largest (by size).
SMALLEST = ("entropy",)


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


def make_meta(
    *, layers: int, heads: int, interval: int, rule: Rule, attention: str
) -> dict[str, Any]:
    """What meta.json says."""
    return {
        "format": FORMAT,
        "layers": layers,
        "heads": heads,
        "interval": interval,
        "attention": attention,
        **NAMES,
        "rule": {name: getattr(rule, name) for name in Rule.__dataclass_fields__},
    }


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
        stretch goes on over records at `ok` that span no more than the rule's `smooth_steps`.

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
            elif began - step > self.rule.smooth_steps:
                break
            if step <= until:
                break
        return began

    @property
    def rule(self) -> Rule:
        """The run's own.

        Raises:
            ValueError: its thresholds are not those of this version.
        """
        found = self.meta["rule"]
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


class History:
    """Records as the warning rule reads them; what it compares a new one with.

    Args:
        rule: of the run.
        compensated: whether that is what the run computes with, at all of these records.
    """

    def __init__(self, rule: Rule, *, compensated: bool = False) -> None:
        self.rule, self.compensated = rule, compensated
        self.points: list[Point] = []
        self._norms: list[tuple[int, dict[str, np.ndarray]]] = []

    def add(
        self, *, step: int, scalars: Mapping[str, float], heads: Mapping[str, np.ndarray]
    ) -> Point:
        """Take in a record; ``heads``: of those `READ` names, [layers, heads]."""
        kappa = heads["kappa"]
        point = Point(
            step=step,
            loss=scalars["loss_mean"],
            grad_norm=scalars["grad_norm_mean"],
            grad_norm_max=scalars["grad_norm_max"],
            bias=_largest(bias_to_signal(heads["used_error_mean"], kappa)),
            error=_largest(error_to_signal(heads["used_error_rms"], kappa)),
            logit=_largest(np.asarray(heads["max_logit"])),
            growth=self._growth(step, heads),
            compensated=self.compensated,
        )
        self.points.append(point)
        return point

    def forget(self, before: int) -> None:
        """Drop points of steps before this one: the rule does not look back that far."""
        self.points = [p for p in self.points if p.step >= before]

    def _growth(self, step: int, heads: Mapping[str, np.ndarray]) -> Spot:
        """Head growth of a new record."""
        if step <= self.rule.settle_steps:
            return NOWHERE
        now = {name: np.array(heads[name], np.float64) for name in NORMS if name in heads}
        old = [entry for entry in self._norms if entry[0] <= step - self.rule.head_steps]
        # Only the latest of the old ones is needed, now and later.
        self._norms = [*self._norms[max(0, len(old) - 1) :], (step, now)]
        if not old:
            return NOWHERE
        small = np.array(heads["max_logit"]) < self.rule.head_logit
        return head_growth(now, old[-1][1], without=small)


NORMS = ("wq_norm", "wk_norm")
READ = ("used_error_mean", "used_error_rms", "kappa", "max_logit", *NORMS)


def head_growth(
    now: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray], *, without: np.ndarray
) -> Spot:
    """The head whose W_Q or W_K grew most against the median head.

    ``without``, bool [layers, heads]: heads that do not count, though they do for the median.
    `NOWHERE` where nothing was measured (layers without a fused QKV projection) or nothing counts.
    """
    worst = NOWHERE
    for name in now:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = now[name] / before[name]
            ratio[~np.isfinite(ratio)] = np.nan
            if np.isnan(ratio).all():
                continue
            found = _largest(np.where(without, np.nan, ratio / np.nanmedian(ratio)))
        # `not >=`: also where there is none yet, and that is NaN.
        if math.isfinite(found.value) and not worst.value >= found.value:
            worst = found
    return worst


def _largest(values: np.ndarray) -> Spot:
    """Of [layers, heads]."""
    if not np.isfinite(values).any():
        return NOWHERE
    layer, head = (int(i) for i in np.unravel_index(np.nanargmax(values), values.shape))
    return Spot(float(values[layer, head]), layer, head)


def coherence(mean: np.ndarray, rms: np.ndarray) -> np.ndarray:
    """|mean| / RMS of the error: 1 when all rows of a head err alike, 1 / sqrt(rows) if they do
    not know of each other."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rms > 0, np.abs(mean) / rms, np.nan)


def common_share(common: np.ndarray, largest_logit: np.ndarray) -> np.ndarray:
    """How much of a head's largest logit all keys share, -1 to 1; NaN where there are no logits.

    A common part that is larger than the largest logit (which then is what is left of it) is all.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(common / np.maximum(np.abs(largest_logit), np.abs(common)))


def bias_to_signal(mean: np.ndarray, kappa: np.ndarray) -> np.ndarray:
    """|mean| x kappa: the coherent error of delta over RMS_P(dP - delta), which it disturbs."""
    return np.asarray(np.abs(mean) * kappa)


def error_to_signal(rms: np.ndarray, kappa: np.ndarray) -> np.ndarray:
    """RMS x kappa: the whole error of delta, coherent or not, over the same signal."""
    return np.asarray(rms * kappa)


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
    if not isinstance(meta, dict):
        raise RecordsError(
            f"{file}: does not describe the records beside it ({meta!s:.80}): the file is damaged; "
            f"put it right, or move {folder} away and the run begins new records"
        )
    odd = [] if meta.get("format") in READABLE else [f"format {meta.get('format')!r}"]
    for key, names in NAMES.items():
        found = meta.get(key)
        if found != names:
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


def largest(values: np.ndarray) -> np.ndarray:
    """Of [layers, heads], the head with the largest value in each layer; 0 where all are NaN."""
    return np.asarray(np.where(np.isnan(values), -np.inf, values).argmax(axis=1))


def worst(name: str, values: np.ndarray) -> np.ndarray:
    """Of a head metric [layers, heads], the head to look at in each layer: [layers], NaN if none.

    The smallest entropy, the error mean that is largest in size (with its sign), else the largest.
    """
    if name in SMALLEST:
        size = -values
    else:
        signed = (values < 0).any(axis=1, keepdims=True)
        size = np.where(signed, np.abs(values), values)
    heads = largest(size)
    found = np.take_along_axis(values, heads[:, None], axis=1)[:, 0].astype(np.float32)
    return np.where(np.isfinite(values).any(axis=1), found, np.float32(np.nan))

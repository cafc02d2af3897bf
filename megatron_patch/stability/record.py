"""The telemetry of a run on disk: ``<run_dir>/stability/``. numpy only, so any reader can use it.

meta.json       shapes and names
records.bin     fixed-size little-endian records: int64 step, float64 SCALARS, float32
                [layers] x LAYER_METRICS, float32 [layers, heads] x HEAD_METRICS
layers.csv      step, layer, and per metric its worst head: for people
abandoned.bin   records of steps that a resumed run repeats
before.bin      of a run that began from another one's checkpoint: what the rule looks back on

A record is appended and flushed when its step has been read back, so files can be read while the
run goes on; a record that a crash tore is ignored by readers and cut off by the next writer. What
could not be written is not there: steps ascend, and may lie further apart than the interval.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_patch.stability.names import (
    COMPENSATED,
    HEAD_METRICS,
    LAYER_METRICS,
    LEVELS,
    SCALARS,
)
from megatron_patch.stability.warning import NOWHERE, Point, Rule, Spot, Verdict, verdicts

FORMAT = 1
FOLDER = "stability"
MODEL = ("format", "layers", "heads")
"""What must agree in two meta.json whose records are put together."""
PARTS = {"scalars": "scalars", "layers": "layer_metrics", "heads": "head_metrics"}
"""Names of what a part of a record holds, by part."""
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


def relaid(
    records: np.ndarray, old: Mapping[str, Any], new: Mapping[str, Any]
) -> np.ndarray | None:
    """Records of meta.json ``old`` as ``new`` describes them; NaN in what was not measured then.

    None if they are of another model or format, or hold something that ``new`` has no place for.
    """
    if not continues(old, new):
        return None
    if same_layout(old, new):
        return records
    found = np.zeros(len(records), record_dtype(new))
    found["step"] = records["step"]
    for part, names in PARTS.items():
        found[part] = math.nan
        for i, name in enumerate(old[names]):
            found[part][:, new[names].index(name)] = records[part][:, i]
    return found


def continues(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether ``new`` has a place for everything in records of meta.json ``old``."""
    if any(old.get(key) != new[key] for key in MODEL):
        return False
    return not any(set(old[names]) - set(new[names]) for names in PARTS.values())


def up_to(records: np.ndarray, step: int) -> int:
    """How many records are of steps up to this one; in order of steps, and few of them are read."""
    return bisect.bisect_right(range(len(records)), step, key=lambda i: int(records[i]["step"]))


def same_layout(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether records of two meta.json of one model lie alike."""
    return all(old[names] == new[names] for names in PARTS.values())


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
        "head_metrics": list(HEAD_METRICS),
        "layer_metrics": list(LAYER_METRICS),
        "scalars": list(SCALARS),
        "rule": {name: getattr(rule, name) for name in Rule.__dataclass_fields__},
    }


def attention_at(meta: Mapping[str, Any], step: int) -> str:
    """Backend and stabilizer of a step: resumes may change them (``earlier``: until which step)."""
    names = (name for until, name in meta.get("earlier", ()) if step <= until)
    return str(next(names, meta["attention"]))


@dataclass(frozen=True)  # no slots: `judged` is kept
class Telemetry:
    """Everything recorded so far."""

    meta: dict[str, Any]
    records: np.ndarray
    before: np.ndarray | None = None
    """Records of the run that this one continues, up to the checkpoint it began from."""

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
        records = self.records if len(self.records) or self.before is None else self.before
        if "switched" not in names or not len(records):  # earlier versions did not write it
            return None
        switched = records[-1]["scalars"][names.index("switched")]
        return int(switched) if switched > 0 else None

    def signs_began(self, danger: int, *, until: int = 0) -> int:
        """Step of the first record of the stretch at `watch` or worse that led to this danger.

        What the run said at the time counts, so it is the same after a restart. Signs flicker: a
        stretch goes on over records at `ok` that span no more than the rule's `smooth_steps`.

        Args:
            danger: step of the record at danger, which need not be written yet.
            until: how far back it matters; records of weeks need not be read.
        """
        names = self.meta["scalars"]
        if "level" not in names:  # earlier versions did not write it
            return danger
        level, began = names.index("level"), danger
        for at in range(up_to(self.records, danger - 1) - 1, -1, -1):
            record = self.records[at]
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
            ValueError: it has a threshold that this version does not know.
        """
        told = self.meta["rule"]
        if not isinstance(told, dict):
            raise ValueError(f"meta.json: rule holds no object but a {type(told).__name__}")
        unknown = sorted(set(told) - set(Rule.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"meta.json: the early warning's rule has {', '.join(unknown)}, which this version "
                f"does not know (it knows {', '.join(Rule.__dataclass_fields__)}); read it with "
                "the version that wrote it"
            )
        # Before these keys a rule counted records, however short, and a norm was judged alone.
        before: dict[str, Any] = {"smooth_steps": 0, "confirm_steps": 0, "norm_needs_head": False}
        return Rule(**before | told)

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
        at = names.index("switched") if "switched" in names else None
        metrics = {name: i for i, name in enumerate(self.meta["head_metrics"])}
        for one in self._each():
            step = int(one["step"])
            now = 0 if at is None else int(np.nan_to_num(one["scalars"][at]))
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

    def _each(self) -> Iterator[Any]:
        """Every record, those of the run before first; never in one array, which may be too big."""
        for part in (self.before, self.records):
            if part is not None:
                yield from part

    def until(self, step: int) -> Telemetry:
        """The records up to a step alone."""
        return Telemetry(self.meta, self.records[: up_to(self.records, step)], self.before)

    def since(self, step: int) -> Telemetry:
        """The records after a step alone; the others are not read."""
        before = self.before
        if before is not None:
            before = before[up_to(before, step) :]
        return Telemetry(
            self.meta,
            self.records[up_to(self.records, step) :],
            before if before is not None and len(before) else None,
        )

    def _stretch(self, rule: Rule, step: int, *, switched: bool = False) -> History:
        """Of records from ``step`` on."""
        told = attention_at(self.meta, step)
        return History(rule, compensated=switched or told == COMPENSATED)


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


def read(run_dir: Path | str) -> Telemetry:
    """The telemetry of a run, also of one that is going on.

    Arrays lie in the file (memory-mapped). A resume cuts off what it repeats: read anew after it,
    touching that part through old arrays ends the process (SIGBUS).

    Raises:
        FileNotFoundError: nothing was recorded there.
        ValueError: written by another version of this program, or not by it.
    """
    folder = Path(run_dir) / FOLDER
    meta = json.loads((folder / "meta.json").read_text())
    if not isinstance(meta, dict):
        raise ValueError(
            f"{folder / 'meta.json'}: holds no JSON object but a {type(meta).__name__}"
        )
    if meta.get("format") != FORMAT:
        raise ValueError(
            f"{folder}: telemetry format {meta.get('format')!r}, this version reads {FORMAT}"
        )
    dtype = record_dtype(meta)
    before = records_of(folder / "before.bin", dtype)
    return Telemetry(
        meta, records_of(folder / "records.bin", dtype), before if len(before) else None
    )


def records_of(file: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """The whole records of a file; none if there is no file.

    Where power was lost a file may end in zeros. That is no record either: steps count from 1.
    """
    count = file.stat().st_size // dtype.itemsize if file.exists() else 0
    if count == 0:
        return np.zeros(0, dtype)
    found = np.memmap(file, dtype=dtype, mode="r", shape=(count,))
    while count and found[count - 1]["step"] == 0:
        count -= 1
    return found[:count]


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

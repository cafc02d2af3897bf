"""What a run directory says, gathered for the page. Reads files only; needs no torch.

A file that is missing, empty, or torn by a crash leaves its part out; nothing here fails because a
run is young, was killed, or was written by an older version.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.runtime.records import read_rows

if TYPE_CHECKING:
    from megatron_patch.stability.record import Telemetry

LOG_TAIL_BYTES = 1 << 18
MAX_EVENTS = 60
NAMED = 4
"""Runs of an experiment that a message names."""
EVENT_FILES = ("events.jsonl", "spikes.jsonl", "crashes.jsonl")
_EVENT = re.compile(
    r"^(?P<utc>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?P<text>.*"
    r"(?:\bwarning\b|\bstopped\b|\bresuming\b|\bfinished:|\bswitch|\bdanger\b|\bstraggl"
    r"|\bfault\b|\bnot finite\b|\bfailed\b|\babandoned\b|\bconfiguration changed\b).*)$",
    re.IGNORECASE,
)

_START = re.compile(r"^\S+ \S+ (?:resuming after step|no checkpoint: starting)")
"""What every attempt says before its first step."""

_NOT_FINITE = re.compile(r"stopped by NonFiniteError: step (?P<step>\d+): (?P<what>loss|gradients)")
"""How `training.finite` begins the message of the step that was not taken."""


class ReportError(ValueError):
    """There is no run where a report was asked for."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, for the list of events."""

    when: str
    text: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A step whose loss or gradients were not finite, where the run ended before the update."""

    step: int
    what: str
    """``loss`` or ``gradients``."""

    def __str__(self) -> str:
        verb = "is" if self.what == "loss" else "are"
        return f"step {self.step:,}, whose {self.what} {verb} not finite"


@dataclass(slots=True)
class RunFacts:
    """Everything the page shows."""

    path: Path
    name: str
    state: str
    """finished, running, stopped, guarded, failed, non-finite or interrupted."""
    why: str
    """The state in a sentence."""
    broken: Broken | None = None
    """The step that ended the run; no row of metrics.csv has it."""
    columns: dict[str, list[float]] = field(default_factory=dict)
    """metrics.csv; NaN where a cell is empty."""
    config: list[tuple[str, str, str]] = field(default_factory=list)
    """(key, value, origin)."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Environment of every process that trained here."""
    events: list[Event] = field(default_factory=list)
    telemetry: Telemetry | None = None
    telemetry_problem: str = ""
    experiment: dict[str, Any] = field(default_factory=dict)
    """experiment.json of a cell."""
    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    def value(self, key: str, default: str = "") -> str:
        """A configured value as text."""
        return next((v for k, v, _ in self.config if k == key), default)

    def column(self, name: str) -> list[float]:
        """A column of metrics.csv, as long as the steps."""
        return self.columns.get(name, [math.nan] * len(self.steps))

    @property
    def steps(self) -> list[float]:
        return self.columns.get("step", [])


def collect(run_dir: Path) -> RunFacts:
    """Read a run directory.

    Raises:
        ReportError: it is no run directory.
    """
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir}: no such directory; give the directory of a run")
    if not _is_run(run_dir):
        text = f"{run_dir} is no run directory: it has no config.yaml, metrics.csv or train.log"
        raise ReportError(text + _runs_below(run_dir))
    facts = RunFacts(path=run_dir, name=run_dir.resolve().name, state="", why="")
    facts.columns = read_metrics(run_dir / "metrics.csv")
    facts.config = list(_config(run_dir, facts.notes))
    facts.name = facts.value("name", facts.name)
    environment = _json(run_dir / "environment.json", facts.notes)
    facts.attempts = _attempts(environment, facts.notes)
    facts.experiment = _json(run_dir / "experiment.json", facts.notes)
    log = _tail(run_dir / "train.log")
    facts.events = list(_logged(log))[-MAX_EVENTS:] + list(_recorded(run_dir, facts.notes))
    facts.state, facts.why = _state(run_dir, facts, log)
    _telemetry(run_dir, facts)
    return facts


def _is_run(folder: Path) -> bool:
    return any(os.path.exists(folder / n) for n in ("config.yaml", "metrics.csv", "train.log"))


def _runs_below(folder: Path) -> str:
    """What to give instead of the directory of an experiment, or of runs; empty if there is none.

    An experiment keeps a run per cell in runs/.
    """
    for place in (folder / "runs", folder):
        try:
            found = sorted(one for one in place.iterdir() if _is_run(one))
        except OSError:
            continue
        if found:
            names = ", ".join(one.name for one in found[:NAMED])
            names += f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
            return f"; runs are in {place}: {names}; give one of them, e.g. {found[0]}"
    return "; give the directory of a run"


def read_metrics(path: Path) -> dict[str, list[float]]:
    """Columns of metrics.csv as numbers; NaN where a cell is empty."""
    columns: dict[str, list[float]] = {}
    for row in read_rows(path):
        for name, text in row.items():
            if name not in ("attempt", "extra"):
                columns.setdefault(name, []).append(_number(text))
    return columns


def _number(value: str | None) -> float:
    try:
        return float(value) if value else math.nan
    except ValueError:
        return math.nan


def _config(run_dir: Path, notes: list[str]) -> Iterator[tuple[str, str, str]]:
    """(key, value, origin) of the resolved configuration."""
    import yaml

    try:
        # BaseLoader makes text of every scalar and nothing else of any tag.
        text = (run_dir / "config.yaml").read_text(errors="replace")
        values = dict(_flat(yaml.load(text, Loader=yaml.BaseLoader)))
    except FileNotFoundError:
        return
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        notes.append(f"config.yaml could not be read: {type(error).__name__}")
        return
    origins: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        read = yaml.load(
            (run_dir / "origins.yaml").read_text(errors="replace"), Loader=yaml.BaseLoader
        )
        origins = {str(k): str(v) for k, v in read.items()} if isinstance(read, dict) else {}
    for key, value in values.items():
        yield key, value, origins.get(key, "")


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, text) of every scalar."""
    if isinstance(node, (dict, list)):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, str(node)


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        notes.append(f"{path.name} could not be read")
        return {}
    if not isinstance(tree, dict):
        notes.append(f"{path.name} holds no JSON object but a {type(tree).__name__}")
        return {}
    return tree


def _attempts(environment: dict[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    """The attempts of environment.json that are told in a way that can be shown."""
    attempts = environment.get("attempts", [])
    if not isinstance(attempts, list):
        notes.append(f"environment.json: attempts is no list but a {type(attempts).__name__}")
        return []
    found = [a for a in attempts if isinstance(a, dict)]
    if len(found) < len(attempts):
        notes.append(f"environment.json: {len(attempts) - len(found)} attempt(s) are no objects")
    return found


def _tail(path: Path) -> str:
    """The end of a log."""
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        skipped = path.stat().st_size - LOG_TAIL_BYTES
        stream.seek(max(0, skipped))
        if skipped > 0:
            stream.readline()  # most likely the rest of a line
        return stream.read().decode(errors="replace")


def _logged(log: str) -> Iterator[Event]:
    """Lines of train.log that say that something happened."""
    for line in log.splitlines():
        found = _EVENT.match(line[:2000])
        if found:
            yield Event(found["utc"], found["text"][:500])


def _recorded(run_dir: Path, notes: list[str]) -> Iterator[Event]:
    """What the rooms of faults and others left: a line an event, whatever its fields are called."""
    for name in EVENT_FILES:
        path = run_dir / name
        if not path.is_file():
            continue
        torn = 0
        for line in _tail(path).splitlines()[-MAX_EVENTS:]:
            try:
                entry = json.loads(line)
                when = str(entry.get("utc", entry.get("time", "")))
                said = [f"{k} {v}" for k, v in entry.items() if _worth_saying(k, v)]
            except (ValueError, AttributeError, RecursionError):
                torn += 1
                continue
            yield Event(when[:40], f"{path.stem}: {', '.join(said)}"[:500])
        if torn:
            notes.append(f"{name}: {torn} line(s) could not be read")
    yield from _stragglers(run_dir / "stragglers.csv")


def _worth_saying(key: str, value: object) -> bool:
    """Short scalars; not the time, which stands beside them."""
    scalar = isinstance(value, (str, int, float)) and len(str(value)) <= 200
    return scalar and key not in ("utc", "time") and value != ""


def _stragglers(path: Path) -> Iterator[Event]:
    """Comparisons of ranks that found one slow."""
    if not path.is_file():
        return
    with path.open(newline="", errors="replace") as lines:
        rows = list(csv.DictReader(line.replace("\0", "") for line in lines))
    slow = [row for row in rows if (row.get("stragglers") or "").strip()]
    for row in slow[-MAX_EVENTS:]:
        figures = [f"{k} {row[k]}" for k in ("what", "stragglers", "median_seconds") if row.get(k)]
        figures += [f"{k} {row[k]}" for k in ("slowest_rank", "slowest_seconds") if row.get(k)]
        yield Event(f"step {row.get('step')}"[:40], f"stragglers: {', '.join(figures)}"[:500])


def _state(run_dir: Path, facts: RunFacts, log: str) -> tuple[str, str]:
    """How the run stands, and a sentence about it."""
    total = facts.value("training.train_steps", "?")
    last = f"{facts.steps[-1]:,.0f}" if facts.steps else "0"
    finished = _json(run_dir / "FINISHED", facts.notes)
    if _locked(run_dir):
        return "running", f"running now; step {last} of {total} is recorded"
    if finished:
        return "finished", f"finished after step {finished.get('step', last)}"
    end = _end(log)
    if "stopped by NonFiniteError" in end:
        facts.broken = _broken(end)
        where = facts.broken or f"a loss or gradient that is not finite, after step {last}"
        return "non-finite", f"stopped at {where}"
    if "stopped by StabilityStop" in end:
        said = end.partition("stopped by StabilityStop: ")[2]
        return "guarded", f"stopped by the stability guard (exit code 5): {said[:400] or '?'}"
    if "stopped gracefully" in end:
        return "stopped", f"stopped after step {last} of {total}; the same command continues it"
    if "stopped by " in end:
        what = end.partition("stopped by ")[2]
        return "failed", f"ended by an error after step {last}: {what[:300]}"
    return "interrupted", f"ended without a word after step {last} of {total}: killed, or cut off"


def _end(log: str) -> str:
    """The line in which the last attempt says that it stopped; empty if it does not."""
    found = ""
    for line in log.splitlines():
        if _START.match(line):
            found = ""  # that was an earlier attempt's
        elif "stopped" in line:
            found = line
    return found


def _broken(end: str) -> Broken | None:
    """Where a run ended that was not finite; None if the line does not say it in our words."""
    found = _NOT_FINITE.search(end)
    return Broken(int(found["step"]), found["what"]) if found else None


def _locked(run_dir: Path) -> bool:
    """Whether a training process holds the directory (on this file system)."""
    try:
        with (run_dir / ".lock").open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _telemetry(run_dir: Path, facts: RunFacts) -> None:
    from megatron_patch.stability import record

    try:
        found = record.read(run_dir)
        judged = found.judged  # kept for the page; here because it reads the rest of meta.json
        steps = found.steps
        if len(steps) and not (steps[0] > 0 and (steps[1:] > steps[:-1]).all()):
            raise ValueError("the steps of records.bin do not rise: it is damaged")
    except FileNotFoundError:
        facts.telemetry_problem = _nothing_written(facts)
    except (OSError, ValueError) as error:
        facts.telemetry_problem = f"The stability telemetry could not be read: {error}"
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        facts.telemetry_problem = (
            "The stability telemetry could not be read: meta.json is not as this version writes it "
            f"({type(error).__name__}: {error})"
        )
    else:
        if judged:
            facts.telemetry = found
        else:
            facts.telemetry_problem = _no_record(facts, found.meta.get("interval"))


def _nothing_written(facts: RunFacts) -> str:
    """Why there is no telemetry at all."""
    if facts.value("stability.enabled") != "true":
        return "This run recorded no stability telemetry (stability.enabled)."
    return (
        "There is no stability telemetry, though stability.enabled is true: it begins before the "
        f"first step, and {_steps_made(facts)}."
    )


def _no_record(facts: RunFacts, interval: object) -> str:
    """Why the telemetry has begun and holds nothing."""
    ended = facts.state != "running"
    text = f"The stability telemetry holds no record{'' if ended else ' yet'}"
    if not isinstance(interval, int) or interval < 1:
        return f"{text}; {_steps_made(facts)}."
    text += (
        f": one is made every {interval:,} steps (stability.interval), at multiples of that, and "
        f"{_steps_made(facts)}."
    )
    first = -(-int(facts.steps[0]) // interval) * interval if facts.steps else 0
    if not ended or not 0 < first <= facts.steps[-1]:
        return text
    return (
        f"{text} That of step {first:,} is lost: it is written after the step that follows, and an "
        "error, a kill or a full disk prevents that."
    )


def _steps_made(facts: RunFacts) -> str:
    if not facts.steps:
        return "metrics.csv has no step"
    first, last = facts.steps[0], facts.steps[-1]
    if first == last:
        return f"metrics.csv has step {last:,.0f} alone"
    return f"metrics.csv has steps {first:,.0f} to {last:,.0f}"

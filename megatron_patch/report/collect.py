"""Reads a run directory for the report; needs no torch.

A file that is missing, empty, or torn by a crash leaves its part out; nothing here fails because a
run is young, was killed, or was written by an older version.
"""

from __future__ import annotations

import fcntl
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.runtime.records import read_rows
from megatron_patch.schema.effective import flatten

if TYPE_CHECKING:
    from megatron_patch.stability.record import Telemetry

LOG_TAIL_BYTES = 1 << 18
MAX_EVENTS = 60
EVENT_FILES = ("events.jsonl", "spikes.jsonl", "crashes.jsonl")
_EVENT = re.compile(
    r"^(?P<utc>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?P<text>.*"
    r"(?:\bwarning\b|\bstopped\b|\bresuming\b|\bfinished:|\bswitch|\bdanger\b|\bstraggl"
    r"|\bfault\b|\bnot finite\b|\bfailed\b|\babandoned\b|\bconfiguration changed\b).*)$",
    re.IGNORECASE,
)
_START = re.compile(r"^\S+ \S+ (?:resuming after step|no checkpoint: starting)")
"""What every attempt logs before its first step."""
_NOT_FINITE = re.compile(r"stopped by NonFiniteError: step (?P<step>\d+): (?P<what>loss|gradients)")
"""How `training.finite` begins the message of the step that was not taken."""


class ReportError(ValueError):
    """There is no run where a report was asked for, or the report cannot be written."""

    exit_code = 2


@dataclass(slots=True)
class RunFacts:
    """Everything that the page shows."""

    name: str
    state: str = ""
    """finished, running, stopped, guarded, failed, non-finite or interrupted."""
    why: str = ""
    """The state in a sentence."""
    columns: dict[str, list[float]] = field(default_factory=dict)
    """metrics.csv; NaN where a cell is empty."""
    config: list[tuple[str, str, str]] = field(default_factory=list)
    """(key, value, origin)."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Environment of every process that trained here."""
    events: list[tuple[str, str]] = field(default_factory=list)
    """(when, what)."""
    telemetry: Telemetry | None = None
    telemetry_problem: str = ""
    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    def value(self, key: str, default: str = "") -> str:
        return next((v for k, v, _ in self.config if k == key), default)

    def column(self, name: str) -> list[float]:
        """A column of metrics.csv, as long as the steps."""
        return self.columns.get(name, [math.nan] * len(self.steps))

    def finite(self, name: str) -> list[float]:
        return [v for v in self.column(name) if math.isfinite(v)]

    @property
    def steps(self) -> list[float]:
        return self.columns.get("step", [])


def collect(run_dir: Path) -> RunFacts:
    """Read a run directory.

    Raises ReportError: it is no run directory.
    """
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir}: no such directory; give the directory of a run")
    if not _is_run(run_dir):
        text = f"{run_dir} is no run directory: it has no config.yaml, metrics.csv or train.log"
        raise ReportError(f"{text}; {_runs_below(run_dir)}")
    facts = RunFacts(name=run_dir.resolve().name)
    facts.columns = read_metrics(run_dir / "metrics.csv")
    origins = dict(_yaml(run_dir / "origins.yaml", []))
    found = _yaml(run_dir / "config.yaml", facts.notes)
    facts.config = [(key, value, origins.get(key, "")) for key, value in found]
    facts.name = facts.value("name", facts.name)
    facts.attempts = _attempts(run_dir, facts.notes)
    log = _tail(run_dir / "train.log")
    logged = [event for line in log.splitlines() if (event := _EVENT.match(line[:2000]))]
    facts.events = [(event["utc"], event["text"][:500]) for event in logged[-MAX_EVENTS:]]
    facts.events += _recorded(run_dir, facts.notes)
    facts.state, facts.why = _state(run_dir, facts, log)
    _read_telemetry(run_dir, facts)
    return facts


def _is_run(folder: Path) -> bool:
    """Of the trainer, or of another loop that a monitor has watched."""
    names = ("config.yaml", "metrics.csv", "train.log", "stability/meta.json")
    return any((folder / name).exists() for name in names)


def _runs_below(folder: Path) -> str:
    """What to give instead of a directory of runs, or of an experiment (its runs are in runs/)."""
    for place in (folder / "runs", folder):
        found = sorted(filter(_is_run, place.iterdir())) if place.is_dir() else []
        if found:
            names = ", ".join(one.name for one in found[:4])
            names += f" and {len(found) - 4} more" if len(found) > 4 else ""
            return f"runs are in {place}: {names}; give one of them, e.g. {found[0]}"
    return "give the directory of a run"


def read_metrics(path: Path) -> dict[str, list[float]]:
    """Columns of metrics.csv as numbers, NaN where a cell is empty; {} without a row."""
    columns: dict[str, list[float]] = {}
    for row in read_rows(path):
        for name, text in row.items():
            if name not in ("attempt", "extra"):
                columns.setdefault(name, []).append(_number(text))
    return columns


def _number(value: str) -> float:
    try:
        return float(value) if value else math.nan
    except ValueError:
        return math.nan


def _yaml(path: Path, notes: list[str]) -> list[tuple[str, str]]:
    """(dotted path, text) of every scalar of a file."""
    import yaml

    try:
        # BaseLoader makes text of every scalar and nothing else of any tag.
        tree = flatten(yaml.load(path.read_text(errors="replace"), Loader=yaml.BaseLoader))
        return [(key, str(v)) for key, v in tree.items() if key and v not in ({}, [])]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{path.name} could not be read: {type(error).__name__}")
    return []


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


def _attempts(run_dir: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The attempts of environment.json that are objects."""
    attempts = _json(run_dir / "environment.json", notes).get("attempts", [])
    if not isinstance(attempts, list):
        notes.append(f"environment.json: attempts is no list but a {type(attempts).__name__}")
        return []
    found = [a for a in attempts if isinstance(a, dict)]
    if len(found) < len(attempts):
        notes.append(f"environment.json: {len(attempts) - len(found)} attempt(s) are no objects")
    return found


def _tail(path: Path) -> str:
    """Whole lines at the end of a log."""
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        skipped = path.stat().st_size - LOG_TAIL_BYTES
        stream.seek(max(0, skipped))
        if skipped > 0:
            stream.readline()  # most likely the rest of a line
        return stream.read().decode(errors="replace")


def _recorded(run_dir: Path, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Events of the fault watchers and others: a line of JSON each, whatever its fields are."""
    for path in [run_dir / name for name in EVENT_FILES]:
        torn = 0
        for line in _tail(path).splitlines()[-MAX_EVENTS:]:
            try:
                entry = json.loads(line)
                when = str(entry.get("utc", entry.get("time", "")))
                figures = [f"{k} {v}" for k, v in entry.items() if _is_shown(k, v)]
            except (ValueError, AttributeError, RecursionError):
                torn += 1
                continue
            yield when[:40], f"{path.stem}: {', '.join(figures)}"[:500]
        if torn:
            notes.append(f"{path.name}: {torn} line(s) could not be read")


def _is_shown(key: str, value: object) -> bool:
    """Short scalars; not the time, which stands beside them."""
    scalar = isinstance(value, (str, int, float)) and len(str(value)) <= 200
    return scalar and key not in ("utc", "time") and value != ""


def _state(run_dir: Path, facts: RunFacts, log: str) -> tuple[str, str]:
    """How the run stands, and a sentence about it."""
    last = f"{facts.steps[-1]:,.0f}" if facts.steps else "0"
    done = f"step {last} of {facts.value('training.train_steps', '?')}"
    finished = _json(run_dir / "FINISHED", facts.notes)
    if _is_locked(run_dir):
        return "running", f"running now; {done} is recorded"
    if finished:
        return "finished", f"finished after step {finished.get('step', last)}"
    end = ""  # the line in which the last attempt says that it stopped
    for line in log.splitlines():
        end = "" if _START.match(line) else line if "stopped" in line else end
    reason = end.partition("stopped by ")[2]
    if reason.startswith("NonFiniteError"):
        return "non-finite", f"stopped at {_broken_step(end, last)}"
    if reason.startswith("StabilityStop"):
        text = reason.removeprefix("StabilityStop: ")[:400]
        return "guarded", f"stopped by the stability guard (exit code 5): {text}"
    if "stopped gracefully" in end:
        return "stopped", f"stopped after {done}; the same command continues it"
    if reason:
        return "failed", f"ended by an error after step {last}: {reason[:300]}"
    return "interrupted", f"ended without a word after {done}: killed, or cut off"


def _broken_step(end: str, last: str) -> str:
    """The step that ended the run, which no row of metrics.csv has."""
    found = _NOT_FINITE.search(end)
    if found is None:
        return f"a loss or gradient that is not finite, after step {last}"
    verb = "is" if found["what"] == "loss" else "are"
    return f"step {int(found['step']):,}, whose {found['what']} {verb} not finite"


def _is_locked(run_dir: Path) -> bool:
    """Whether a training process holds the directory (on this file system)."""
    try:
        with (run_dir / ".lock").open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read_telemetry(run_dir: Path, facts: RunFacts) -> None:
    from megatron_patch.stability import record

    unreadable = "The stability telemetry could not be read: "
    try:
        found = record.read(run_dir)
        judged = found.judged  # kept for the page; here because it reads the rest of meta.json
        steps = found.steps
        if len(steps) and not (steps[0] > 0 and (steps[1:] > steps[:-1]).all()):
            raise ValueError("the steps of records.bin do not rise: it is damaged")
    except FileNotFoundError:
        enabled = facts.value("stability.enabled") == "true"
        facts.telemetry_problem = (
            "There is no stability telemetry, though stability.enabled is true: it begins before "
            f"the first step, and {_steps_made(facts)}."
            if enabled
            else "This run recorded no stability telemetry (stability.enabled)."
        )
    except (OSError, ValueError) as error:
        facts.telemetry_problem = f"{unreadable}{error}"
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        text = f"meta.json is not as this version writes it ({type(error).__name__}: {error})"
        facts.telemetry_problem = unreadable + text
    else:
        facts.telemetry = found if judged else None
        if not judged:
            yet = " yet" if facts.state == "running" else ""
            facts.telemetry_problem = (
                f"The stability telemetry holds no record{yet}: one is made every "
                f"{found.meta.get('interval', '?')} steps (stability.interval), and written after "
                f"the step that follows; {_steps_made(facts)}."
            )


def _steps_made(facts: RunFacts) -> str:
    if not facts.steps:
        return "metrics.csv has no step"
    return f"metrics.csv has steps {facts.steps[0]:,.0f} to {facts.steps[-1]:,.0f}"

"""The directory of an experiment: what was fixed, what each run has come to.

``<out>/``: experiment.json (the protocol as it was first run), states.json (one entry a run), runs/
(ordinary run directories), logs/, results/. A run's own directory says whether it is finished and
where it goes on; states.json adds exit codes and reasons.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol import Experiment, ExperimentError, Run
from verdict import Row, Verdict, judge, read_rows

from megatron_patch.runtime.files import write_whole

WAITING, PAUSED, FINISHED = "waiting", "paused", "finished"
EXPLODED, NONFINITE, GUARDED = "exploded", "non-finite", "stopped by its guard"
FAILED, REFUSED = "failed", "refused"
ENDED = (FINISHED, EXPLODED, NONFINITE, GUARDED)
"""States of a run that has shown what it will show; it is not started again."""
CHECKPOINT = re.compile(r"step_(\d{6,15})\.attempt-\d{1,6}")
OF_THE_DAY = (
    *(r"data\.[\w.\[\]]*path", r"training\.micro_batch_size", r"stability\.capture\w*"),
    r"checkpoint\.async_save",
)
"""Keys that may differ between two calls: where the data lie, how a batch is cut, captures."""


@dataclass(slots=True)
class State:
    """What a run has come to."""

    state: str = WAITING
    reason: str = ""
    """One line: why it stopped, where that says more than the state."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """One entry a process: utc, seconds, exit code, first and last step, GPUs."""
    origin: dict[str, Any] | None = None
    """Of a run that continues another one: base, its event, and the step it started from."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint a continued run starts from."""

    base: str
    event: int
    """First window of the base with large gradients."""
    step: int
    path: Path


class Directory:
    """One experiment's directory, locked while this object is open."""

    def __init__(self, path: Path, experiment: Experiment, say: Callable[[str], None]) -> None:
        """Take the directory.

        Raises:
            ExperimentError: another process uses it, it holds another protocol or is damaged, or it
                cannot be written.
        """
        self.path, self.experiment = path, experiment
        self.rule = experiment.protocol.explosion
        self._rows: dict[str, tuple[tuple[int, int, int], list[Row]]] = {}
        if (path / "train.log").exists():
            raise ExperimentError(f"--out {path}: is the directory of a run; name one of its own")
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            text = f"cannot be written ({error.strerror}); name a directory that you can write"
            raise ExperimentError(f"--out {path}: {text}") from error
        self._lock = (path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ExperimentError(
                f"{path}: another process runs this experiment; wait, or name another --out"
            ) from None
        except OSError as error:
            say(f"warning: {path}: no locks here ({error.strerror}); use it from one process only")
        try:
            self._claim()
            self.states = self._read_states()
            self._catch_up()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others have the directory."""
        self._lock.close()

    def run_dir(self, run: Run) -> Path:
        """The trainer's run directory."""
        return self.path / "runs" / run.id

    def log(self, run: Run) -> Path:
        """Console output of the run's processes."""
        return self.path / "logs" / f"{run.id}.txt"

    def rows(self, run: Run) -> list[Row]:
        """Logged steps of a run; read again only when the file has changed."""
        path = self.run_dir(run) / "metrics.csv"
        try:
            found = path.stat()
        except FileNotFoundError:
            return []
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        known = self._rows.get(run.id)
        if known is None or known[0] != stamp:
            known = self._rows[run.id] = (stamp, read_rows(path))
        return known[1]

    def last_step(self, run: Run) -> int:
        """Last logged step of a run, 0 without any."""
        rows = self.rows(run)
        return int(rows[-1]["step"]) if rows else 0

    def checkpoint(self, run: Run, *, at_most: int | None = None) -> tuple[int, Path] | None:
        """(step, directory) of the newest complete checkpoint, of at most a step."""
        found = []
        for path in (self.run_dir(run) / "checkpoints").glob("step_*"):
            match = CHECKPOINT.fullmatch(path.name)
            if match and path.is_dir() and (at_most is None or int(match[1]) <= at_most):
                found.append((int(match[1]), path))
        return max(found, default=None)

    def reached(self, run: Run) -> int:
        """Step from which the run can go on; a killed one has logged steps no checkpoint holds."""
        kept = self.checkpoint(run)
        return 0 if kept is None else min(kept[0], self.last_step(run))

    def verdict(self, run: Run) -> Verdict:
        """What the run's figures say so far."""
        return judge(self.rows(run), self.rule)

    def ended(self, run: Run) -> bool:
        """Whether a run has shown what it will show."""
        return self.states[run.id].state in ENDED

    def end(self, run: Run, *, limit: int) -> int:
        """Step at which a run is complete: ``limit``, or ``follow`` steps after the event.

        That is its base's event, or its own if it continues none.
        """
        if run.cell.follow is None:
            return limit
        known = self.states[run.id].origin
        event = known["event"] if known else None
        if run.base is None:
            event = self.verdict(run).first_large_gradient
        return limit if event is None else min(limit, event + run.cell.follow)

    def followed(self, run: Run) -> str:
        """How a run with ``follow`` came to its end, a checkpoint to show for it; else ""."""
        end = self.end(run, limit=self.experiment.protocol.steps)
        whole = run.cell.follow is not None and self.reached(run) >= end
        return f"{run.cell.follow:,} steps after the event" if whole else ""

    def origin(self, run: Run) -> Origin | None:
        """The checkpoint a continued run starts from; None while its base is not so far.

        Nobody knows beforehand when the event comes. The base may still be running then: that it
        goes on to explode is what the continued run is compared with.
        """
        assert run.base is not None
        base, known = self.experiment.by_id(run.base), self.states[run.id].origin
        if known is not None and self.reached(run):
            # It has a checkpoint of its own: the base's later steps change nothing.
            path = self.checkpoint(base, at_most=known["step"])
            same = path is not None and path[0] == known["step"]
            return Origin(base.id, known["event"], *path) if path and same else None
        event = self.verdict(base).first_large_gradient
        if event is None:
            return None
        wanted = event - run.cell.before
        path = self.checkpoint(base, at_most=wanted)
        # A step is logged before its checkpoint is written: wait until the base has gone on.
        if path is None or (wanted >= self.last_step(base) and not self.ended(base)):
            return None
        return Origin(base.id, event, *path)

    def save(self) -> None:
        """Write states.json."""
        tree = {name: dataclasses.asdict(state) for name, state in self.states.items()}
        _write(self.path / "states.json", tree)

    def _claim(self) -> None:
        """Write what is fixed, or compare with what was.

        Raises:
            ExperimentError: the protocol is another one now.
        """
        file, mine = self.path / "experiment.json", fixed(self.experiment)
        if not file.exists():
            _write(file, mine | {"utc": utc()})
            return
        there = _read(file)
        if not {"name", "steps", "runs"} <= there.keys():
            raise _damaged(file, "it is of no experiment")
        changed = list(differences(there, self.experiment))
        if changed:
            listed = "\n".join(f"  - {text}" for text in changed[:20])
            raise ExperimentError(
                f"the protocol is not the one {self.path} was started with:\n{listed}\n"
                "A protocol is fixed before its first run. Take the changes back, or use another "
                "--out (cells may be added, and --steps may end an invocation earlier)"
            )
        if mine["runs"].keys() - there["runs"].keys():
            there["runs"] = mine["runs"] | there["runs"]
            _write(file, there)

    def _read_states(self) -> dict[str, State]:
        file = self.path / "states.json"
        tree = _read(file) if file.exists() else {}
        try:
            found = {name: State(**entry) for name, entry in tree.items()}
        except TypeError as error:
            raise _damaged(file, error) from error
        return {run.id: State() for run in self.experiment.runs} | found

    def _catch_up(self) -> None:
        """What runs came to while nobody wrote it down: their launcher was killed."""
        for run in self.experiment.runs:
            state = self.states[run.id]
            if state.state in ENDED or not self.last_step(run):
                continue
            if (self.run_dir(run) / "FINISHED").exists() or self.followed(run):
                state.state, state.reason = FINISHED, self.followed(run)
            elif state.state == WAITING and self.checkpoint(run) is not None:
                state.state, state.reason = PAUSED, "its launcher was killed"


def fixed(experiment: Experiment) -> dict[str, Any]:
    """What may not change after the first run, JSON-ready."""
    protocol = experiment.protocol
    return {
        "name": protocol.name,
        "description": protocol.description,
        "steps": protocol.steps,
        "explosion": dataclasses.asdict(protocol.explosion),
        "runs": {
            run.id: {
                "cell": run.cell.name,
                "asks": run.cell.asks,
                "seed": run.seed,
                "variant": run.cell.variant,
                "from": [run.base, run.cell.before, run.cell.follow],
                "trainer": _flat(dataclasses.asdict(experiment.load(run).config)),
            }
            for run in experiment.runs
        },
    }


def differences(there: dict[str, Any], experiment: Experiment) -> Iterator[str]:
    """What of a protocol is not as it was when experiment.json was written.

    What only one of both has is of another version, and says nothing about the other.
    """
    mine = fixed(experiment)
    for key in ("name", "steps", "explosion"):
        if there.get(key, mine[key]) != mine[key]:
            yield f"{key}: {there[key]} -> {mine[key]}"
    for name, before in there["runs"].items():
        now = mine["runs"].get(name)
        if now is None:
            yield f"run {name}: taken out"
            continue
        for key in ("variant", "from"):
            if before[key] != now[key]:
                yield f"run {name}: {key} {before[key]} -> {now[key]}"
        old, new = before.get("trainer", {}), now["trainer"]
        for key in sorted(old.keys() & new.keys()):
            free = any(re.fullmatch(pattern, key) for pattern in OF_THE_DAY)
            if old[key] != new[key] and not free:
                yield f"run {name}: {key} {old[key]} -> {new[key]}"


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """A tree by dotted keys; lists by their index."""
    if isinstance(node, dict):
        items = [(f"{path}.{key}" if path else str(key), value) for key, value in node.items()]
    elif isinstance(node, list | tuple):
        items = [(f"{path}[{i}]", value) for i, value in enumerate(node)]
    else:
        return {path: node if isinstance(node, str | int | float | None) else str(node)}
    return {key: value for name, inner in items for key, value in _flat(inner, name).items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(found, dict):
        raise _damaged(path, f"a {type(found).__name__} where a mapping should be")
    return found


def _damaged(path: Path, why: object) -> ExperimentError:
    remedy = "move states.json away: the run directories say the rest"
    if path.name != "states.json":
        remedy = "restore it, or use another --out"
    return ExperimentError(f"{path} is damaged ({why}): {remedy}")


def _write(path: Path, tree: dict[str, Any]) -> None:
    write_whole(path, json.dumps(tree, indent=1, sort_keys=True) + "\n")


def utc() -> str:
    """Now, as states.json has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

"""The directory of an experiment: what was fixed, what each run has come to.

``<out>/``: experiment.json (protocol and runs, written once), reference/ (one fingerprint a seed),
runs/<run>/ (ordinary run directories), logs/, states.json, results/.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_patch.checkpoint.directory import CheckpointDirectory, key_of
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.files import (
    damaged,
    make_folder,
    read_json,
    refuse_run,
    write_json,
)
from megatron_patch.experiments.protocol import Experiment, Run, trainer_config
from megatron_patch.experiments.verdict import Row, read_rows

WAITING, PAUSED, FINISHED = "waiting", "paused", "finished"
EXPLODED, NONFINITE, GUARDED = "exploded", "non-finite", "stopped by its guard"
FAILED, REFUSED = "failed", "refused"
ENDED = (FINISHED, EXPLODED, NONFINITE, GUARDED)
"""States of a run that has shown what it will show."""
AFTER = "started again after: "
"""Begins the reason of a run that failed once, until it has been started again."""
AGAIN = "tried again after: "
"""Begins the reason of a run that was refused before its first step, until it has been started."""
FINAL = (*ENDED, FAILED, REFUSED)
"""States in which a run is not started again (failed and refused ones are, with --retry; those
refused before their first step are let go by `Store.ask_again`)."""


@dataclass(slots=True)
class State:
    """What a run has come to."""

    state: str = WAITING
    reason: str = ""
    """One line: why it stopped, where that says more than the state."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """One entry a process: utc, seconds, exit code, first and last step."""
    origin: dict[str, Any] | None = None
    """Of a run that continues another one: base, event and step it started from."""


class Store:
    """One experiment's directory, locked while this object is open."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        """Take the directory.

        Raises:
            ExperimentError: another process uses it, it holds a different experiment or a damaged
                one, it is the directory of a run, or it cannot be written.
        """
        self.path, self.experiment = path, experiment
        self._rows: dict[str, tuple[tuple[int, int, int], list[Row]]] = {}
        self.notes: list[str] = []
        """What the caller should tell: a file system without locks."""
        refuse_run(path)
        make_folder(path, "--out")
        self._lock = lock(path, self.notes)
        try:
            self._claim()
            self.states = self._read_states()
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

    def reference(self, run: Run) -> Path:
        """Fingerprint that all runs of the seed share."""
        return self.path / "reference" / f"seed_{run.seed}.json"

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

    def reached(self, run: Run) -> int:
        """Step from which the run can go on: its newest checkpoint's, 0 without any.

        A run that was killed has logged steps that no checkpoint holds.
        """
        kept = newest_checkpoint(self.run_dir(run) / "checkpoints")
        return 0 if kept is None else min(kept[0], self.last_step(run))

    def last_step(self, run: Run) -> int:
        """Last logged step of a run, 0 without any."""
        rows = self.rows(run)
        return int(rows[-1]["step"]) if rows else 0

    def is_final(self, run: Run) -> bool:
        """Whether a run has come to its end, whatever it was."""
        return self.states[run.id].state in FINAL

    def has_checkpoint(self, run: Run) -> bool:
        """Whether a stopped run could go on."""
        return newest_checkpoint(self.run_dir(run) / "checkpoints") is not None

    def save(self) -> None:
        """Write states.json."""
        tree = {name: dataclasses.asdict(state) for name, state in self.states.items()}
        write_json(self.path / "states.json", tree)

    def ask_again(self, only: Collection[str]) -> set[str]:
        """Let the runs that were refused before their first step be started; their ids.

        What refused them may have been mended (data that were not there), and only a new process
        can tell. One that has made steps is left to --retry: what it needs is not what it had.
        """
        found = set()
        for run in self.experiment.runs:
            state = self.states[run.id]
            if run.among(only) and state.state == REFUSED and not has_begun(state.attempts):
                state.state, state.reason = WAITING, f"{AGAIN}{state.reason}"
                found.add(run.id)
        return found

    def give_up(self, runs: Iterable[str]) -> None:
        """Those of them that were to be started again and were not, for want of a GPU or time, are
        what they were: failed, or refused."""
        for run in runs:
            state = self.states[run]
            if state.state == PAUSED and state.reason.startswith(AFTER):
                state.state, state.reason = FAILED, state.reason.removeprefix(AFTER)
            elif state.state == WAITING and state.reason.startswith(AGAIN):
                state.state, state.reason = REFUSED, state.reason.removeprefix(AGAIN)

    def save_if_possible(self, say: Callable[[str], None]) -> None:
        """As `save`; what cannot be written is told. The run directories say it, too, and runs that
        train meanwhile must not end because of a full disk here."""
        try:
            self.save()
        except OSError as error:
            say(
                f"warning: {self.path / 'states.json'} cannot be written: {error.strerror or error}"
            )

    def is_gone(self) -> bool:
        """Whether somebody has removed it meanwhile; a file system in trouble has not."""
        try:
            (self.path / "experiment.json").stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False

    def _claim(self) -> None:
        """Write what is fixed, or compare with what was."""
        file = self.path / "experiment.json"
        mine = _fixed(self.experiment)
        if not file.exists():
            write_json(file, mine | {"utc": _utc(), "job": secrets.token_hex(4)})
            return
        there = read_json(file)
        if missing := sorted({"name", "runs", *_RULES} - there.keys()):
            raise ExperimentError(f"{file} is of no experiment: it has no {', '.join(missing)}")
        if there["name"] != mine["name"]:
            raise ExperimentError(
                f"{self.path} holds the experiment {there['name']!r}, not {mine['name']!r}: use "
                "another --out"
            )
        changed = [
            f"{key}: {there[key]} -> {mine[key]}" for key in _RULES if there[key] != mine[key]
        ]
        changed += differences(there["runs"], mine["runs"])
        started = [n for n, state in self._read_states().items() if state.attempts]
        changed += [f"run {n}: taken out, but it was started" for n in started
                    if n not in mine["runs"]]  # fmt: skip
        if changed:
            listed = "\n".join(f"  - {text}" for text in changed)
            raise ExperimentError(
                f"the protocol is not the one {self.path} was started with:\n{listed}\n"
                "A protocol is fixed before its first run. Take the changes back, or use another "
                "--out (cells may be added, and --steps may end an invocation earlier)"
            )
        added = {name: run for name, run in mine["runs"].items() if name not in there["runs"]}
        if added:
            there["runs"] |= added
            there.setdefault("added", []).append({"utc": _utc(), "runs": sorted(added)})
            write_json(file, there)

    def _read_states(self) -> dict[str, State]:
        file = self.path / "states.json"
        tree = read_json(file) if file.exists() else {}
        try:
            found = {name: State(**entry) for name, entry in tree.items()}
        except TypeError as error:
            raise damaged(file, str(error)) from error
        return {run.id: State() for run in self.experiment.runs} | found


def has_begun(attempts: Iterable[dict[str, Any]]) -> bool:
    """Whether any of a run's processes has made a step."""
    return any(attempt["to_step"] > 0 for attempt in attempts)


def what_next(left: Mapping[str, State], asked: Collection[str]) -> str:
    """One line: how many runs were refused or failed, and what starts them again.

    Args:
        left: those runs, by id.
        asked: ids of what this command was to start (--only).
    """
    mine = [state for run, state in left.items() if run in asked]
    failed = sum(state.state == FAILED for state in mine)
    later = sum(state.state == REFUSED and has_begun(state.attempts) for state in mine)
    first, others = len(mine) - failed - later, len(left) - len(mine)
    counts = {
        f"{first} refused before a first step (mend what the reason says, and the same command "
        "tries again)": first,
        f"{later} refused later (start again with --retry)": later,
        f"{failed} failed (start again with --retry)": failed,
        f"{others} not among --only": others,
    }
    told = "; ".join(text for text, count in counts.items() if count)
    return f"runs that are not done: {told}"


def newest_checkpoint(folder: Path, *, at_most: int | None = None) -> tuple[int, Path] | None:
    """(step, directory) of the newest complete checkpoint, of at most a step."""
    for name in CheckpointDirectory(folder).complete_names():  # newest first
        step = key_of(name)[0]
        if at_most is None or step <= at_most:
            return step, folder / name
    return None


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What keeps runs of two experiment.json from being the same: all but choices of the day.

    Those are where the data lie (the hash of the batches says whether they are the same), into how
    many passes a batch is cut, what is captured on the way, and how checkpoints are saved. Not that
    of a run which others continue: they start from the newest checkpoint it has at some step. What
    only one of two entries has is of a later version, and says nothing about the other.
    """
    continued = {run.get("from", [None])[0] for run in [*one.values(), *other.values()]}
    return [
        f"run {name}: {text}"
        for name in one
        if name in other
        for text in _changes(one[name], other[name], continued=name in continued)
    ]


def _changes(one: dict[str, Any], other: dict[str, Any], *, continued: bool) -> Iterator[str]:
    free = _OF_THE_DAY if continued else (*_OF_THE_DAY, *_SAVING)

    def kept(run: dict[str, Any], key: str) -> Any:
        if key != "set":
            return run[key]
        return [t for t in run[key] if not any(re.fullmatch(f, t.partition("=")[0]) for f in free)]

    for key in one:
        if key in other and kept(one, key) != kept(other, key):
            yield f"{key} {kept(one, key)} -> {kept(other, key)}"


def job_of(tree: dict[str, Any]) -> str:
    """A short name for the directory an experiment.json is of: two jobs' archives do not mix."""
    made = str(tree.get("utc", ""))
    return str(tree.get("job") or hashlib.sha256(made.encode()).hexdigest()[:8])


def set_aside(path: Path) -> Path:
    """Rename a run directory that is about to be replaced: nothing measured is deleted."""
    number = 1
    while (target := path.with_name(f"{path.name}.replaced_{number}")).exists():
        number += 1
    path.rename(target)
    return target


_OF_THE_DAY = (r"data\.[\w.]*path", r"training\.micro_batch_size", r"stability\.capture\w*")
_SAVING = (r"checkpoint\.(interval|keep_last|async_save)",)
_RULES = ("steps", "checked_steps", "explosion", "config")


def _fixed(experiment: Experiment) -> dict[str, Any]:
    protocol = experiment.protocol
    return {
        "name": protocol.name,
        "description": protocol.description,
        "steps": protocol.steps,
        "checked_steps": protocol.checked_steps,
        "explosion": dataclasses.asdict(protocol.explosion),
        "config": experiment.config.name,
        "runs": {
            run.id: {
                "cell": run.cell.name,
                "asks": run.cell.asks,
                "seed": run.seed,
                "variant": run.cell.variant,
                "set": list(run.overrides),
                "from": [run.base, run.cell.before, run.cell.follow],
                "recipe": recipe(experiment, run),
                "reactions": reactions(experiment, run),
            }
            for run in experiment.runs
        },
    }


def recipe(experiment: Experiment, run: Run) -> str:
    """SHA-256 of everything in a run's configuration that is trained: model, optimizer, batch.

    Keys that come from the trainer configuration itself are no part of the protocol's text; with
    this they cannot change unseen between two invocations or two machines.
    """
    config = trainer_config(experiment.config, run, steps=experiment.protocol.steps).config
    training = dataclasses.asdict(config.training)
    tree = {
        "model": dataclasses.asdict(config.model),
        "optimizer": dataclasses.asdict(config.optimizer),
        "attention": dataclasses.asdict(config.attention),
        "training": {name: training[name] for name in _TRAINED},
    }
    return _digest(tree)


def reactions(experiment: Experiment, run: Run) -> str:
    """SHA-256 of what may change a run on its way: the guard with its rule, and spikes.

    A guard that only warns changes nothing, and its thresholds may be another's.
    """
    config = trainer_config(experiment.config, run, steps=experiment.protocol.steps).config
    watched = dataclasses.asdict(config.stability)
    acts = config.stability.guard in ("switch", "stop")
    rule = {n: v for n, v in watched.items() if acts and not n.startswith("capture")}
    return _digest(
        {"stability": rule | {"acts": acts}, "spike": dataclasses.asdict(config.faults.spike)}
    )


def _digest(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()


_TRAINED = ("seed", "global_batch_size", "precision", "compile_fusions", "deterministic")


def lock(path: Path, notes: list[str]) -> IO[str]:
    """An experiment's directory for this process alone, until what is returned is closed.

    ``notes``: gets what the caller should tell, of a file system without locks.

    Raises:
        ExperimentError: another process has it.
    """
    handle = (path / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise ExperimentError(
            f"{path}: another process runs this experiment right now, shows its results or unpacks "
            "into it; wait until it has ended, or name another --out"
        ) from None
    except OSError as error:
        notes.append(
            f"warning: {path}: this file system has no locks ({error.strerror}); take care that "
            "only one invocation uses the directory at a time"
        )
    return handle


def _utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

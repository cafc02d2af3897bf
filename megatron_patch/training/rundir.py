"""The run directory: who may write into it, what it says about the run.

``<run_dir>/``: config.yaml (resolved), origins.yaml, environment.json (one entry an attempt),
train.log, metrics.csv, tensorboard/, checkpoints/, FINISHED.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

from megatron_patch.checkpoint import last_checkpoint, pinned
from megatron_patch.checkpoint.directory import IDENTITY, LATEST, NEXT
from megatron_patch.runtime.environment import DISTRIBUTIONS
from megatron_patch.runtime.files import check_file, write_whole
from megatron_patch.runtime.io_errors import may_pass
from megatron_patch.runtime.lifeline import ATTEMPT_DIR
from megatron_patch.schema.problem import DEFAULT, Problem
from megatron_patch.stability.record import FOLDER as TELEMETRY

if TYPE_CHECKING:
    from megatron_patch.schema.run import Loaded, RunConfig

log = logging.getLogger(__name__)

FINISHED, LOCK = "FINISHED", ".lock"
TOKEN = ".seen-by-every-node-"

PATIENCE_S = 90.0
"""How long a node waits for another node's file: NFS may keep a directory for a minute."""
LOCK_PATIENCE_SECONDS = 120.0
"""Under the launcher: longer than the lease (90 s) after which NFS takes a lost node's lock."""
LOCK_POLL_SECONDS = 5.0

CHANGEABLE = (
    "name",
    "run_dir",
    "training.train_steps",
    "training.micro_batch_size",
    "training.device",
    "training.deterministic",
    "training.recompute",
    "training.eval_interval",
    "training.eval_steps",
    "training.exit_after_minutes",
    "training.exit_at_step",
    "training.check_finite",
    "optimizer.implementation",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.clip_grad",
    "parallel",
    "attention",
    "checkpoint",
    "logging",
    "stability",
    "faults",
    "data.num_workers",
    "data.verify",
    "model.layer_spec",
    "cluster",
)
"""Keys a resumed run may change: they say how, how long and where, not what is trained. Learning
rate and clip are what saves a run that diverges; new values count from the next step on."""

SOFTWARE = ("python", *DISTRIBUTIONS, "cuda", "cudnn", "nccl", "gpu")
"""Of the environment report: what may change the rounding of a result."""


def run_directory(run: RunConfig) -> Path:
    """``run_dir``, or ``runs/<name>``."""
    return Path(run.run_dir) if run.run_dir else Path("runs") / run.name


def lies_outside(run: RunConfig) -> bool:
    """Whether the checkpoints are not in the run directory, by their name or through a link."""
    return not run.checkpoint_directory.resolve().is_relative_to(run_directory(run).resolve())


class RunDirectoryLost(RuntimeError):
    """The run directory was deleted or replaced while the run was training."""

    exit_code = 1


@dataclass(slots=True)
class RunDirectory:
    """The directory of this attempt; the lock is held until ``close``."""

    path: Path
    notes: list[str]
    finished: bool
    _lock: IO[str] | None
    _store_lock: IO[str] | None = None

    def check_still_there(self) -> None:
        """Notice that somebody deleted, moved or replaced the directory under the run.

        Raises:
            RunDirectoryLost: going on would write half a run into another directory.
        """
        if self._lock is None:
            return
        try:
            now = (self.path / LOCK).stat()
        except OSError:
            now = None
        mine = os.fstat(self._lock.fileno())
        if now is None or (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev):
            raise RunDirectoryLost(
                f"run directory {self.path} is gone or was replaced while the run was training; "
                "nothing more is written there: put it back and give the same command again"
            )

    def close(self) -> None:
        """Let other processes have the directory, and that of the checkpoints."""
        for lock in (self._store_lock, self._lock):
            if lock is not None:
                lock.close()
        self._store_lock = self._lock = None

    def take_store(self, run: RunConfig) -> list[Problem]:
        """Lock the directory of the checkpoints too, which other runs may name; what is against it.

        It is not made where the run has saved already: then it is not mounted, and that is said
        when the checkpoint is looked for.
        """
        root = run.checkpoint_directory
        key = "checkpoint.directory"
        try:
            if not root.exists() and (self.path / last_checkpoint.FILE).exists():
                return []
            root.mkdir(parents=True, exist_ok=True)
            for name in (IDENTITY, LATEST, NEXT, pinned.FILE):
                check_file(root / name, appended=False)
            if root.samefile(self.path):
                return []  # one directory, one lock
            self._store_lock, problem = _lock(root, self.notes)
        except OSError as error:
            where = error.filename or root
            text = f"{root}: cannot be used ({error.strerror}: {where})"
            return [Problem(key, text, may_pass=may_pass(error))]
        return [] if problem is None else [replace(problem, path=key)]


def open_run(loaded: Loaded, report: dict[str, Any]) -> tuple[RunDirectory | None, list[Problem]]:
    """Take the run's directory, or say why not. Called on the first rank only.

    Nothing that exists is overwritten or deleted: a configuration that changed is kept beside the
    new one, and a directory of another run is refused.

    Args:
        loaded: the configuration.
        report: environment of this attempt, appended to environment.json.

    Returns:
        The directory and no problem, or None and what stands against it.
    """
    run = loaded.config
    path = run_directory(run)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{path}: cannot be created ({error.strerror})"
        return None, [Problem("run_dir", text, may_pass=may_pass(error))]
    notes: list[str] = []
    lock: IO[str] | None = None
    finished = False
    try:
        lock, problem = _lock(path, notes)
        problems = [problem] if problem else _claim(loaded, path, notes)
        if not problems:
            finished = _finished(path, run)
            _check_files(path, run, finished=finished)
            if not finished:
                notes += _record(loaded, path, report)
    except OSError as error:  # read-only, full, somebody else's
        where = error.filename or path
        text = f"{path}: cannot be used ({error.strerror}: {where})"
        problems = [Problem("run_dir", text, may_pass=may_pass(error))]
    if problems:
        if lock is not None:
            lock.close()
        return None, problems
    return RunDirectory(path, notes, finished, lock), []


def is_taken(path: Path) -> bool:
    """Whether a living process of this machine trains in the run directory ``path``."""
    try:
        with (path / LOCK).open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such run yet, or no locks
        return False
    return False


def _lock(path: Path, notes: list[str]) -> tuple[IO[str] | None, Problem | None]:
    """An exclusive lock for as long as this process lives.

    Under the launcher, which has seen to it that no other job has the directory, the holder is a
    process of a node that was lost: it may take a file server over a minute to notice that.
    """
    launched = ATTEMPT_DIR in os.environ
    end = time.monotonic() + (LOCK_PATIENCE_SECONDS if launched else 0)
    handle = (path / LOCK).open("w")
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    handle.close()
                    text = f"{path}: another process is training here right now"
                    return None, Problem("run_dir", text, may_pass=launched)
            log.warning("waiting for the lock of %s, up to %g s", path, end - time.monotonic())
            time.sleep(LOCK_POLL_SECONDS)
    except OSError as error:
        notes.append(f"{path}: this file system has no locks ({error.strerror}); take care that "
                     "only one job uses the directory")  # fmt: skip
    return handle, None


def _claim(loaded: Loaded, path: Path, notes: list[str]) -> list[Problem]:
    """Whether what is in the directory belongs to this run."""
    run = loaded.config
    checkpoints = run.checkpoint_directory
    trained = (path / "metrics.csv").exists() or (
        checkpoints.is_dir() and any(_is_content(p.name) for p in checkpoints.iterdir())
    )
    if not trained:
        return []
    if run.checkpoint.resume == "never":
        return [
            Problem(
                "checkpoint.resume",
                f"never, but {path} holds a run already; choose another name or run_dir, or "
                "set checkpoint.resume: auto to continue it",
            )
        ]
    saved = path / "config.yaml"
    if not saved.exists():
        return []
    try:
        changed = differences(saved.read_text(), loaded.dump_yaml())
    except (ValueError, yaml.YAMLError) as error:
        what = str(error).splitlines()[0]
        return [
            Problem(
                "run_dir",
                f"{saved} says what the run was started with, and is damaged ({what}): put it "
                "back, or delete it if you are sure that the settings are the same",
            )
        ]
    refused = _refused(changed, loaded)
    notes += [
        f"configuration changed since the last attempt: {key}: {old} -> {new}"
        for key, old, new in changed
        if _may_change(key) and key not in ("name", "run_dir")
    ]
    advice = "use another name or run_dir for a new run, or checkpoint.load_from to start from it"
    return [
        Problem(key, f"{new}, but the run in {path} was started with {old}; {advice}")
        for key, old, new in refused
    ]


def _is_content(name: str) -> bool:
    """Whether a file tells of training; every start leaves the others."""
    return name != LOCK and not name.startswith(TOKEN)


def another_run(saved: str, loaded: Loaded) -> str | None:
    """Why a checkpoint saved with the configuration ``saved`` is not this run's, by the same rule.

    The run directory's own copy cannot tell: a new one may name an old ``checkpoint.directory``.
    """
    refused = _refused(differences(saved, loaded.dump_yaml()), loaded)
    if not refused:
        return None
    listed = "".join(f"\n  {key}: {new}, but it was saved with {old}" for key, old, new in refused)
    return (
        f"another run's checkpoint, by its settings:{listed}\nuse another checkpoint.directory "
        "for a new run, and checkpoint.load_from to start it from this one"
    )


def _refused(changed: list[tuple[str, str, str]], loaded: Loaded) -> list[tuple[str, str, str]]:
    return [c for c in changed if not (_may_change(c[0]) or _came_with_an_update(c, loaded))]


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in CHANGEABLE)


def _came_with_an_update(change: tuple[str, str, str], loaded: Loaded) -> bool:
    """Whether a key is new in this version of the program and nobody has set it."""
    key, old, _ = change
    return old == "absent" and loaded.origins.get(key) == DEFAULT


def differences(before: str, after: str) -> list[tuple[str, str, str]]:
    """(key, old, new) of two resolved configurations as ``Loaded.dump_yaml`` writes them.

    Keys that only one of them has (another version of this program) count as ``absent``.

    Raises:
        ValueError: ``before`` holds no settings; a YAMLError: it is no YAML.
    """
    # Both texts come from one renderer, so scalars are compared as they are written.
    trees = [yaml.load(text, Loader=yaml.BaseLoader) for text in (before, after)]
    if not (isinstance(trees[0], dict) and trees[0]):
        raise ValueError("no settings in it")
    old, new = map(_flat, trees)
    keys = list(dict.fromkeys([*new, *old]))
    return [
        (k, old.get(k, "absent"), new.get(k, "absent")) for k in keys if old.get(k) != new.get(k)
    ]


def _flat(node: Any, path: str = "") -> dict[str, str]:
    """Dotted path -> text of every scalar."""
    if isinstance(node, dict):
        items = [(str(k), v) for k, v in node.items()]
    elif isinstance(node, list):
        items = [(str(n), v) for n, v in enumerate(node)]
    else:
        return {path: str(node)}
    flat: dict[str, str] = {} if items else {path: "[]" if isinstance(node, list) else "{}"}
    for key, value in items:
        flat |= _flat(value, f"{path}.{key}" if path else key)
    return flat


def _finished(path: Path, run: RunConfig) -> bool:
    """Whether an earlier attempt reached ``train_steps``; a longer run takes the marker back."""
    marker = path / FINISHED
    if not marker.exists():
        return False
    try:
        step = int(json.loads(marker.read_text())["step"])
    except (ValueError, KeyError, TypeError):
        step = -1
    if step >= run.training.train_steps:
        return True
    os.replace(marker, path / f"{FINISHED}.step_{max(step, 0)}")
    return False


def _check_files(path: Path, run: RunConfig, *, finished: bool) -> None:
    """Look at what this attempt opens later, when steps would be lost by it.

    Raises:
        OSError: something there is of another kind, or not ours.
    """
    appended, replaced, folders = ["train.log"], [], []
    if not finished:
        appended += ["metrics.csv", "metrics.abandoned.csv"]
        replaced += ["data.sha256"]
    if not finished and run.logging.tensorboard:
        folders += ["tensorboard"]
    if not finished and run.stability.enabled:
        folders += [TELEMETRY]
        appended += [f"{TELEMETRY}/{x}" for x in ("records.bin", "abandoned.bin", "layers.csv")]
        replaced += [f"{TELEMETRY}/{x}" for x in ("meta.json", "before.bin")]
    for folder in (path / name for name in folders):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(folder))
    for name in appended:
        check_file(path / name, appended=True)
    for name in replaced:
        check_file(path / name, appended=False)


def _record(loaded: Loaded, path: Path, report: dict[str, Any]) -> list[str]:
    """Configuration, origins and environment of this attempt; what of the software has changed."""
    file = path / "environment.json"
    attempts: list[Any] = []
    if file.exists():
        try:
            attempts = json.loads(file.read_text())["attempts"]
        except (ValueError, KeyError, TypeError):
            os.replace(file, path / f"environment.unreadable_{time.time_ns()}.json")
    text = loaded.dump_yaml()
    saved = path / "config.yaml"
    if saved.exists() and saved.read_text() != text:
        os.replace(saved, path / f"config.attempt_{max(len(attempts), 1)}.yaml")
    write_whole(saved, text)
    write_whole(path / "origins.yaml", loaded.dump_origins())
    before = attempts[-1] if attempts and isinstance(attempts[-1], dict) else {}
    attempts.append({"utc": utc(), **report})
    write_whole(file, json.dumps({"attempts": attempts}, indent=1) + "\n")
    return [
        f"software changed since the last attempt: {name}: {before[name]} -> {report[name]}; the "
        "same bits as before are not promised"
        for name in SOFTWARE
        if name in before and name in report and str(before[name]) != str(report[name])
    ]


def check_data(run: RunConfig, fingerprint: str, *, step: int) -> list[Problem]:
    """Compare the data's fingerprint with that of the steps before, then record it.

    Args:
        run: configuration.
        fingerprint: ``Loaders.fingerprint``: everything the order of samples depends on.
        step: steps done; nothing is compared at step 0.
    """
    file = run_directory(run) / "data.sha256"
    before = file.read_bytes().strip() if step > 0 and file.exists() else None
    if before is not None and not re.fullmatch(rb"[0-9a-f]{64}", before):
        return [
            Problem(
                "data",
                f"{file} holds {before[:40]!r} and no SHA-256 of the data so far: it is damaged; "
                "put it right, or delete it if the token files are the same as before",
            )
        ]
    if before is not None and before.decode() != fingerprint:
        return [
            Problem(
                "data",
                f"the token files are not those the first {step} steps were trained on (their "
                "manifests differ): put the old ones back, or start a new run with "
                "checkpoint.load_from",
            )
        ]
    write_whole(file, fingerprint + "\n")
    return []


def leave_token(path: Path) -> Path:
    """Write a file that the other nodes look for; its absolute path."""
    token = path.absolute() / (TOKEN + uuid.uuid4().hex)
    token.touch(exist_ok=False)
    return token


def sees_token(path: Path, name: str) -> bool:
    """Whether the file turns up in this node's directory within ``PATIENCE_S``."""
    end = time.monotonic() + PATIENCE_S
    while True:
        # Listing asks the server anew; looking for a name alone may answer from what was cached.
        with contextlib.suppress(OSError):
            if name in os.listdir(path):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)


def mark_finished(path: Path, *, step: int, consumed_tokens: int) -> None:
    """Leave the marker that tells a launcher not to start the run again."""
    facts = {"step": step, "consumed_tokens": consumed_tokens, "utc": utc()}
    write_whole(path / FINISHED, json.dumps(facts) + "\n")


def utc() -> str:
    """Now, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

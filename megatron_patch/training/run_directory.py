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
import socket
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_patch.checkpoint import last_checkpoint, pinned
from megatron_patch.checkpoint.directory import IDENTITY, LATEST, NEXT, CheckpointDirectory
from megatron_patch.runtime import environment
from megatron_patch.runtime.files import check_file, write_whole
from megatron_patch.runtime.io_errors import may_pass
from megatron_patch.runtime.lifeline import ATTEMPT_DIR
from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.stability.record import FOLDER as TELEMETRY
from megatron_patch.training import resume_rules

if TYPE_CHECKING:
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.schema.run import Loaded, RunConfig

log = logging.getLogger(__name__)

FINISHED, LOCK = "FINISHED", ".lock"
STEP = '{"step": '
"""What the marker begins with."""
TOKEN = ".seen-by-every-node-"
AXES = ("tp", "pp", "cp", "dp", "ep")

PATIENCE_S = 90.0
"""How long a node waits for another node's file: NFS may keep a directory for a minute."""
LOCK_PATIENCE_SECONDS = 120.0
"""Under the launcher: longer than the lease (90 s) after which NFS takes a lost node's lock."""
LOCK_POLL_SECONDS = 5.0


def lies_outside(run: RunConfig) -> bool:
    """Whether the checkpoints are not in the run directory, by their name or through a link."""
    return not run.checkpoint_directory.resolve().is_relative_to(run.directory.resolve())


@dataclass(slots=True)
class RunDirectory:
    """The directory of this attempt; the first rank holds its locks until ``close``."""

    path: Path
    notes: list[str] = field(default_factory=list)
    """Lines for people: what changed since the last attempt."""
    finished: bool = False
    _locks: list[IO[str]] = field(default_factory=list)

    def close(self) -> None:
        """Let other processes have the directory, and that of the checkpoints."""
        while self._locks:
            self._locks.pop().close()

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
            # What stands in the place of `latest` counts where there is something to continue.
            names = [IDENTITY, NEXT, pinned.FILE]
            if not CheckpointDirectory(root).complete_names():
                names.append(LATEST)
            for name in names:
                check_file(root / name, appended=False)
            if root.samefile(self.path):
                return []  # one directory, one lock
            lock, problem = _lock(root, self.notes)
        except OSError as error:
            return [_unusable(key, root, error)]
        if lock is not None:
            self._locks.append(lock)
        return [] if problem is None else [replace(problem, path=key)]


def take(loaded: Loaded, layout: Layout) -> RunDirectory:
    """The run's directory, locked on the first rank; refused on all ranks alike. Collective.

    Raises:
        ConfigError: the directory belongs to another run, cannot be used, or is not one directory
            on all nodes.
    """
    import torch  # not for those who only ask whether a directory is taken

    run = loaded.config
    directory: RunDirectory | None = RunDirectory(run.directory)
    verdict: list[Any] = [[], False, {}]
    if layout.print_rank:
        sizes = {f"{axis}_size": getattr(layout, f"{axis}_size") for axis in AXES}
        report = {"world_size": layout.world_size, **sizes, **environment.report()}
        directory, problems = open_run(loaded, report)
        tokens: dict[str, Path] = {}
        if directory is not None:
            if not directory.finished:
                problems = directory.take_store(run)
            if not problems:
                tokens, problems = _leave_tokens(run, directory)
        verdict = [problems, directory is not None and directory.finished, tokens]
    torch.distributed.broadcast_object_list(verdict, src=0)
    problems, finished, tokens = verdict
    for key, token in tokens.items():
        path = run.directory if key == "run_dir" else run.checkpoint_directory
        problems += _one_directory(key, path, token, layout)
    if problems or directory is None:
        if directory is not None:
            directory.close()
        raise ConfigError(problems)
    directory.finished = finished
    return directory


def open_run(loaded: Loaded, report: dict[str, Any]) -> tuple[RunDirectory | None, list[Problem]]:
    """Take the run's directory, or say why not. Called on the first rank only.

    Nothing that exists is overwritten or deleted: a configuration that changed is kept beside the
    new one, and a directory of another run is refused.

    Returns:
        The directory and no problem, or None and what stands against it.
    """
    run = loaded.config
    path = run.directory
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{path}: cannot be created ({error.strerror})"
        return None, [Problem("run_dir", text, may_pass=may_pass(error))]
    directory = RunDirectory(path)
    try:
        lock, problem = _lock(path, directory.notes)
        if lock is not None:
            directory._locks.append(lock)
        problems = [problem] if problem else []
        if not problems and _was_trained_in(path, run):
            problems, notes = resume_rules.check_settings(loaded, path)
            directory.notes += notes
        if not problems:
            directory.finished = _finished(path, run)
            _check_files(path, run, finished=directory.finished)
            if not directory.finished:
                directory.notes += _record(loaded, path, report)
    except ConfigError as error:
        problems = list(error.problems)
    except OSError as error:  # read-only, full, somebody else's
        problems = [_unusable("run_dir", path, error)]
    if problems:
        directory.close()
        return None, problems
    return directory, []


def _unusable(key: str, path: Path, error: OSError) -> Problem:
    text = f"{path}: cannot be used ({error.strerror}: {error.filename or path})"
    return Problem(key, text, may_pass=may_pass(error))


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
                return handle, None
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


def _was_trained_in(path: Path, run: RunConfig) -> bool:
    checkpoints = run.checkpoint_directory
    return (path / "metrics.csv").exists() or (
        checkpoints.is_dir()
        # Every start leaves a lock and tokens.
        and any(not (p.name == LOCK or p.name.startswith(TOKEN)) for p in checkpoints.iterdir())
    )


def _finished(path: Path, run: RunConfig) -> bool:
    """Whether an earlier attempt reached ``train_steps``; a longer run takes the marker back.

    Raises:
        ConfigError: somebody wrote something else into it. What a crash leaves of it is no text, or
            the beginning of what was written.
    """
    marker = path / FINISHED
    if not marker.exists():
        return False
    text = marker.read_bytes().decode(errors="replace").strip("\0 \t\r\n")
    step = -1
    try:
        step = json.loads(text)["step"]
        said = type(step) is int and step >= 0
    except (ValueError, KeyError, TypeError, RecursionError):
        torn = text.startswith(STEP) and "}" not in text
        said = torn or STEP.startswith(text)
    if not said:
        problem = (
            f'{marker} holds {text[:80]!r}, and a finished run leaves {{"step": N}} there: delete '
            "the file to train on, or write that to keep the run as it is"
        )
        raise ConfigError([Problem("run_dir", problem)])
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
        appended += ["metrics.csv"]
        replaced += ["data.sha256"]
    if not finished and run.logging.tensorboard:
        folders += ["tensorboard"]
    if not finished and run.stability.enabled:
        folders += [TELEMETRY]
        appended += [f"{TELEMETRY}/records.bin"]
        replaced += [f"{TELEMETRY}/meta.json"]
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
    return resume_rules.software_changes(before, report)


# ----------------------------------------------------------- one directory on all nodes


def _leave_tokens(run: RunConfig, directory: RunDirectory) -> tuple[dict[str, Path], list[Problem]]:
    """Files that the other nodes look for, by the key that names the directory; and what failed."""
    places = {"run_dir": directory.path}
    checkpoints = run.checkpoint_directory
    if not directory.finished and checkpoints.is_dir() and lies_outside(run):
        places["checkpoint.directory"] = checkpoints
    tokens: dict[str, Path] = {}
    for key, path in places.items():
        token = path.absolute() / (TOKEN + uuid.uuid4().hex)
        try:
            token.touch(exist_ok=False)
        except OSError as error:
            for left in tokens.values():
                left.unlink(missing_ok=True)
            problem = Problem(key, f"{path}: {error.strerror}", may_pass=may_pass(error))
            return {}, [problem]
        tokens[key] = token
    return tokens, []


def _one_directory(key: str, path: Path, token: Path, layout: Layout) -> list[Problem]:
    """What speaks against every node having the first rank's directory. Collective.

    A node without the shared mount would start from scratch, or write checkpoints and logs where no
    other node finds them.
    """
    import torch

    blind: list[Any] = [None] * layout.world_size
    seen = layout.local_rank != 0 or sees_token(path, token.name)
    torch.distributed.all_gather_object(
        blind, None if seen else f"{socket.gethostname()} (rank {layout.rank}): {path.absolute()}"
    )
    if layout.print_rank:
        token.unlink(missing_ok=True)
    missing = [who for who in blind if who is not None]
    if not missing:
        return []
    text = (
        f"is not one directory on all nodes: what rank 0 wrote into {token.parent} on its node "
        f"is not seen by {', '.join(missing)}; mount the shared file system on every node, "
        "rank 0's included, and start in the same working directory or give an absolute path"
    )
    return [Problem(key, text)]


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

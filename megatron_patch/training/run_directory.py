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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_patch.checkpoint import last_checkpoint, pinned
from megatron_patch.checkpoint.directory import IDENTITY, LATEST, NEXT, CheckpointDirectory
from megatron_patch.faults import skips
from megatron_patch.parallel.first_rank import of_all, on_first_rank
from megatron_patch.parallel.setup import Layout
from megatron_patch.runtime import environment
from megatron_patch.runtime.files import check_file, write_whole
from megatron_patch.runtime.io_errors import may_pass
from megatron_patch.runtime.lifeline import ATTEMPT_DIR
from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.schema.run import Loaded, RunConfig
from megatron_patch.stability import guard
from megatron_patch.stability.record import FOLDER as TELEMETRY
from megatron_patch.training import resume_rules

log = logging.getLogger(__name__)

FINISHED, LOCK = "FINISHED", ".lock"
STEP = '{"step": '
"""What the marker begins with."""
TOKEN = ".seen-by-every-node-"

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
    _before: dict[Path, str] = field(default_factory=dict)
    """What the attempt before recorded, where this one recorded something else."""

    def settle(self) -> None:
        """The run goes on with this configuration, which nothing has refused."""
        self._before = {}

    def close(self) -> None:
        """Let other processes have the directory, and that of the checkpoints.

        What a refused attempt recorded goes: the next one goes on from what was trained.
        """
        for path, text in self._before.items():
            with contextlib.suppress(OSError):
                write_whole(path, text)
        self.settle()
        while self._locks:
            self._locks.pop().close()

    def lock(self, key: str, path: Path) -> None:
        """Lock ``path``, which ``key`` of the configuration names, while this process lives.

        Under the launcher, which has seen to it that no other job has the directory, the holder is
        a process of a node that was lost: a file server may take over a minute to notice that.

        Raises ConfigError: another process has it.
        """
        launched = ATTEMPT_DIR in os.environ
        end = time.monotonic() + (LOCK_PATIENCE_SECONDS if launched else 0)
        handle = (path / LOCK).open("w")
        self._locks.append(handle)
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() >= end:
                        text = f"{path}: another process is training here right now"
                        raise ConfigError([Problem(key, text, may_pass=launched)]) from None
                log.warning("waiting for the lock of %s, up to %g s", path, end - time.monotonic())
                time.sleep(LOCK_POLL_SECONDS)
        except OSError as error:
            self.notes.append(f"{path}: this file system has no locks ({error.strerror}); take "
                              "care that only one job uses the directory")  # fmt: skip

    def take_store(self, run: RunConfig) -> None:
        """Lock the directory of the checkpoints too, which other runs may name.

        It is not made where the run has saved already: then it is not mounted, and that is said
        when the checkpoint is looked for.

        Raises ConfigError: it cannot be used, or another process has it.
        """
        root, key = run.checkpoint_directory, "checkpoint.directory"
        with _errors_name(key, root):
            if not root.exists() and (self.path / last_checkpoint.FILE).exists():
                return
            root.mkdir(parents=True, exist_ok=True)
            # What stands in the place of `latest` counts where there is something to continue.
            names = [IDENTITY, NEXT, pinned.FILE]
            if not CheckpointDirectory(root).complete_names():
                names.append(LATEST)
            for name in names:
                check_file(root / name, appended=False)
            if not root.samefile(self.path):  # one directory, one lock
                self.lock(key, root)
            if not os.access(root, os.W_OK | os.X_OK):  # files that are there open all the same
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(root))


def take(loaded: Loaded, layout: Layout) -> RunDirectory:
    """The run's directory, locked on the first rank; refused on all ranks alike. Collective.

    Raises ConfigError: the directory belongs to another run, cannot be used, or is not one
    directory on all nodes.
    """
    run = loaded.config
    directory = RunDirectory(run.directory)

    def open_here() -> tuple[bool, dict[str, Path]]:
        nonlocal directory
        directory = open_run(loaded, layout.sizes("{}_size") | environment.report())
        if not directory.finished:
            directory.take_store(run)
        return directory.finished, _leave_tokens(run, directory)

    try:
        directory.finished, tokens = on_first_rank(open_here, ConfigError, rank=layout.rank)
        problems: list[Problem] = []
        for key, token in tokens.items():
            path = run.directory if key == "run_dir" else run.checkpoint_directory
            problems += _one_directory(key, path, token, layout)
        if problems:
            raise ConfigError(problems)
    except ConfigError:
        directory.close()
        raise
    return directory


def open_run(loaded: Loaded, report: dict[str, Any]) -> RunDirectory:
    """Take the run's directory. Called on the first rank only.

    Nothing that exists is overwritten or deleted: a configuration that changed is kept beside the
    new one, and a directory of another run is refused.

    Raises ConfigError: what stands against it.
    """
    run, directory = loaded.config, RunDirectory(loaded.config.directory)
    path = directory.path
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{path}: cannot be created ({error.strerror})"
        raise ConfigError([Problem("run_dir", text, may_pass=may_pass(error))]) from None
    try:
        with _errors_name("run_dir", path):  # read-only, full, somebody else's
            directory.lock("run_dir", path)
            if _was_trained_in(path, run):
                problems, changes = resume_rules.check_settings(loaded, path)
                if problems:
                    raise ConfigError(problems)
                directory.notes += changes
            directory.finished = _finished(path, run)
            _check_files(path, run, finished=directory.finished)
            if not directory.finished:
                directory.notes += _record(loaded, directory, report)
    except ConfigError:
        directory.close()
        raise
    return directory


@contextlib.contextmanager
def _errors_name(key: str, path: Path) -> Iterator[None]:
    """Errors of the file system become a problem of the key that names ``path``."""
    try:
        yield
    except OSError as error:
        text = f"{path}: cannot be used ({error.strerror}: {error.filename or path})"
        raise ConfigError([Problem(key, text, may_pass=may_pass(error))]) from None


def _was_trained_in(path: Path, run: RunConfig) -> bool:
    checkpoints = run.checkpoint_directory
    return (path / "metrics.csv").exists() or (
        checkpoints.is_dir()
        # Every start leaves a lock and tokens.
        and any(not (p.name == LOCK or p.name.startswith(TOKEN)) for p in checkpoints.iterdir())
    )


def _finished(path: Path, run: RunConfig) -> bool:
    """Whether an earlier attempt reached ``train_steps``; a longer run takes the marker back.

    Raises ConfigError: somebody wrote something else into it. What a crash leaves of it is no text,
    or the beginning of what was written.
    """
    marker = path / FINISHED
    if not marker.exists():
        return False
    text = marker.read_bytes().decode(errors="replace").strip("\0 \t\r\n")
    step = -1
    try:
        step = json.loads(text)["step"]
        valid = type(step) is int and step >= 0
    except (ValueError, KeyError, TypeError, RecursionError):
        torn = text.startswith(STEP) and "}" not in text
        valid = torn or STEP.startswith(text)
    if not valid:
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

    Raises OSError: something there is of another kind, or not ours.
    """
    check_file(path / "train.log", appended=True)
    if finished:
        return
    check_file(path / "metrics.csv", appended=True)
    for name in ("data.sha256", skips.FILE, guard.FILE):  # a rewind or a switch replaces them
        check_file(path / name, appended=False)
    folders = ["tensorboard"] * run.logging.tensorboard + [TELEMETRY] * run.stability.enabled
    for folder in (path / name for name in folders):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(folder))
    if run.stability.enabled:
        check_file(path / TELEMETRY / "records.bin", appended=True)
        check_file(path / TELEMETRY / "meta.json", appended=False)


def _record(loaded: Loaded, directory: RunDirectory, report: dict[str, Any]) -> list[str]:
    """Configuration, origins and environment of this attempt; what of the software has changed."""
    path = directory.path
    file = path / "environment.json"
    attempts: list[Any] = []
    if file.exists():
        try:
            attempts = json.loads(file.read_text())["attempts"]
        except (ValueError, KeyError, TypeError):
            os.replace(file, path / f"environment.unreadable_{time.time_ns()}.json")
    text = loaded.dump_yaml()
    records = {path / "config.yaml": text, path / "origins.yaml": loaded.dump_origins()}
    for saved in records:
        if saved.exists():
            directory._before[saved] = saved.read_text(errors="replace")
    old = directory._before.get(path / "config.yaml", text)
    if old != text:
        write_whole(path / f"config.attempt_{max(len(attempts), 1)}.yaml", old)
    for saved, content in records.items():
        write_whole(saved, content)
    before = attempts[-1] if attempts and isinstance(attempts[-1], dict) else {}
    attempts.append({"utc": utc(), **report})
    write_whole(file, json.dumps({"attempts": attempts}, indent=1) + "\n")
    return resume_rules.software_changes(before, report)


# ----------------------------------------------------------- one directory on all nodes


def _leave_tokens(run: RunConfig, directory: RunDirectory) -> dict[str, Path]:
    """Files that the other nodes look for, by the key that names the directory.

    Raises ConfigError: one cannot be made.
    """
    places = {"run_dir": directory.path}
    checkpoints = run.checkpoint_directory
    if not directory.finished and checkpoints.is_dir() and lies_outside(run):
        places["checkpoint.directory"] = checkpoints
    tokens: dict[str, Path] = {}
    for key, path in places.items():
        tokens[key] = path.absolute() / (TOKEN + uuid.uuid4().hex)
        try:
            tokens[key].touch(exist_ok=False)
        except OSError as error:
            for left in tokens.values():
                left.unlink(missing_ok=True)
            problem = Problem(key, f"{path}: {error.strerror}", may_pass=may_pass(error))
            raise ConfigError([problem]) from None
    return tokens


def _one_directory(key: str, path: Path, token: Path, layout: Layout) -> list[Problem]:
    """What speaks against every node having the first rank's directory. Collective.

    A node without the shared mount would start from scratch, or write checkpoints and logs where no
    other node finds them.
    """
    seen = layout.local_rank != 0 or sees_token(path, token.name)
    here = f"{socket.gethostname()} (rank {layout.rank}): {path.absolute()}"
    missing = [who for who in of_all("" if seen else here) if who]
    if layout.print_rank:
        token.unlink(missing_ok=True)
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

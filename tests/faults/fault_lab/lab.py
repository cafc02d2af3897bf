"""Real runs of the trainer, started in a second: ranks are forked from one that has imported all.

torch's own elastic agent (what torchrun is made of: static rendezvous, store, TERM to all ranks
when one fails) starts the ranks; each runs ``megatron_patch.launcher.rank`` with the trainer, as
under ``launch/node.sh``. Only the import of torch and Megatron is shared. The process that calls
``start`` adopts orphans, so none can hide, and gets a /dev/shm of its own where mounting is
permitted.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import json
import multiprocessing.synchronize
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from byte_corpus import byte_corpus
from free_port import free_port

ROOT = Path(__file__).resolve().parents[3]
INTERVAL, STEPS = 3, 8
SLACK = float(os.environ.get("FAULT_LAB_SLACK", "1"))
"""Factor of every limit in seconds: 1 on a machine that does nothing else."""
CONFIG = f"""\
name: demo
run_dir: run
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, ffn_hidden_size: 64,
        seq_length: 32, hidden_dropout: 0.1}}
training: {{device: cpu, precision: fp32, deterministic: true, train_steps: {STEPS},
           global_batch_size: 4, micro_batch_size: 1, eval_steps: 1}}
optimizer: {{lr: 1.0e-2, warmup_steps: 2}}
data: {{blend: [{{path: corpus}}], split: [0.9, 0.1, 0.0], num_workers: 0}}
attention: {{backend: reference}}
checkpoint: {{interval: {INTERVAL}}}
logging: {{interval: 1, tensorboard: false}}
"""
PR_SET_CHILD_SUBREAPER = 36
Hook = Callable[[int], None]


def preimport() -> None:
    """Everything a rank imports, once, in a process without threads."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron_patch.core_patches import cpu_mode

    log = logging.getLogger("megatron_patch")
    before, log.level = log.level, logging.ERROR
    cpu_mode.install()
    log.setLevel(before)
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_model
    import torch.distributed.launcher.api

    import megatron_patch.checkpoint.megatron
    import megatron_patch.cli.app
    import megatron_patch.data.prepare
    import megatron_patch.launcher.rank
    import megatron_patch.training.trainer

    end = time.monotonic() + 5
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:
        time.sleep(0.05)  # helpers of an import that are about to end
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive the forks"
    del megatron, megatron_patch, torch


def isolate() -> bool:
    """Own mount table and /dev/shm; adopt orphans. Whether mounting was permitted."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        os.unshare(os.CLONE_NEWNS)
    except OSError:
        return False
    for command in (["mount", "--make-rprivate", "/"],
                    ["mount", "-t", "tmpfs", "-o", "size=512m", "none", "/dev/shm"]):  # fmt: skip
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
    return True


def descendants() -> list[tuple[int, str]]:
    """(pid, command line or name) of every living process below this one; zombies are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:
            continue
        state, parent = text[text.rindex(")") + 2 :].split()[:2]
        pid = int(entry.parent.name)
        if state not in "ZX":
            children.setdefault(int(parent), []).append(pid)
            names[pid] = text[text.index("(") + 1 : text.rindex(")")]
    found, todo = [], [os.getpid()]
    while todo:
        for pid in children.get(todo.pop(), []):
            found.append((pid, names[pid]))
            todo.append(pid)
    return found


@dataclass
class Outcome:
    """How one attempt ended."""

    code: int
    """Exit code of the launcher; negative: killed by that signal."""
    ranks: dict[int, tuple[int, str]]
    """Rank -> exit code and reason it left; ranks that were killed left none."""
    output: str
    """All a user can read: the launcher's output, the ranks' logs, train.log."""
    seconds: float
    after_fault: float | None
    """Seconds from the fault to the end of the last process; None: no fault was planted."""
    fault: str
    timed_out: bool
    orphans: list[str]
    shm: list[str]
    done: int
    """Steps that were finished on any rank, counted from the run's begin."""
    began: int | None
    """Step this attempt resumed from; None: it did not get there."""
    fault_at: float | None = None
    """Time of the fault."""

    def line(self, pattern: str) -> str | None:
        """The first line of the output that matches."""
        for line in self.output.splitlines():
            if re.search(pattern, line):
                return line.strip()
        return None


@dataclass
class Running:
    """One attempt that has been started."""

    lab: Lab
    folder: Path
    pid: int
    began: float
    ranks: int
    status: int | None = None
    limit: float = 60.0
    extra: list[int] = field(default_factory=list)

    def poll(self) -> bool:
        """Whether the launcher has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def until(self, condition: Callable[[], Any], seconds: float = 40) -> Any:
        """Wait for a condition; its value, or None when the attempt ended first."""
        end = time.monotonic() + SLACK * seconds
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            if self.poll():
                return None
            time.sleep(0.01)
        raise TimeoutError("the condition did not come true")

    def rank_pid(self, rank: int) -> int:
        """Process of a rank, once it has started."""
        file = self.folder / f"pid.{rank}"
        text = self.until(lambda: file.exists() and file.read_text())
        return int(text) if text else 0

    def steps(self, rank: int = 0) -> int:
        """Steps this attempt has finished on a rank, as the run counts."""
        return max((int(w[1]) for w in _trace(self.folder, rank) if w[0] == "done"), default=0)

    def wait_step(self, step: int) -> None:
        """Wait until rank 0 has finished ``step``."""
        self.until(lambda: self.steps() >= step)

    def mark(self, what: str) -> None:
        """The fault happens now."""
        with contextlib.suppress(FileExistsError), (self.folder / "injected").open("x") as out:
            out.write(f"{time.time():.3f} {what}")

    def signal(self, number: signal.Signals, *, rank: int | None = None) -> None:
        """Send a signal to a rank, or to the launcher: the fault."""
        pid = self.pid if rank is None else self.rank_pid(rank)
        self.mark(f"{number.name} to {'torchrun' if rank is None else f'rank {rank}'}")
        os.kill(pid, number)

    def finish(self, limit: float | None = None, *, alone: bool = True) -> Outcome:
        """Wait for the end (kill everything at the limit), look for what stayed behind.

        Args:
            limit: seconds; default: ``self.limit``.
            alone: False while another attempt runs beside this one: nothing is looked for.
        """
        end = time.monotonic() + SLACK * (limit or self.limit)
        while not self.poll() and time.monotonic() < end:
            time.sleep(0.01)
        timed_out = not self.poll()
        if timed_out:
            kill_all()
            self.until_dead()
        ended = time.time()
        orphans = self._orphans() if alone and not timed_out else []
        shm = sorted(os.listdir("/dev/shm")) if alone and self.lab.mounts else []
        for name in shm:
            with contextlib.suppress(OSError):
                os.unlink(f"/dev/shm/{name}")
        file = self.folder / "injected"
        stamp, _, fault = file.read_text().partition(" ") if file.exists() else ("", "", "")
        begun = [int(w[1]) for w in _trace(self.folder, 0) if w[0] == "resume"]
        return Outcome(
            code=self.status if self.status is not None else -signal.SIGKILL,
            ranks=self._exits(),
            output=self._output(),
            seconds=ended - self.began,
            after_fault=ended - float(stamp) if stamp else None,
            fault=fault,
            timed_out=timed_out,
            orphans=orphans,
            shm=shm,
            done=max([self.steps(r) for r in range(self.ranks)] + begun),
            began=begun[0] if begun else None,
            fault_at=float(stamp) if stamp else None,
        )

    def until_dead(self) -> None:
        """Reap the launcher after a kill."""
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)

    def _orphans(self) -> list[str]:
        """Processes that live on a second after the launcher; they are killed."""
        end = time.monotonic() + SLACK * 1.0
        while (left := descendants()) and time.monotonic() < end:
            time.sleep(0.02)
        kill_all()
        return [name for _, name in left]

    def _exits(self) -> dict[int, tuple[int, str]]:
        found = {}
        for file in (self.folder / "exit").glob("[0-9]*"):
            if file.suffix != ".tmp":
                code, _, reason = file.read_text().strip().split(" ", 2)
                found[int(file.name)] = (int(code), reason)
        return found

    def _output(self) -> str:
        files = [self.folder / "launcher.log", *sorted(self.folder.glob("rank_*.log"))]
        parts = [f.read_text(errors="replace") for f in files if f.exists()]
        return "\n".join(parts).replace(str(self.lab.folder) + "/", "")


def kill_all() -> None:
    """Kill every process below this one, until there is none."""
    for _ in range(200):
        left = descendants()
        if not left:
            return
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _trace(folder: Path, rank: int) -> list[list[str]]:
    file = folder / f"trace.{rank}"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


class Lab:
    """A folder with a corpus and one run, and the attempts at it."""

    def __init__(self, folder: Path, *, mounts: bool = False, ranks: int = 2) -> None:
        self.folder, self.mounts, self.ranks = folder, mounts, ranks
        self.attempts = 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(CONFIG)
        if not (folder / "corpus.bin").exists():
            lines = (f"line {n} of a small text: {n * 7919}" for n in range(600))
            byte_corpus(folder / "corpus", lines)

    @property
    def run_dir(self) -> Path:
        """The run directory of the run under test."""
        return self.folder / "run"

    @property
    def store(self) -> Path:
        """Its checkpoints."""
        return self.run_dir / "checkpoints"

    def start(
        self,
        *sets: str,
        ranks: int | None = None,
        hook: Hook | None = None,
        port: int | None = None,
        environment: dict[str, str] | None = None,
        node: tuple[int, int] = (0, 1),
        address: str = "127.0.0.1",
        config: str = "run.yaml",
        signals: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ) -> Running:
        """Start one attempt.

        Args:
            sets: overrides of the configuration.
            ranks: processes; default: the lab's.
            hook: called with the rank in every rank before the trainer starts.
            port: of the rendezvous; default: a free one.
            environment: additions.
            node: (number, count) of the nodes, each started by a call of its own.
            address: of the rendezvous.
            config: file in the lab's folder.
            signals: what the agent passes on to the ranks; the default is torchrun's.
        """
        ranks = ranks or self.ranks
        if node[0] == 0:
            self.attempts += 1
        folder = self.folder / f"attempt-{self.attempts:03d}"
        (folder / "exit").mkdir(parents=True, exist_ok=True)
        program = ["megatron_patch", "train", "--config", config]
        program += [word for item in sets for word in ("--set", item)]
        job = _Job(self.folder, folder, ranks, node, address, port or free_port(), program, signals)
        sys.stdout.flush()
        sys.stderr.flush()
        began = time.time()
        pid = os.fork()
        if pid == 0:
            _agent(job, hook, environment or {})
        return Running(self, folder, pid, began, ranks * node[1])

    def run(self, *sets: str, limit: float | None = None, **options: Any) -> Outcome:
        """Start one attempt and wait for its end."""
        return self.start(*sets, **options).finish(limit)

    def result(self) -> dict[str, Any]:
        """What the run came to: digests of the ranks at the end, metrics, data by step."""
        ranks: dict[str, Any] = {}
        data: dict[str, list[str]] = {}
        folders = [self.folder / f"attempt-{n:03d}" for n in range(1, self.attempts + 1)]
        for folder in folders:
            for file in folder.glob("digest.*"):
                ranks[file.suffix[1:]] = json.loads(file.read_text())
            for file in folder.glob("trace.*"):
                for words in _trace(folder, int(file.suffix[1:])):
                    if words[0] == "begin" and len(words) == 3:
                        seen = data.setdefault(f"{file.suffix[1:]}/{words[1]}", [])
                        if words[2] not in seen:
                            seen.append(words[2])
        metrics = {}
        file = self.run_dir / "metrics.csv"
        if file.exists():
            with file.open() as lines:
                for row in csv.DictReader(lines):
                    metrics[row["step"]] = [row["loss"], row["grad_norm"], row["lr"]]
        finished = (self.run_dir / "FINISHED").exists()
        return {"ranks": ranks, "data": data, "metrics": metrics, "finished": finished}


@dataclass(frozen=True)
class _Job:
    work: Path
    folder: Path
    ranks: int
    node: tuple[int, int]
    address: str
    port: int
    program: list[str]
    signals: str


def _agent(job: _Job, hook: Hook | None, environment: dict[str, str]) -> None:
    """The launcher process: torch's elastic agent. Never returns."""
    code = 1
    try:
        os.setsid()
        log = os.open(job.folder / "launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(job.work)
        os.environ.update(environment)
        os.environ["MEGATRON_PATCH_ATTEMPT_DIR"] = str(job.folder)
        os.environ["MEGATRON_PATCH_HEARTBEAT"] = str(job.folder / "step")
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=job.node[1],
            max_nodes=job.node[1],
            nproc_per_node=job.ranks,
            run_id="lab",
            rdzv_backend="static",
            rdzv_endpoint=f"{job.address}:{job.port}",
            rdzv_configs={"rank": job.node[0], "timeout": 20},
            max_restarts=0,
            monitor_interval=0.1,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=str(job.folder / f"torch-{job.node[0]}")),
            signals_to_handle=job.signals,
        )
        elastic_launch(config, _rank)(job.folder, job.program, hook)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rank(folder: Path, program: list[str], hook: Hook | None) -> None:
    """One rank: what ``python -m megatron_patch.launcher.rank PROGRAM`` does, recorded."""
    from fault_lab import hooks
    from megatron_patch.launcher import rank

    # Forked workers wait for each other at their end, those that torchrun starts do not.
    multiprocessing.synchronize.Event.wait = lambda *args: True  # type: ignore[assignment]
    number = int(os.environ["RANK"])
    hooks.record(folder, number)
    if hook is not None:
        hook(number)
    sys.exit(rank.main(program))


def compare(expected: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Differences of two ``Lab.result``; none: the same in every bit, and every step once."""
    for key in ("finished", "metrics"):
        if expected[key] != found[key]:
            yield key
    for rank, wanted in expected["ranks"].items():
        got = found["ranks"].get(rank, {})
        yield from (f"{key} of rank {rank}" for key in wanted if wanted[key] != got.get(key))
    for place, hashes in expected["data"].items():
        if found["data"].get(place) != hashes:
            yield f"data of rank/step {place}: {found['data'].get(place)} instead of {hashes}"
